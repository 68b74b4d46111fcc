"""Faults that engines of this kind have had, on the real model. Rows not here run on it through test_serve.py
(4, 8 to 11, 14 to 17, 23, from tests/server/test_scenarios.py too) and test_damage.py (21, 22)."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import treadle
from tests.e2e.server_process import ServerProcess, serving
from tests.e2e.tiny_model import save_tiny
from treadle import LLM, SamplingParams
from treadle.ir.errors import ModelError, UserError

pytestmark = pytest.mark.slow

LIMIT = 256
PARROT, KO_KAI, SUN = "\U0001f99c", "\u0e01", "\u65e5"
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
QUICK = {"level": 0, "max_num_batched_tokens": 64}
CHANCES: list[dict[str, Any]] = [{"temperature": t} for t in (1e-4, 1e-5, 1e-6, 1e-30)]


@pytest.fixture(scope="module")
def llm(bundle: Path) -> Iterator[LLM]:
    with LLM(bundle, max_model_len=LIMIT, num_blocks=300, max_num_seqs=16) as made:
        yield made


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[ServerProcess]:
    with serving(bundle, max_model_len=LIMIT, num_blocks=100, max_num_seqs=8) as running:
        yield running


def greedy(tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, **options)


def ask(llm: LLM, prompts: Any, params: Any) -> list[Any]:
    """The first completion of each prompt."""
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def deltas(server: ServerProcess, path: str, **body: Any) -> list[str]:
    """The texts of a stream's chunks."""
    lines = server.post(path, stream=True, **body).text.split("\n\n")
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines if line and "[DONE]" not in line]
    return [choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices]


def forcing(token_ids: list[int]) -> dict[str, Any]:
    """Options that make any model emit these distinct ids in this order.

    Each has a larger bias than the next, and what was emitted is pushed below all of them by the repetition penalty.
    """
    assert len(set(token_ids)) == len(token_ids)
    bias = {str(token): 1000.0 * (len(token_ids) - place) for place, token in enumerate(token_ids)}
    return {"logit_bias": bias, "repetition_penalty": 1000.0, "temperature": 0, "max_tokens": len(token_ids)}


def test_characters_spread_over_tokens(server: ServerProcess) -> None:
    """TRAP-1: joined deltas are the whole text, and no delta shows half a character before the last one."""
    text = PARROT + KO_KAI + SUN
    ids = server.post("/tokenize", prompt=text).json()["tokens"]
    assert ids == [10813, 116, 246, 10283, 219, 23274, 115]
    options = {"prompt": "Animals:", **forcing(ids)}
    assert server.post("/v1/completions", **options).json()["choices"][0]["text"] == text
    parts = deltas(server, "/v1/completions", **options)
    assert "".join(parts) == text and "\ufffd" not in "".join(parts)
    for cut in range(1, len(ids)):
        whole = server.post("/v1/completions", **{**options, "max_tokens": cut}).json()["choices"][0]["text"]
        parts = deltas(server, "/v1/completions", **{**options, "max_tokens": cut})
        assert "".join(parts) == whole
        assert not any("\ufffd" in part for part in parts[:-1])


def test_a_special_stop_id_takes_no_text_away(llm: LLM) -> None:
    """TRAP-2: the end by EOS, by the same id as a stop id, and with special tokens shown: the same text."""
    params = [
        greedy(32),
        greedy(32, stop_token_ids=[2]),
        greedy(32, skip_special_tokens=False),
        greedy(32, stop_token_ids=[2], skip_special_tokens=False),
    ]
    plain, stopped, shown, both = (output.outputs[0] for output in llm.chat([FRANCE] * 4, params, use_tqdm=False))
    assert plain.finish_reason == "stop" and plain.text.endswith("Paris.")
    assert stopped.text == plain.text and stopped.token_ids == plain.token_ids
    for completion in (shown, both):
        assert completion.text in (plain.text, plain.text + "<|im_end|>")


def test_stops_that_only_partly_match(server: ServerProcess) -> None:
    """TRAP-3: text held back for a stop that never completes appears once."""
    options = {"messages": FRANCE, "temperature": 0, "max_tokens": 16}
    text = server.post("/v1/chat/completions", **options).json()["choices"][0]["message"]["content"]
    stops = ["\n\n\n", text.split()[0] + "~~", text[:7] + "~", text[-3:] + "~"]
    assert "".join(deltas(server, "/v1/chat/completions", **options, stop=stops)) == text
    stop = text.split()[-1]
    assert "".join(deltas(server, "/v1/chat/completions", **options, stop=[stop, *stops])) == text[: text.index(stop)]


def test_a_seed_gives_the_same_text_in_any_company(llm: LLM) -> None:
    """TRAP-5, C06-11: seed 11 four times beside an unseeded request, then alone."""
    seeded = SamplingParams(seed=11, temperature=0.9, max_tokens=24, ignore_eos=True)
    unseeded = SamplingParams(temperature=0.9, max_tokens=24, ignore_eos=True)
    rounds = [ask(llm, ["My favourite animal", "A long story about"], [seeded, unseeded]) for _ in range(4)]
    [alone] = ask(llm, ["My favourite animal"], seeded)
    assert {first.text for first, _ in rounds} == {alone.text}
    assert len({second.text for _, second in rounds}) > 1, "an unseeded request should vary"


def test_tiny_temperatures_are_greedy(llm: LLM) -> None:
    """TRAP-6, C06-03: temperatures from 1e-4 down, with and without a tiny top_p, give the greedy text."""
    params = [greedy(12)] + [
        SamplingParams(**chance, **more, max_tokens=12) for chance in CHANCES for more in ({}, {"top_p": 1e-9})
    ]
    outputs = ask(llm, ["The weather today is"] * len(params), params)
    assert outputs[0].text.strip()
    assert {output.text for output in outputs} == {outputs[0].text}


def test_length_limits_offline(llm: LLM) -> None:
    """TRAP-7: the exact room is used; more is clamped, as documented; none ends with `length` at the limit."""
    prompt = [llm.get_tokenizer().encode("word").ids[0]] * (LIMIT - 6)
    params = [greedy(6, ignore_eos=True), greedy(7, ignore_eos=True), greedy(1, ignore_eos=True)]
    params[2].max_tokens = None
    for completion in ask(llm, [prompt] * 3, params):
        assert len(completion.token_ids) == 6 and completion.finish_reason == "length"
    with pytest.raises(UserError, match=rf"has {LIMIT} tokens, but the model's limit is {LIMIT} tokens"):
        llm.generate([prompt + prompt[:6]], greedy(1))


@pytest.mark.parametrize("prompts", ["", [""], [[]], ["ok", ""]])
def test_empty_prompts_offline(llm: LLM, prompts: Any) -> None:
    """TRAP-8: refused with the prompt's place, nothing is left behind, and the next request works."""
    with pytest.raises(UserError, match=r"prompt \d: the prompt is empty"):
        llm.generate(prompts, greedy(2))
    assert len(ask(llm, ["ok"], greedy(2))[0].token_ids) == 2
    assert llm.stats().num_running == 0


def test_salts_part_the_prefix_cache(llm: LLM) -> None:
    """TRAP-12 without LoRA: a prompt cached under a salt is not found without it or under another; logits as cold."""
    prompt = list(range(100, 100 + 4 * 16 + 1))
    llm.reset_prefix_cache()

    def run(salt: str | None) -> tuple[int, list[float]]:
        asked = {"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})}
        [output] = llm.generate([asked], greedy(3, ignore_eos=True, logprobs=0), use_tqdm=False)
        rows = output.outputs[0].logprobs
        assert output.num_cached_tokens is not None and rows is not None
        return output.num_cached_tokens, [next(iter(row.values())).logprob for row in rows]

    cold, expected = run("blue")
    assert cold == 0
    for salt, cached in ((None, 0), ("red", 0), ("blue", 64), (None, 64)):
        found, logprobs = run(salt)
        assert found == cached, salt
        assert logprobs == pytest.approx(expected, abs=1e-4)


def test_preemption_changes_nothing(bundle: Path, llm: LLM) -> None:
    """TRAP-13: a pool for about two and a half sequences, chunked prefill: texts, lengths and logprobs of a big one."""
    prompts = ["Once upon a time", "The best way to cook rice is"]
    params = [
        SamplingParams(n=3, seed=place, temperature=0.8, ignore_eos=True, max_tokens=96, logprobs=1)
        for place in range(len(prompts))
    ]
    big = llm.generate(prompts, params, use_tqdm=False)
    with LLM(bundle, max_model_len=LIMIT, num_blocks=9, max_num_seqs=16, max_num_batched_tokens=16, watermark=0.0) as small:
        outputs = small.generate(prompts, params, use_tqdm=False)
        stats = small.stats()
    assert stats.num_preemptions > 0 and stats.num_free_blocks == stats.num_blocks
    for ours, theirs in zip(outputs, big, strict=True):
        for completion, expected in zip(ours.outputs, theirs.outputs, strict=True):
            assert completion.text == expected.text and len(completion.token_ids) == 96
            assert completion.logprobs is not None and len(completion.logprobs) == 96
            assert expected.logprobs is not None
            for token, ours_at, theirs_at in zip(completion.token_ids, completion.logprobs, expected.logprobs, strict=True):
                assert ours_at[token].logprob == pytest.approx(theirs_at[token].logprob, abs=1e-4)


def test_only_listed_weight_files_count(tmp_path: Path, store: Path) -> None:
    """TRAP-18: a stale copy in another shard and a stray single file change nothing; a missing shard is named."""
    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    save_tiny(whole)
    save_tiny(sharded)
    tensors = load_file(sharded / "model.safetensors")
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    index = {name: file for file, held in shards.items() for name in held}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    for file, held in shards.items():
        stale = {names[0]: torch.zeros_like(tensors[names[0]])} if names[0] not in held else {}
        save_file({**{name: tensors[name] for name in held}, **stale}, sharded / file, metadata={"format": "pt"})
    save_file({name: torch.zeros_like(value) for name, value in tensors.items()}, sharded / "model.safetensors")
    made = [treadle.compile(folder, tmp_path / f"{folder.name}.bundle", store=store, **QUICK) for folder in (whole, sharded)]
    assert tokens_of(made[0]) == tokens_of(made[1])
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="model-00002-of-00002"):
        treadle.compile(sharded, tmp_path / "missing.bundle", store=store, **QUICK)


def tokens_of(bundle: Path, **options: Any) -> list[int]:
    with LLM(bundle, num_blocks=32, **options) as llm:
        return ask(llm, ["seven green bottles"], greedy(12, ignore_eos=True))[0].token_ids


@pytest.mark.parametrize("where", ["generation_config", "config"])
def test_lists_of_end_ids(where: str, tmp_path: Path, store: Path) -> None:
    """TRAP-19: each id of the list ends a request, wherever the list stands, and none does before min_tokens."""
    ends = {"eos_token_id": [2, 0]}
    save_tiny(tmp_path / "model", **({"generation_config": ends} if where == "generation_config" else ends))
    made = treadle.compile(tmp_path / "model", tmp_path / "b", store=store, **QUICK)
    with LLM(made, num_blocks=32) as llm:
        for end in (0, 2):
            late, soon = ask(
                llm,
                ["green", "green"],
                [greedy(12, min_tokens=5, logit_bias={end: 100.0}), greedy(12, logit_bias={end: 100.0})],
            )
            assert len(late.token_ids) == 6 and late.token_ids[-1] == end and late.finish_reason == "stop"
            assert not {0, 2} & set(late.token_ids[:5])
            assert soon.token_ids == [end] and soon.finish_reason == "stop"


def test_settings_of_the_engine_change_no_token(tmp_path: Path, store: Path) -> None:
    """TRAP-20: block sizes, batch sizes and levels served from one store give the same tokens, in both orders."""
    save_tiny(tmp_path / "model")
    made = [
        treadle.compile(tmp_path / "model", tmp_path / f"b{budget}", store=store, level=0, max_num_batched_tokens=budget)
        for budget in (64, 32, 64 + 1)
    ]
    runs = [
        tokens_of(bundle, block_size=block, max_num_seqs=seqs)
        for bundle in made
        for block, seqs in ((16, 4), (32, 8), (16, 8), (32, 4))
    ]
    assert all(run == runs[0] for run in runs)


@pytest.mark.parametrize("text", ["z" * 40_000, " " * 40_000, "\U0001f336" * 20_000], ids=["z", "space", "pepper"])
def test_a_stream_goes_on_beside_a_long_prompt(server: ServerProcess, text: str) -> None:
    """TRAP-23: while a long run of one character class is refused, another stream brings tokens and /health answers."""
    arrivals: list[float] = []

    def stream() -> None:
        body = {"prompt": "Once", "stream": True, "max_tokens": 40, "ignore_eos": True}
        with server.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
            arrivals.extend(time.monotonic() for line in response.iter_lines() if line)

    thread = threading.Thread(target=stream)
    thread.start()
    start = time.monotonic()
    response = server.post("/v1/chat/completions", messages=[{"role": "user", "content": text}])
    assert time.monotonic() - start < 5
    assert server.get("/health").status_code == 200
    thread.join()
    assert response.status_code == 400 and "tokens" in response.json()["error"]["message"]
    assert len(arrivals) >= 20
    assert max(late - early for early, late in itertools.pairwise(arrivals)) < 2
