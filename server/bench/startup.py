"""Seconds from the start of a process to its first token, phase by phase, against what imports alone take.

Every reading is of a new process. The engine says itself where its phases end (`runtime.start_phases`).
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from treadle.ir.errors import TreadleError
from treadle.server.bench.summary import Summary, summarise

IMPORTS = ("torch", "transformers")
FIRST_TOKEN = "first token"
START_SECONDS = 600
PROMPT = "The capital of France is"

_PHASE = re.compile(r"start phase '(.+)' ended at (\d+\.\d+)")
_LISTENING = re.compile(r"serving .* on (http://\S+)")

_LLM = f"""
import logging, sys
logging.basicConfig(level=logging.WARNING, format="%(message)s")
logging.getLogger("treadle.runtime.start_phases").setLevel(logging.DEBUG)
from treadle.runtime.start_phases import phase_ended
phase_ended("start the interpreter")
from treadle import LLM, SamplingParams
phase_ended("import the front end")
llm = LLM(sys.argv[1])
phase_ended("ready")
prompt = {PROMPT!r} if llm.renderer is not None else [1, 2, 3, 4, 5]
llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), use_tqdm=False)
phase_ended({FIRST_TOKEN!r})
"""

Ends = dict[str, float]
"""Phase -> seconds from the start of the process to its end, in the order of time."""


def measure_startup(bundle: str, repeats: int, kinds: Sequence[str]) -> dict[str, Any]:
    """Each kind of process `repeats` times, all kinds in turn. `kinds` are of `KINDS`; imports are always measured.

    `own_seconds` is a start to its first token less `import torch` in the same round.
    """
    imports: dict[str, list[float]] = {name: [] for name in IMPORTS}
    starts: dict[str, list[Ends]] = {kind: [] for kind in kinds}
    for _ in range(repeats):
        for name, seen in imports.items():
            seen.append(import_seconds(name))
        for kind, runs in starts.items():
            runs.append(KINDS[kind](bundle))
    found: dict[str, Any] = {f"import {name}": summarise(seen) for name, seen in imports.items()}
    for kind, runs in starts.items():
        own = [run[FIRST_TOKEN] - alone for run, alone in zip(runs, imports["torch"], strict=True)]
        found[kind] = {"phases": phase_rows(runs), "own_seconds": summarise(own)}
        for point in ("ready", FIRST_TOKEN):
            found[kind][f"to_{point.replace(' ', '_')}_seconds"] = summarise([run[point] for run in runs])
    return found


def phase_rows(runs: Sequence[Ends]) -> list[dict[str, Any]]:
    """For each phase that every run has, in the order of the first run: seconds it took, and seconds to its end."""
    rows = []
    shared = [phase for phase in runs[0] if all(phase in run for run in runs)]
    for before, phase in zip([None, *shared], shared, strict=False):
        took = [run[phase] - (run[before] if before else 0.0) for run in runs]
        rows.append({"phase": phase, "seconds": summarise(took), "ends_at": summarise([run[phase] for run in runs])})
    return rows


def import_seconds(name: str) -> float:
    """Seconds from the start of a process until it has imported a package."""
    start = time.time()
    done = _run([sys.executable, "-c", f"import {name}, time; print(time.time())"])
    return float(done.stdout.split()[-1]) - start


def start_llm(bundle: str) -> Ends:
    """A process that makes an `LLM` and generates one token."""
    start = time.time()
    return ends(_run([sys.executable, "-c", _LLM, bundle]).stderr, start)


def start_serve(bundle: str) -> Ends:
    """`treadle serve`, asked for one token as soon as it listens. `ready` is when it listens."""
    command = [sys.executable, "-m", "treadle.server.cli", "--log-level", "DEBUG", "serve", bundle, "--port", "0"]
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as log:
        with open(log.name, "w") as writer:
            start = time.time()
            process = subprocess.Popen(command, stderr=writer, stdout=subprocess.DEVNULL)
        try:
            url = _wait_for_address(process, log.name)
            ready = time.time() - start
            body = json.dumps({"prompt": PROMPT, "max_tokens": 1, "temperature": 0}).encode()
            request = urllib.request.Request(url + "/v1/completions", body, {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=START_SECONDS).read()
            first = time.time() - start
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
        return ends(log.read(), start) | {"ready": ready, FIRST_TOKEN: first}


KINDS = {"llm": start_llm, "serve": start_serve}
"""Name -> starts a bundle in new processes and returns the ends of its phases."""


def ends(log: str, start: float) -> Ends:
    """The phases that a log tells of. A phase that several processes end counts when the last of them has."""
    found: Ends = {}
    for phase, at in _PHASE.findall(log):
        found[phase] = max(found.get(phase, 0.0), float(at) - start)
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS)
    if done.returncode:
        raise TreadleError(f"a measured process ended with exit code {done.returncode}: {_last_line(done.stderr)}")
    return done


def _wait_for_address(process: subprocess.Popen[bytes], log: str) -> str:
    deadline = time.monotonic() + START_SECONDS
    text = ""
    while time.monotonic() < deadline:
        with open(log, encoding="utf-8") as reader:
            text = reader.read()
        if found := _LISTENING.search(text):
            return found[1]
        if process.poll() is not None:
            raise TreadleError(f"the server ended with exit code {process.returncode}: {_last_line(text)}")
        time.sleep(0.005)
    raise TreadleError(f"the server did not listen within {START_SECONDS} s: {_last_line(text)}")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it wrote nothing"])[-1]


def startup_lines(results: Mapping[str, Any]) -> list[str]:
    """What `bench startup` prints: medians in seconds."""
    lines = [f"{name:<34}{results[name]['median']:9.3f} s" for name in results if name.startswith("import ")]
    for kind in (name for name in results if name in KINDS):
        lines += ["", f"{kind:<34}{'seconds':>9}{'ends at':>11}"]
        for row in results[kind]["phases"]:
            lines.append(f"  {row['phase']:<32}{row['seconds']['median']:9.3f}{row['ends_at']['median']:11.3f}")
        own: Summary = results[kind]["own_seconds"]
        lines.append(f"  first token, less import torch: {own['median']:.3f} s (from {own['min']:.3f} to {own['max']:.3f})")
    return lines
