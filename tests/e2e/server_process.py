"""A real `treadle serve` process on a loopback port, and what the tests ask of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[2]
SERVING = re.compile(r"serving .* on (http://\S+)")


class ServerProcess:
    """`treadle serve BUNDLE` with `options` as flags. `log()` is what it has written so far, on both streams.

    `environment` replaces the test's own if given; `prelude` is Python run in the process first.
    """

    def __init__(
        self, bundle: Path, *, environment: Mapping[str, str] | None = None, prelude: str = "", **options: Any
    ):
        code = f"{prelude}\nfrom treadle.server.cli import main; main()"
        flags = [str(word) for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by stop
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "serve", str(bundle), "--port", "0", *flags],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=dict(environment if environment is not None else os.environ),
        )
        self.base_url = ""

    def wait_ready(self, within: float = 60.0) -> None:
        """Returns once the server listens. Raises AssertionError with its log if it ends or takes too long."""
        deadline = time.monotonic() + within
        while (found := SERVING.search(self.log())) is None:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log()
            time.sleep(0.02)
        self.base_url = found[1]

    def log(self) -> str:
        with open(f"/proc/self/fd/{self._log.fileno()}", encoding="utf-8") as reader:
            return reader.read()

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.base_url, timeout=120, **options)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.base_url + path, json=body, timeout=120)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.base_url + path, timeout=10)

    def metric(self, name: str) -> float:
        """The value of a metric without labels."""
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(name + " "):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric {name}")

    def is_idle(self) -> bool:
        """Whether nothing runs or waits and every KV block is free."""
        gauges = ("num_requests_running", "num_requests_waiting", "http_requests_inflight")
        lost = self.metric("treadle_kv_blocks") - self.metric("treadle_kv_blocks_free")
        return lost == 0 and not any(self.metric(f"treadle_{name}") for name in gauges)

    def core(self) -> psutil.Process:
        """The engine core's process."""
        (core,) = psutil.Process(self.process.pid).children()
        return core

    def exit_code(self, within: float = 30.0) -> int:
        return self.process.wait(timeout=within)

    def stop(self) -> None:
        """Ends the process, if it has not ended, and removes its log."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._log.close()


@contextmanager
def serving(bundle: Path, **options: Any) -> Iterator[ServerProcess]:
    """A server that is ready, stopped at the end."""
    server = ServerProcess(bundle, **options)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def eventually(check: Callable[[], Any], within: float = 5.0) -> None:
    """Returns once `check` holds. Raises AssertionError after `within` seconds."""
    deadline = time.monotonic() + within
    while not check():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
