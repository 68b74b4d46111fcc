"""Worker processes that compile: each runs one Python module, takes JSON requests and answers them one by one.

They get a clean environment: no secret of the caller reaches them, and every cache they know of is inside the scratch
folder. A worker ends when its parent does.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treadle.ir.errors import ArtifactError

_INHERITED = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH")
_STDERR_LINES = 12


class WorkerPool:
    """At most `jobs` workers, started when first needed. `call` may be used from many threads."""

    def __init__(self, module: str, jobs: int, scratch: Path, environment: Mapping[str, str]):
        self._module = module
        self._scratch = scratch
        self._environment = environment
        self._slots: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        self._threads: list[threading.Thread] = []
        for _ in range(jobs):
            self._slots.put(None)

    def start(self, requests: Sequence[Mapping[str, Any]]) -> None:
        """Sends preparatory requests in the background; their failure shows when a later call fails for the same reason."""
        for request in requests:
            thread = threading.Thread(target=self._prepare, args=(dict(request),), daemon=True)
            thread.start()
            self._threads.append(thread)

    def call(self, request: Mapping[str, Any], label: str) -> dict[str, Any]:
        """Sends one request to a free worker and returns its answer. Raises ArtifactError naming `label` on failure."""
        worker = self._slots.get()
        try:
            worker = worker or _Worker(self._module, self._scratch, self._environment)
            answer = worker.ask(request, label)
        except BaseException:
            if worker is not None:
                worker.stop()
            worker = None
            raise
        finally:
            self._slots.put(worker)
        if "error" in answer:
            raise ArtifactError(f"compiling {label} failed: {answer['error']}")
        return answer

    def close(self) -> None:
        """Stops the workers, also in the middle of a request."""
        for worker in list(_Worker.running):
            if worker.scratch == self._scratch:
                worker.stop()
        for thread in self._threads:
            thread.join(timeout=10)

    def _prepare(self, request: Mapping[str, Any]) -> None:
        try:
            self.call(request, "headers")
        except ArtifactError as error:
            with open(self._scratch / "prepare.log", "a") as log:
                log.write(f"{error}\n")


class _Worker:
    """One process. Requests go to its stdin, answers come from its stdout, everything else it says to a log."""

    running: set[_Worker] = set()  # noqa: RUF012
    _count = 0

    def __init__(self, module: str, scratch: Path, environment: Mapping[str, str]):
        _Worker._count += 1
        self.scratch = scratch
        self._log = scratch / f"worker-{_Worker._count}.log"
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_worker_environment(scratch, environment),
                cwd=scratch,
                start_new_session=True,
            )
        self.running.add(self)

    def ask(self, request: Mapping[str, Any], label: str) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except (BrokenPipeError, ValueError):
            line = b""
        if not line:
            raise ArtifactError(f"compiling {label} failed: its worker ended unexpectedly{self._last_words()}")
        return json.loads(line)

    def stop(self) -> None:
        """Ends the process and whatever compiler it has started."""
        self.running.discard(self)
        if self._process.poll() is None:
            os.killpg(self._process.pid, 9)
        self._process.wait()

    def _last_words(self) -> str:
        status = self._process.wait()
        lines = self._log.read_text(errors="replace").splitlines()[-_STDERR_LINES:]
        return f" with status {status}" + "".join(f"\n  {line}" for line in lines)


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
        "TORCHINDUCTOR_CACHE_DIR": str(private / "inductor"),
        "TRITON_CACHE_DIR": str(private / "triton"),
        "XDG_CACHE_HOME": str(private / "cache"),
        "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path if path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        **extra,
    }
