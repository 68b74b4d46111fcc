"""A server process from start to end: drain, signals, exit codes, the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.tiny_tokenizer import write_tokenizer
from treadle.server.lazy_commands import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
STREAM = {"prompt": "hi", "max_tokens": 50, "ignore_eos": True, "stream": True}


class Process:
    def __init__(self, folder: Path, *, delay: float, drain: float):
        command = [sys.executable, "-m", "tests.server.serve_fake", str(folder), str(delay), str(drain)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self.process.stdout is not None
        self.base_url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                self.get("/ready")
                return
            except httpx.ConnectError:
                time.sleep(0.05)
        raise AssertionError("the server did not start")

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.base_url + path, timeout=10, verify=False)

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def exit_code(self) -> int:
        return self.process.wait(timeout=15)


@pytest.fixture
def start_process(tmp_path: Path) -> Iterator[Any]:
    started: list[Process] = []

    def start(**options: float) -> Process:
        started.append(Process(write_tokenizer(tmp_path), **options))
        return started[-1]

    yield start
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def stream(server: Process) -> Iterator[str]:
    with httpx.stream("POST", server.base_url + "/v1/completions", json=STREAM, timeout=30, verify=False) as response:
        assert response.status_code == 200
        yield from (line.removeprefix("data: ") for line in response.iter_lines() if line)


def test_drain(start_process: Any) -> None:
    """TRAP-17: after SIGTERM a running stream ends whole, new requests get a 503, and the exit code is 0."""
    server = start_process(delay=0.03, drain=30)
    events = []
    for event in stream(server):
        events.append(event)
        if len(events) == 3:
            server.send(signal.SIGTERM)
            time.sleep(0.4)
            assert server.get("/ready").status_code == 503
            refusal = httpx.post(server.base_url + "/v1/completions", json={"prompt": "x"}, verify=False)
            assert refusal.status_code == 503 and refusal.json()["error"]["code"] == "shutting_down"
            assert server.get("/health").status_code == 200
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
    assert server.exit_code() == 0


def test_a_drain_that_takes_too_long_cuts(start_process: Any) -> None:
    """At the end of the drain a stream gets an error, not silence, and the exit code is still 0."""
    server = start_process(delay=0.2, drain=0.3)
    events = []
    for event in stream(server):
        events.append(event)
        if len(events) == 1:
            server.send(signal.SIGTERM)
    assert json.loads(events[-2])["error"]["code"] == "aborted"
    assert server.exit_code() == 0


def test_a_second_signal_ends_at_once(start_process: Any) -> None:
    """Two signals end the process without waiting for the drain."""
    server = start_process(delay=0.5, drain=60)
    events = stream(server)
    next(events)
    server.send(signal.SIGINT)
    time.sleep(0.5)
    server.send(signal.SIGINT)
    assert server.exit_code() == 2
    with pytest.raises(httpx.RemoteProtocolError):
        list(events)


def test_engine_death_ends_the_process(start_process: Any) -> None:
    """TRAP-17: the engine's death shows in /health first, and then as a non-zero exit code."""
    server = start_process(delay=0.05, drain=5)
    server.send(signal.SIGUSR1)
    time.sleep(0.2)
    assert server.get("/health").status_code == 503
    assert server.exit_code() == 1


def treadle(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "treadle.server.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment}, timeout=60)


def test_help_is_light() -> None:
    """`treadle --help` names every command and imports none of what they need."""
    shown = treadle("--help")
    assert shown.returncode == 0
    assert all(name in shown.stdout for name in COMMANDS)
    heavy = "{'torch', 'transformers', 'fastapi', 'uvicorn', 'tokenizers', 'numpy'}"
    code = f"import sys, treadle.server.cli; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_the_server_process_is_light() -> None:
    """Neither torch nor transformers is imported by what `treadle serve` runs in its own process."""
    modules = "treadle.server.commands_serve, treadle.server.launch, treadle.runtime.engine.async_engine"
    code = f"import sys, {modules}; assert not {{'torch', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_bad_command_lines() -> None:
    """Unknown commands and options are 2; what a user can fix is one line and 1, without a traceback."""
    assert treadle("nonsense").returncode == 2
    assert treadle("serve", "x", "--nonsense").returncode == 2
    for arguments in (("serve", "/nowhere", "--require-artifacts"), ("serve", "/nowhere", "--require-artifacts", "--port", "0")):
        shown = treadle(*arguments)
        assert shown.returncode == 1 and "is not a bundle" in shown.stderr and "Traceback" not in shown.stderr


def test_paths_that_cannot_be_used_are_one_line(tmp_path: Path) -> None:
    """What the system refuses names the path and is no traceback."""
    (tmp_path / "file").write_text("")
    shown = treadle("cache", "verify", "--store", str(tmp_path / "file" / "store"))
    assert shown.returncode == 1 and str(tmp_path / "file") in shown.stderr and "Traceback" not in shown.stderr
    shown = treadle("generate", "/nowhere", "--prompt", "x", "--temperature", "-1")
    assert shown.returncode == 1 and "temperature" in shown.stderr and "Traceback" not in shown.stderr


def test_an_api_key_is_not_inherited_or_logged() -> None:
    """Issue line 8: the key of the environment is taken out of it and appears in no output."""
    code = (
        "import os; from treadle.server.environment import take_api_keys; "
        "assert take_api_keys() == ('key-5511', 'b'); assert 'TREADLE_API_KEY' not in os.environ"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env={**os.environ, "TREADLE_API_KEY": "key-5511, b"})
    shown = treadle("--log-level", "DEBUG", "serve", "/nowhere", "--require-artifacts", TREADLE_API_KEY="key-5511")
    assert "5511" not in shown.stdout + shown.stderr


def test_doctor(tmp_path: Path) -> None:
    """The report names versions, processor, compiler, store and memory; the exit code says whether serving works."""
    shown = treadle("doctor", "--json", XDG_CACHE_HOME=str(tmp_path))
    findings = {finding["name"]: finding for finding in json.loads(shown.stdout)}
    assert {"python", "torch", "processor", "c++ compiler", "store", "memory"} <= set(findings)
    assert str(tmp_path) in findings["store"]["detail"]
    assert shown.returncode == any(finding["status"] == "fail" for finding in findings.values())
    without = json.loads(treadle("doctor", "--json", PATH="/nowhere").stdout)
    assert {"warn"} == {finding["status"] for finding in without if finding["name"] == "c++ compiler"}
