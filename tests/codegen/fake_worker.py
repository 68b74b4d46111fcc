"""A worker that does as it is told, for the tests of the pool."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from treadle.codegen.fork_server import serve


def names(request: dict[str, Any]) -> dict[str, Any]:
    return {"names": [os.environ.get(name, "") for name in request["ask"]], "secret": "secret" in os.environ.values()}


def fail(request: dict[str, Any]) -> None:
    raise ValueError("no such header\n" + "x" * 100_000)


def sleep(request: dict[str, Any]) -> dict[str, Any]:
    time.sleep(request["seconds"])
    return {"pid": os.getpid()}


def die(request: dict[str, Any]) -> None:
    os._exit(3)


def end_all(request: dict[str, Any]) -> None:
    print("last words", file=sys.stderr, flush=True)
    os._exit(4)


WARM: list[str] = []


def warm(request: dict[str, Any]) -> dict[str, Any]:
    WARM.append("yes")
    return {"pid": os.getpid()}


def warmth(request: dict[str, Any]) -> dict[str, Any]:
    return {"warm": WARM, "pid": os.getppid()}


if __name__ == "__main__":
    OPERATIONS = {"names": names, "fail": fail, "sleep": sleep, "die": die, "end_all": end_all, "warm": warm, "warmth": warmth}
    serve(OPERATIONS, inline=("warm", "end_all"))
