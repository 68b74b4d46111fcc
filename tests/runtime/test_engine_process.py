"""The core as a process of its own: it ends with its parent, drains on request, survives bad frames, reports a failing step."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from tests.runtime.toy_model import FailingExecutor, SlowToyExecutor, toy_config
from treadle.ir.errors import EngineDeadError
from treadle.runtime.engine.core_client import ProcessClient
from treadle.runtime.engine.core_process import CoreProcess, CoreStart
from treadle.runtime.protocol import CoreOutput, CoreRequest, EngineDied
from treadle.runtime.sampling_params import SamplingParams

pytestmark = pytest.mark.slow


class Harness:
    """A client whose outputs are kept by request."""

    def __init__(self, executor):
        self.outputs: dict[str, list[CoreOutput]] = {}
        self.deaths: list[str] = []
        self.client = ProcessClient(toy_config(executor), self._take, self.deaths.append)

    async def _take(self, outputs: list[CoreOutput]) -> None:
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)

    def add(self, req_id: str, prompt: list[int], max_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.client.add_request(
            CoreRequest(request_id=req_id, prompt_token_ids=prompt, sampling_params=params, arrival_time=0.0)
        )

    def tokens(self, req_id: str) -> list[int]:
        return [t for output in self.outputs.get(req_id, []) for t in output.new_token_ids]

    async def until(self, check, seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while not check():
            assert time.monotonic() < end, "did not happen in time"
            await asyncio.sleep(0.01)


def run(body, executor=SlowToyExecutor) -> None:
    async def main() -> None:
        harness = Harness(executor)
        try:
            await harness.client.start()
            await body(harness)
        finally:
            harness.client.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_drain_finishes_running_requests_and_refuses_new_ones():
    """C04-09: a shutdown with time to drain loses no token of a running request; the sockets are private."""

    async def body(harness: Harness) -> None:
        assert stat.S_IMODE(os.stat(harness.client._folder).st_mode) == 0o700
        harness.add("running", [1], 60)
        await harness.until(lambda: harness.tokens("running"))
        closing = asyncio.create_task(harness.client.shutdown(drain=20.0))
        await asyncio.sleep(0.1)
        harness.add("late", [2], 5)
        await closing
        assert len(harness.tokens("running")) == 60
        assert harness.outputs["late"][0].finish_reason == "error"
        assert "shutting down" in (harness.outputs["late"][0].error or "")
        assert harness.deaths == [] and harness.client._process.returncode == 0

    run(body)


def test_sigterm_drains_and_a_deadline_aborts():
    """TRAP-17: a signal ends the core in an orderly way, and is reported, as nobody asked the client for it."""

    async def body(harness: Harness) -> None:
        harness.add("a", [1], 30)
        await harness.until(lambda: harness.tokens("a"))
        os.kill(harness.client.pid, signal.SIGINT)  # Ctrl-C reaches the whole group: the core leaves it to its parent
        os.kill(harness.client.pid, signal.SIGTERM)
        await harness.until(lambda: harness.deaths)
        assert len(harness.tokens("a")) == 30 and "status 0" in harness.deaths[0]

    run(body)

    async def hurried(harness: Harness) -> None:
        harness.add("a", [1], 200)
        await harness.until(lambda: harness.tokens("a"))
        await harness.client.shutdown(drain=0.05)
        assert harness.outputs["a"][-1].finish_reason == "abort"

    run(hurried)


def test_a_failing_step_is_reported_with_its_reason():
    """C04-09: the client learns why within seconds; nothing hangs."""

    async def body(harness: Harness) -> None:
        harness.add("fine", [1], 200)
        harness.add("fatal", [13], 5)
        await harness.until(lambda: harness.deaths, 5.0)
        assert harness.deaths == ["a step failed: RuntimeError: boom"]
        with pytest.raises(EngineDeadError, match="boom"):
            harness.add("next", [1], 1)
        await harness.until(lambda: harness.client._process.poll() is not None)
        assert harness.client._process.returncode == 1

    run(body, FailingExecutor)


PARENT = """
import asyncio, os, sys
from tests.runtime.test_engine_process import Harness
from tests.runtime.toy_model import SlowToyExecutor

async def main():
    harness = Harness(SlowToyExecutor)
    await harness.client.start()
    print(harness.client.pid, harness.client._folder, flush=True)
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""


def test_the_core_ends_when_its_parent_dies():
    """C04-09: killed without a word, the front end takes the core and its sockets with it."""
    parent = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True, timeout=60)
    assert parent.returncode == -9, parent.stderr
    pid, folder = parent.stdout.split()
    end = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < end, "the core outlived its parent"
        time.sleep(0.05)
    assert not Path(folder).exists()


class FakeCore:
    """Records what the process does with frames."""

    def __init__(self):
        self.rejected: list[tuple[str, str]] = []

    def reject(self, request_id: str, error: str) -> None:
        self.rejected.append((request_id, error))


def test_malformed_frames_end_nothing_but_themselves(tmp_path):
    """A request that does not decode is answered with an error; anything else is dropped."""
    process, core = CoreProcess(CoreStart(config={}, folder=str(tmp_path))), FakeCore()
    encode = msgspec.msgpack.encode
    process._handle(core, encode({"type": "request", "request_id": "a", "prompt_token_ids": "x"}))
    process._handle(core, encode({"type": "nonsense"}))
    process._handle(core, encode([1, 2, 3]))
    process._handle(core, b"\xc1")
    assert [req_id for req_id, _ in core.rejected] == ["a"] and "malformed" in core.rejected[0][1]


def test_start_message_and_death_cross_the_border_as_plain_data():
    """R-4.4: control messages are plain data, with no pickle."""
    start = CoreStart(config={"bundle": "b", "executor": "uni"}, folder="/f")
    assert json.loads(msgspec.json.encode(start))["config"] == {"bundle": "b", "executor": "uni"}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(EngineDied(reason="x"))) == {"type": "died", "reason": "x"}
