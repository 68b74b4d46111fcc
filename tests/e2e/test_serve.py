"""A real server process over the real model: the client's calls, cancellation, drain, death, and nothing compiled."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server_process import ROOT, ServerProcess, eventually, serving
from tests.server.test_scenarios import *  # noqa: F403 - every scenario runs here too, against `base_url` below
from treadle import LLM, SamplingParams
from treadle.codegen.bundle import open_bundle
from treadle.runtime.engine.renderer_of import renderer_of

pytestmark = pytest.mark.slow

LIMIT = 256
CHAT = [{"role": "user", "content": "What is the capital of France?"}]
LONG = {"prompt": "Once upon a time", "ignore_eos": True, "temperature": 0, "stream": True}


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[ServerProcess]:
    with serving(bundle, max_model_len=LIMIT, max_num_seqs=16, num_blocks=200) as running:
        yield running


@pytest.fixture
def base_url(server: ServerProcess) -> str:
    return server.base_url


def test_a_hundred_streams_half_cancelled(server: ServerProcess) -> None:
    """Acceptance 7: of 100 concurrent streams half are cancelled at random; no request runs on, no block is lost."""
    chance = random.Random(7)
    cancelled = set(chance.sample(range(100), 50))
    after = {index: chance.randrange(5) for index in cancelled}
    before = server.metric("treadle_requests_aborted_total")

    async def one(client: httpx.AsyncClient, index: int) -> str | None:
        body = {"prompt": f"Story number {index}:", "stream": True, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        text, chunks = "", 0
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if index in cancelled and chunks >= after[index]:
                    return None
                if line == "data: [DONE]":
                    return text
                if line:
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                    chunks += 1
        raise AssertionError("a stream ended without [DONE]")

    async def all_of_them() -> list[str | None]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=server.base_url, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(one(client, index) for index in range(100)))

    texts = asyncio.run(all_of_them())
    eventually(server.is_idle)
    assert all((text is None) == (index in cancelled) and text != "" for index, text in enumerate(texts))
    assert server.metric("treadle_requests_aborted_total") - before > 25  # some had ended before they were cancelled
    again = server.post("/v1/completions", prompt="Story number", max_tokens=2)
    assert again.status_code == 200


def test_closed_streams_are_counted(server: ServerProcess) -> None:
    """TRAP-14: five streams closed after their first chunk, two of them n 3, are five aborted requests within 2 s."""
    eventually(server.is_idle)
    requests, sequences = (server.metric(f"treadle_{name}_aborted_total") for name in ("requests", "sequences"))
    with server.client() as client:
        for n in (1, 1, 1, 3, 3):
            with client.stream("POST", "/v1/completions", json={**LONG, "n": n, "max_tokens": 200}) as response:
                next(response.iter_lines())
    eventually(server.is_idle, within=2)
    assert server.metric("treadle_requests_aborted_total") - requests == 5
    assert server.metric("treadle_sequences_aborted_total") - sequences == 9


def mixed_requests() -> Iterator[tuple[str, dict[str, Any]]]:
    """200 small requests of every kind the samplers and the scheduler tell apart."""
    chance = random.Random(5)
    sampling: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 20, "min_p": 0.05, "seed": 4},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.2, "bad_words": ["the"]},
        {"logit_bias": {"100": 5.0}, "min_tokens": 2},
        {"n": 2, "temperature": 0.7},
        {"stop": ["."], "allowed_token_ids": [28, 30, 260, 339]},
    ]
    for index in range(200):
        body = {**sampling[index % len(sampling)], "max_tokens": chance.randrange(2, 5), "stream": index % 3 == 0}
        text = "word " * chance.choice([1, 2, 7, 30, 90])
        if index % 2:
            logprobs = {"logprobs": True, "top_logprobs": 3} if index % 5 == 0 else {}
            yield "/v1/chat/completions", {**body, **logprobs, "messages": [{"role": "user", "content": text}]}
        else:
            echo = {"echo": True} if index % 7 == 0 else {}
            yield "/v1/completions", {**body, **echo, "prompt": text, "logprobs": 2 if index % 4 == 0 else None}


def test_nothing_is_compiled_after_ready(server: ServerProcess) -> None:
    """Acceptance 5, C01-05: the counter is still 0 after 200 mixed requests, and the core has no child process."""
    with server.client(limits=httpx.Limits(max_connections=32)) as client, ThreadPoolExecutor(16) as pool:
        responses = list(pool.map(lambda request: client.post(request[0], json=request[1]), mixed_requests()))
    assert {response.status_code for response in responses} == {200}
    assert all('"error":' not in response.text for response in responses)  # the model may well write the word
    assert server.metric("treadle_compilations_after_ready_total") == 0
    assert server.core().children() == []
    eventually(server.is_idle)


def test_every_way_in_gives_the_same_tokens(server: ServerProcess, bundle: Path) -> None:
    """C02-01: the same chat through LLM.chat, `treadle generate` and HTTP is the same prompt and the same answer."""
    renderer = renderer_of(open_bundle(bundle))
    assert renderer is not None
    prompt = renderer.render_chat(CHAT)
    assert prompt.text is not None
    with LLM(bundle, num_blocks=64, max_model_len=LIMIT) as llm:
        offline = llm.chat(CHAT, SamplingParams(temperature=0.0, max_tokens=12))[0]
    assert offline.prompt_token_ids == prompt.token_ids
    tokens = offline.outputs[0].token_ids
    command = [sys.executable, "-m", "treadle.server.cli", "generate", str(bundle), "--json", "--temperature", "0"]
    shown = subprocess.run(
        [*command, "--max-tokens", "12", "--prompt", prompt.text], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert json.loads(shown.stdout)["token_ids"] == tokens
    assert server.post("/tokenize", messages=CHAT).json()["tokens"] == prompt.token_ids
    answer = server.post("/v1/chat/completions", messages=CHAT, temperature=0, max_tokens=12, logprobs=True).json()
    choice = answer["choices"][0]
    assert choice["message"]["content"] == offline.outputs[0].text
    assert "Paris" in choice["message"]["content"]
    pieces = [bytes(entry["bytes"]) for entry in choice["logprobs"]["content"]]
    assert pieces == [renderer.token_text.bytes_of(token) for token in tokens]


def test_forced_tool_calls(server: ServerProcess) -> None:
    """A real model, shown a tool by a template that cannot, is held to its schema; streamed the same call comes."""
    digits = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "pick", "parameters": digits}}]
    body = {"messages": [{"role": "user", "content": "Pick 7."}], "tools": tools, "temperature": 0}
    found = []
    for choice in ({"type": "function", "function": {"name": "pick"}}, "required"):
        answer = server.post("/v1/chat/completions", **body, tool_choice=choice, parallel_tool_calls=False)
        assert answer.status_code == 200, answer.text
        (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "pick" and 0 <= json.loads(call["function"]["arguments"])["n"] <= 99
        found.append(call["function"]["arguments"])
    streamed = server.post("/v1/chat/completions", **body, tool_choice=choice, parallel_tool_calls=False, stream=True)
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    deltas = [delta for chunk in chunks for delta in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert "".join(delta["function"]["arguments"] for delta in deltas) == found[1]


def test_a_reset_forgets_cached_prefixes(server: ServerProcess) -> None:
    """The second of two equal prompts reads the cache; after a reset it is computed again, to the same text."""
    eventually(server.is_idle)
    body = {"prompt": "The lighthouse keeper counted the ships. " * 8, "temperature": 0, "max_tokens": 4}
    found = [server.post("/v1/completions", **body).json() for _ in range(2)]
    eventually(server.is_idle)
    assert server.post("/reset_prefix_cache").status_code == 200
    found.append(server.post("/v1/completions", **body).json())
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in found]
    assert cached[0] == cached[2] == 0 and cached[1] > 0
    assert len({answer["choices"][0]["text"] for answer in found}) == 1


def test_a_drain_finishes_what_runs(bundle: Path) -> None:
    """TRAP-17, C01-09: after SIGTERM running streams end whole, new requests get a 503, the exit code is 0."""
    with serving(bundle, max_model_len=LIMIT, num_blocks=64) as server:
        core = server.core()
        body = {**LONG, "max_tokens": 48}
        with server.client() as client, client.stream("POST", "/v1/completions", json={**body, "n": 2}) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            server.process.terminate()
            time.sleep(0.3)
            refusal = server.post("/v1/completions", prompt="x")
            assert refusal.status_code == 503 and refusal.json()["error"]["code"] == "shutting_down"
            events = [line.removeprefix("data: ") for line in lines]
        reasons = [json.loads(event)["choices"][0]["finish_reason"] for event in events[:-1]]
        assert events[-1] == "[DONE]" and [reason for reason in reasons if reason] == ["length"] * 2
        assert server.exit_code() == 0, server.log()
        assert not core.is_running()


def test_the_core_killed_during_a_stream(bundle: Path) -> None:
    """TRAP-17: kill -9 of the engine core: the stream ends with an error, /health and requests are 503, exit 1."""
    with serving(bundle, max_model_len=LIMIT, num_blocks=64) as server:
        with server.client() as client:
            with client.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 200}) as response:
                lines = (line for line in response.iter_lines() if line)
                next(lines)
                server.core().kill()
                died = time.monotonic()
                events = [line.removeprefix("data: ") for line in lines]
            assert time.monotonic() - died < 5
            assert "signal 9" in json.loads(events[-2])["error"]["message"], events
            assert client.get("/health").status_code == 503
            refusal = client.post("/v1/completions", json={"prompt": "x"})
            assert refusal.status_code == 503 and refusal.json()["error"]["code"] == "engine_dead"
            assert client.get("/metrics").status_code == 200
        assert server.exit_code() == 1
        assert "Traceback" not in server.log()


def test_a_killed_front_end_takes_the_core_along(bundle: Path, tmp_path: Path) -> None:
    """TRAP-17: kill -9 of the server leaves no engine core behind and no socket folder."""
    with serving(bundle, max_model_len=LIMIT, num_blocks=64, environment={**os.environ, "TMPDIR": str(tmp_path)}) as server:
        core = server.core()
        assert list(tmp_path.glob("treadle-*"))
        server.process.kill()
        server.process.wait()
        eventually(lambda: not core.is_running() and not list(tmp_path.glob("treadle-*")), within=10)
