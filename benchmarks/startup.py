"""Time from process start to the first token, by phase, for `LLM` and for `treadle serve`, each in new processes.

python -m benchmarks.startup BUNDLE [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from treadle.kernels.cpu_features import local_cpu

PROMPT = "The capital of France is"
OFFLINE = f"""
import sys, time
def show(phase): print(phase, time.time(), flush=True)
show("interpreter")
from treadle import LLM, SamplingParams
show("imports")
llm = LLM(sys.argv[1])
show("ready")
llm.generate([{PROMPT!r}], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
show("first token")
"""


def time_llm(bundle: Path) -> dict[str, float]:
    """Seconds from the start of the process to each phase."""
    start = time.time()
    shown = subprocess.run([sys.executable, "-c", OFFLINE, str(bundle)], capture_output=True, text=True, check=True)
    lines = (line.rpartition(" ") for line in shown.stdout.splitlines())
    return {phase: float(at) - start for phase, _, at in lines}


def time_serve(bundle: Path) -> dict[str, float]:
    """The same for a server: listening, then the first token of a request sent at once."""
    command = [sys.executable, "-m", "treadle.server.cli", "serve", str(bundle), "--port", "0"]
    with tempfile.TemporaryFile("w+") as log:
        start = time.time()
        process = subprocess.Popen(command, stderr=log)
        try:
            url = _address(process, log.fileno())
            ready = time.time() - start
            body = json.dumps({"prompt": PROMPT, "max_tokens": 1, "temperature": 0}).encode()
            request = urllib.request.Request(url + "/v1/completions", body, {"Content-Type": "application/json"})
            urllib.request.urlopen(request).read()
            return {"ready": ready, "first token": time.time() - start}
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def _address(process: subprocess.Popen[bytes], log: int) -> str:
    while process.poll() is None:
        text = os.pread(log, 1 << 20, 0).decode()
        if found := re.search(r"serving .* on (http://\S+)", text):
            return found[1]
        time.sleep(0.005)
    raise SystemExit(f"the server did not start: {os.pread(log, 1 << 20, 0).decode()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    cpu = local_cpu()
    print(f"{cpu.arch} {cpu.isa}, {len(os.sched_getaffinity(0))} processors, load {os.getloadavg()[0]:.1f}")
    for name, measure in (("LLM", time_llm), ("serve", time_serve)):
        runs = [measure(args.bundle) for _ in range(args.repeats)]
        best = min(runs, key=lambda run: run["first token"])
        print(f"{name:6s} " + "  ".join(f"{phase} {seconds:5.2f} s" for phase, seconds in best.items()))


if __name__ == "__main__":
    main()
