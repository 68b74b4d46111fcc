"""The async front end over a core process with a toy model: streams, aborts, slow readers, identity, death."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable

import pytest

from tests.runtime.toy_model import SlowToyExecutor, UnstartableExecutor, toy_config
from tests.server.tiny_tokenizer import write_tokenizer
from treadle.ir.errors import BundleError, EngineDeadError, UserError
from treadle.runtime.config import EngineConfig
from treadle.runtime.engine.async_engine import AsyncEngine, OutputQueue
from treadle.runtime.engine.llm import LLM
from treadle.runtime.outputs import CompletionOutput, RequestOutput
from treadle.runtime.renderer import Renderer
from treadle.runtime.sampling_params import RequestOutputKind, SamplingParams

pytestmark = pytest.mark.slow

LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory) -> Renderer:
    return Renderer.load(write_tokenizer(tmp_path_factory.mktemp("model") / "tokenizer"))


def with_engine(renderer: Renderer, body: Callable[[AsyncEngine], Awaitable[None]], executor=SlowToyExecutor) -> None:
    """Runs `body` over a new engine; afterwards no process and no socket may be left."""

    async def run() -> None:
        engine = AsyncEngine(toy_config(executor), load_renderer=lambda config: renderer)
        try:
            await engine.wait_ready()
            await body(engine)
        finally:
            await engine.shutdown()
        assert engine._client._process is not None and engine._client._process.poll() is not None
        assert not os.path.exists(engine._client._folder)

    asyncio.run(asyncio.wait_for(run(), 60))


async def collect(engine: AsyncEngine, prompt, params: SamplingParams, request_id: str) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params, request_id)]


async def until(check: Callable[[], Awaitable[bool]], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not await check():
        assert time.monotonic() < end, "did not happen in time"
        await asyncio.sleep(0.02)


async def is_idle(engine: AsyncEngine) -> bool:
    stats = await engine.stats()
    return stats.num_running == stats.num_waiting == 0 and stats.num_free_blocks == stats.num_blocks


def test_a_life_of_many_streams(renderer):
    """C02-02, TRAP-05, TRAP-14, TRAP-16: one engine, one story, since starting it takes seconds."""

    async def body(engine: AsyncEngine) -> None:
        await streams_equal_the_offline_texts(engine, renderer)
        await concurrent_requests_keep_their_own_text(engine)
        await leaving_a_stream_frees_it(engine)
        await an_abort_ends_the_reader(engine)
        await a_duplicate_id_is_refused(engine)
        await bad_requests_leave_the_engine_alone(engine)
        await a_slow_reader_gets_everything(engine)
        await utilities_answer(engine)
        await is_idle(engine)
        await engine.check_integrity()

    with_engine(renderer, body)


async def streams_equal_the_offline_texts(engine: AsyncEngine, renderer: Renderer) -> None:
    with LLM.from_config(toy_config(SlowToyExecutor), renderer) as llm:
        [offline] = llm.generate("the quick fox", SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    deltas = await collect(engine, "the quick fox", params, "same")
    assert "".join(d.outputs[0].text for d in deltas) == offline.outputs[0].text
    assert [t for d in deltas for t in d.outputs[0].token_ids] == offline.outputs[0].token_ids
    assert len(deltas) > 1 and deltas[-1].finished and deltas[-1].metrics.first_token_latency > 0


async def concurrent_requests_keep_their_own_text(engine: AsyncEngine) -> None:
    seeded = SamplingParams(temperature=0.9, seed=11, max_tokens=12, ignore_eos=True)
    [alone] = (await collect(engine, [5, 6], seeded, "alone"))[-1].outputs
    free = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, n=2)
    tasks = [collect(engine, [5, 6], seeded if i % 2 else free, f"mixed{i}") for i in range(12)]
    for i, outputs in enumerate(await asyncio.gather(*tasks)):
        assert outputs[-1].finished and outputs[-1].request_id == f"mixed{i}"
        if i % 2:
            assert outputs[-1].outputs[0].token_ids == alone.token_ids


async def leaving_a_stream_frees_it(engine: AsyncEngine) -> None:
    """Five streams closed after their first chunk, two of them with n = 3: nothing runs 2 s later."""
    before = (await engine.stats()).num_aborted
    for i in range(5):
        n = 3 if i < 2 else 1
        params = SamplingParams(n=n, max_tokens=200, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        stream = engine.generate([1 + i], params, f"left{i}")
        await anext(stream)
        await stream.aclose()
    await until(lambda: is_idle(engine), 2.0)
    assert (await engine.stats()).num_aborted == before + 9  # the core counts completions

    task = asyncio.create_task(collect(engine, [1], LONG, "cancelled"))
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: is_idle(engine), 2.0)


async def an_abort_ends_the_reader(engine: AsyncEngine) -> None:
    stream = engine.generate([1], LONG, "aborted")
    await anext(stream)
    await engine.abort("aborted")
    await engine.abort("unknown")
    rest = [output async for output in stream]
    assert rest[-1].finished and rest[-1].outputs[0].finish_reason == "abort"
    await until(lambda: is_idle(engine), 2.0)


async def a_duplicate_id_is_refused(engine: AsyncEngine) -> None:
    first = asyncio.create_task(collect(engine, [1], SamplingParams(max_tokens=30, ignore_eos=True), "twin"))
    await asyncio.sleep(0.03)
    with pytest.raises(UserError, match="has not ended"):
        await collect(engine, [2], LONG, "twin")
    assert len((await first)[-1].outputs[0].token_ids) == 30
    assert len((await collect(engine, [2], SamplingParams(max_tokens=3, ignore_eos=True), "twin"))[-1].outputs[0].token_ids) == 3


async def bad_requests_leave_the_engine_alone(engine: AsyncEngine) -> None:
    for prompt, match in (([], "empty"), ([400], "outside the model's vocabulary"), ([1] * 256, "limit is 256")):
        with pytest.raises(UserError, match=match):
            await collect(engine, prompt, LONG, "bad")
    malformed = {"type": "request", "request_id": "odd", "prompt_token_ids": "none"}
    engine._client._to_core.send(engine._client._encoder.encode(malformed))
    assert await is_idle(engine)


async def a_slow_reader_gets_everything(engine: AsyncEngine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    whole = [t for d in await collect(engine, [9], params, "fast") for t in d.outputs[0].token_ids]
    stream = engine.generate([9], params, "slow")
    tokens = list((await anext(stream)).outputs[0].token_ids)
    await asyncio.sleep(0.5)
    outputs = [output async for output in stream]
    assert len(outputs) < 40, "what was not read is merged"
    assert tokens + [t for o in outputs for t in o.outputs[0].token_ids] == whole


async def utilities_answer(engine: AsyncEngine) -> None:
    assert engine.info.name == "toy" and engine.info.max_model_len == 256 and engine.is_alive
    assert (await engine.stats()).compilations_after_ready == 0
    assert await engine.reset_prefix_cache()
    await engine.pause()
    task = asyncio.create_task(collect(engine, [1], SamplingParams(max_tokens=2), "paused"))
    await asyncio.sleep(0.1)
    assert not task.done() and (await engine.stats()).num_waiting == 1
    await engine.resume()
    await task
    with pytest.raises(UserError, match="no utility 'eval'"):
        await engine._client.call("eval", "1")


def test_a_killed_core_ends_streams_with_an_error(renderer):
    """TRAP-17, C04-09: within seconds, with the reason; later requests are refused at once."""

    async def body(engine: AsyncEngine) -> None:
        stream = engine.generate([1], LONG, "a")
        await anext(stream)
        start = time.monotonic()
        assert engine.core_pid is not None
        os.kill(engine.core_pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="signal 9"):
            while True:
                await anext(stream)
        assert time.monotonic() - start < 2.0
        assert not engine.is_alive and "signal 9" in (engine.dead_reason or "")
        with pytest.raises(EngineDeadError):
            await collect(engine, [1], LONG, "b")
        with pytest.raises(EngineDeadError):
            await engine.stats()

    with_engine(renderer, body)


def test_a_mistake_of_the_caller_keeps_its_class(renderer, tmp_path):
    """What a bundle is refused for in the core's process arrives as the BundleError it was."""
    (tmp_path / "manifest.json").write_text("{")

    async def run() -> None:
        engine = AsyncEngine(EngineConfig(bundle=str(tmp_path)), load_renderer=lambda config: renderer)
        with pytest.raises(BundleError, match="manifest"):
            await engine.wait_ready()
        await engine.shutdown()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_core_that_cannot_start_says_why(renderer):
    async def run() -> None:
        engine = AsyncEngine(toy_config(UnstartableExecutor), load_renderer=lambda config: renderer)
        with pytest.raises(EngineDeadError, match="did not start: FileNotFoundError: no such model"):
            await engine.wait_ready()
        assert not engine.is_alive
        await engine.shutdown()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_queue_merges_what_is_not_read():
    """R-2.2: a reader that falls behind costs one pending output, whatever the number of steps."""

    async def run() -> None:
        queue = OutputQueue(delta=True)
        for i in range(1000):
            queue.put(RequestOutput("a", None, [1], outputs=[CompletionOutput(0, "x", [i])]))
        output = await queue.get()
        assert output.outputs[0].text == "x" * 1000 and output.outputs[0].token_ids == list(range(1000))
        queue.fail(ValueError("over"))
        with pytest.raises(ValueError, match="over"):
            await queue.get()

    asyncio.run(run())
