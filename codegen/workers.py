"""The parent's side of a worker process that compiles: starts it when first needed, asks it from many threads.

It gets a clean environment: no secret of the caller reaches it, and every cache it knows of is inside the scratch
folder. See fork_server for the other side.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treadle.ir.errors import ArtifactError

_INHERITED = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH")
_LOG_LINES = 12


class WorkerPool:
    """At most `jobs` requests at once to a process that runs `module`. `first` is sent to it whenever it is started."""

    def __init__(
        self,
        module: str,
        jobs: int,
        scratch: Path,
        environment: Mapping[str, str],
        first: Sequence[Mapping[str, Any]] = (),
    ):
        self._module = module
        self._scratch = scratch
        self._environment = environment
        self._first = list(first)
        self._slots = threading.BoundedSemaphore(jobs)
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def start(self, requests: Sequence[Mapping[str, Any]] = ()) -> None:
        """Starts the process now and gives it preparatory requests. Nobody waits for those: if one fails, a later call
        fails for the same reason or does without.
        """
        with self._lock:
            self._started(list(requests))

    def call(self, request: Mapping[str, Any], label: str) -> dict[str, Any]:
        """Sends a request and waits for the answer. Raises ArtifactError naming `label` on failure."""
        answer = self.ask(request)
        if "error" in answer:
            raise ArtifactError(f"compiling {label} failed: {answer['error']}")
        return answer

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a request and waits for the answer, which has an `error` on failure, and the `status` of a fork that died."""
        with self._slots:
            with self._lock:
                reply = self._started([]).send(request)
            return reply.get()

    def close(self) -> None:
        """Ends the process and everything it has started, also in the middle of a request."""
        with self._lock:
            if self._process is not None:
                self._process.stop()
                self._process = None

    def _started(self, requests: list[Mapping[str, Any]]) -> _Process:
        """The running process, a new one if there is none or it has died."""
        if self._process is None or not self._process.alive:
            self._process = _Process(self._module, self._scratch, self._environment)
            requests = [*requests, *self._first]
        for request in requests:
            self._process.send(request)
        return self._process


class _Process:
    """One process. Requests go to its stdin, answers come from its stdout, everything else it says to a log."""

    def __init__(self, module: str, scratch: Path, environment: Mapping[str, str]):
        self._log = scratch / "worker.log"
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_worker_environment(scratch, environment),
                cwd=scratch,
                start_new_session=True,
            )
        self.alive = True
        self._count = 0
        self._waiting: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read_answers, daemon=True)
        self._reader.start()

    def send(self, request: Mapping[str, Any]) -> queue.SimpleQueue[dict[str, Any]]:
        """Sends a request; the answer will come through the queue. Callers take turns."""
        reply: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with self._lock:
            self._count += 1
            self._waiting[self._count] = reply
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({**request, "id": self._count}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail_all()
        return reply

    def stop(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            with self._lock:
                reply = self._waiting.pop(answer.pop("id"))
            reply.put(answer)
        self._fail_all()

    def _fail_all(self) -> None:
        """The process is gone: everybody who waits hears of it."""
        self.alive = False
        reason = f"its worker ended unexpectedly with status {self._process.wait()}{self._last_words()}"
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        for reply in waiting.values():
            reply.put({"error": reason})

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return "".join(f"\n  {line}" for line in lines[-_LOG_LINES:])


def _worker_environment(scratch: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """Only what a compiler needs; HOME, temporary files and caches are private."""
    private = scratch / "private"
    (private / "tmp").mkdir(parents=True, exist_ok=True)
    kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    return {
        **kept,
        "HOME": str(private),
        "USER": "treadle",
        "TMPDIR": str(private / "tmp"),
        "XDG_CACHE_HOME": str(private / "cache"),
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path if path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        **extra,
    }
