"""A worker that does as it is told, for the tests of the pool."""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if request["op"] == "environment":
            answer = {"environment": dict(os.environ), "pid": os.getpid()}
        elif request["op"] == "fail":
            answer = {"error": "CppCompileError: no such header"}
        elif request["op"] == "sleep":
            time.sleep(request["seconds"])
            answer = {"pid": os.getpid()}
        else:
            print("last words", file=sys.stderr)
            os._exit(3)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
