"""The engine core on a toy model: whatever the schedule, the tokens are those of the dense reference."""

from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.runtime.toy_model import (
    MAX_LEN,
    MIXED_WINDOWS,
    VOCAB,
    WINDOWS,
    FailingExecutor,
    ToyExecutor,
    WindowedToyExecutor,
    dense_greedy,
    toy_config,
)
from treadle.ir.errors import ConfigError, EngineDeadError, UserError
from treadle.runtime.engine.core import EngineCore
from treadle.runtime.protocol import CoreOutput, CoreRequest
from treadle.runtime.sampling_params import SamplingParams


def request(req_id: str, prompt: list[int], **params) -> CoreRequest:
    return CoreRequest(
        request_id=req_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(**{"temperature": 0.0, **params}),
        arrival_time=0.0,
    )


def drain(core: EngineCore, limit: int = 5000) -> dict[str, list[CoreOutput]]:
    found: dict[str, list[CoreOutput]] = {}
    for _ in range(limit):
        if not core.has_work:
            break
        for output in core.step().outputs:
            found.setdefault(output.request_id, []).append(output)
    assert not core.has_work, "requests never ended"
    core.check_integrity()
    return found


def tokens_of(outputs: list[CoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB) for _ in range(17)]
    made = []
    for i in range(count):
        own = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 60))]
        made.append([*shared, *own] if i % 2 else own)
    return made


EAGER_ADMISSION = {"watermark": 0.0, "full_sequence_must_fit": False}
"""Admits requests that will not fit to their end, so that preemption happens."""


@cache
def expected_of(seed: int) -> dict[str, list[int]]:
    return {str(i): dense_greedy(prompt, 9) for i, prompt in enumerate(prompts(6, seed=seed))}


@pytest.mark.parametrize(("executor", "windows"), [(ToyExecutor, WINDOWS), (WindowedToyExecutor, MIXED_WINDOWS)])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 7},
        {"num_blocks": 36, "max_num_batched_tokens": 16, **EAGER_ADMISSION},
        {"num_blocks": 36, "max_num_batched_tokens": 16, "enable_prefix_caching": False, **EAGER_ADMISSION},
        {"max_num_seqs": 2},
        {"disable_hybrid_allocator": True},
    ],
    ids=["plain", "no-prefix", "chunked", "preempting", "preempting-no-prefix", "two-slots", "one-allocator"],
)
def test_greedy_tokens_equal_the_dense_reference(executor, windows, changes):
    """C04-02, C03-09, C12-05, TRAP-13: chunks, preemption, prefix hits and windows change no token."""
    core = EngineCore(toy_config(executor, **changes))
    asked = prompts(6)
    for i, prompt in enumerate(asked):
        core.add_request(request(str(i), prompt, max_tokens=20))
    found = drain(core)
    for i, prompt in enumerate(asked):
        assert tokens_of(found[str(i)]) == dense_greedy(prompt, 20, windows), i
    if changes.get("num_blocks"):
        assert core.stats().num_preemptions > 0
    assert core.stats().num_free_blocks == core.stats().num_blocks


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10**6),
    num_blocks=st.integers(26, 60),
    budget=st.integers(3, 40),
    max_num_seqs=st.integers(1, 6),
    caching=st.booleans(),
)
def test_any_arrival_order_gives_the_same_tokens(seed, num_blocks, budget, max_num_seqs, caching):
    """C04-10: requests that come, go and return between steps leave the others' tokens alone."""
    rng = random.Random(seed)
    core = EngineCore(
        toy_config(
            num_blocks=num_blocks,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            enable_prefix_caching=caching,
        )
    )
    asked = {str(i): prompt for i, prompt in enumerate(prompts(6, seed=seed % 3))}
    waiting = rng.sample(list(asked), len(asked))
    aborted, found = set(), {}
    while waiting or core.has_work:
        if waiting and rng.random() < 0.3:
            req_id = waiting.pop()
            core.add_request(request(req_id, asked[req_id], max_tokens=9))
        elif core.scheduler.requests and rng.random() < 0.02:
            victim = rng.choice(sorted(core.scheduler.requests))
            core.abort([victim])
            aborted.add(victim)
        for output in core.step().outputs:
            found.setdefault(output.request_id, []).extend(output.new_token_ids)
    for req_id in asked:
        expected = expected_of(seed % 3)[req_id]
        got = found.get(req_id, [])
        assert got == (expected[: len(got)] if req_id in aborted else expected)
    core.check_integrity()
    assert core.stats().num_free_blocks == core.stats().num_blocks


def test_an_id_can_be_used_again_at_once():
    """C04-10, R-4.12: aborted and resubmitted between two steps, an id stands for two requests."""
    core = EngineCore(toy_config())
    core.add_request(request("a", [1, 2, 3], max_tokens=30))
    for _ in range(4):
        core.step()
    core.abort(["a"])
    core.add_request(request("a", [7, 8], max_tokens=6))
    assert tokens_of(drain(core)["a"]) == dense_greedy([7, 8], 6)


def test_a_forced_reset_of_the_prefix_cache_keeps_the_tokens():
    """C03-28, C04-10: running requests come back as resumed though they still stand in the batch."""
    core = EngineCore(toy_config())
    core.add_request(request("a", [1, 2, 3, 4, 5], max_tokens=12))
    got = []
    for _ in range(5):
        got += tokens_of(core.step().outputs)
    assert core.reset_prefix_cache(True)
    got += tokens_of(drain(core)["a"])
    assert got == dense_greedy([1, 2, 3, 4, 5], 12)


@pytest.mark.parametrize("changes", [{}, {"max_num_batched_tokens": 5}, {"num_blocks": 30}])
def test_seeded_requests_do_not_depend_on_the_batch(changes):
    """TRAP-05, C04-12: alone, in company, in chunks and after preemption a seed gives the same tokens."""
    params = {"temperature": 0.9, "seed": 11, "max_tokens": 24}
    alone = EngineCore(toy_config())
    alone.add_request(request("a", [5, 6, 7], **params))
    expected = tokens_of(drain(alone)["a"])
    core = EngineCore(toy_config(**changes))
    for i, prompt in enumerate(prompts(6)):
        core.add_request(request(f"other{i}", prompt, temperature=1.0, max_tokens=24))
    core.add_request(request("a", [5, 6, 7], **params))
    assert tokens_of(drain(core)["a"]) == expected


def test_logprobs_survive_preemption_and_chunks():
    """TRAP-13: a pool of about 2.5 sequences gives the texts, lengths and logprobs of a large one."""

    def run(**changes):
        core = EngineCore(toy_config(**changes))
        for i, prompt in enumerate(prompts(4)):
            for child in range(3):
                params = {"seed": 3 + child, "temperature": 0.8, "ignore_eos": True, "max_tokens": 24, "logprobs": 1}
                core.add_request(request(f"{child}_{i}", prompt, **params))
        return drain(core), core.stats()

    large, _ = run()
    small, stats = run(num_blocks=45, max_num_batched_tokens=16)
    assert stats.num_preemptions > 0
    for req_id, outputs in large.items():
        assert tokens_of(small[req_id]) == tokens_of(outputs)
        rows, same = ([row for o in outs for row in o.logprobs or ()] for outs in (outputs, small[req_id]))
        assert len(rows) == len(same) == 24
        for row, other in zip(rows, same, strict=True):
            assert row.token_ids == other.token_ids
            assert row.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("budget", [64, 5])
def test_prompt_logprobs_are_those_of_the_whole_prompt(budget):
    """C06-02: one entry a prompt token, the first None, also when the prompt is computed in chunks."""
    from tests.runtime.toy_model import dense_logits

    prompt = prompts(1)[0] + [4, 5, 6, 7, 8, 9]
    core = EngineCore(toy_config(max_num_batched_tokens=budget))
    for name in ("first", "again"):  # the second time the prefix cache could answer, but must not
        core.add_request(request(name, prompt, max_tokens=2, prompt_logprobs=2))
        rows = drain(core)[name][0].prompt_logprobs
        assert rows is not None and len(rows) == len(prompt) and rows[0] is None
        expected = dense_logits(prompt).log_softmax(-1)
        for position, row in enumerate(rows[1:], start=1):
            assert row.token_ids[0] == prompt[position] and len(row.token_ids) == 3
            assert row.logprobs[0] == pytest.approx(float(expected[position - 1, prompt[position]]), abs=1e-4)


def test_a_bad_request_ends_alone():
    """A request that cannot be served ends with an error; the others and the core go on."""
    core = EngineCore(toy_config(num_blocks=8))
    core.add_request(request("long", list(range(60)) * 4, max_tokens=20))
    core.add_request(request("good", [1, 2], max_tokens=3))
    core.add_request(request("good", [1, 2], max_tokens=3))
    found = drain(core)
    assert found["long"][0].finish_reason == "error" and "KV-cache blocks" in (found["long"][0].error or "")
    errors = [o for o in found["good"] if o.error]
    assert len(errors) == 1 and "in use" in errors[0].error
    assert tokens_of(found["good"]) == dense_greedy([1, 2], 3)


def test_a_failing_step_ends_the_core_with_its_reason():
    """C04-09: the error is reported, and reported again, never swallowed."""
    core = EngineCore(toy_config(FailingExecutor))
    core.add_request(request("a", [13], max_tokens=3))
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="RuntimeError: boom"):
            core.step()


def test_limits_beyond_the_bundle_are_refused():
    with pytest.raises(ConfigError, match="max_model_len=1000 exceeds the 256"):
        EngineCore(toy_config(max_model_len=1000))
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        EngineCore(toy_config(max_num_batched_tokens=65))


def test_length_ends_at_the_model_limit():
    """TRAP-07: without max_tokens a request ends with `length` exactly at the model's limit."""
    core = EngineCore(toy_config())
    core.add_request(request("a", [1, 2, 3], max_tokens=None, ignore_eos=True))
    outputs = drain(core)["a"]
    assert len(tokens_of(outputs)) == MAX_LEN - 3 and outputs[-1].finish_reason == "length"


def test_pause_admits_nobody_and_utilities_are_listed():
    core = EngineCore(toy_config())
    core.call("pause")
    core.add_request(request("a", [1], max_tokens=2))
    assert core.step().outputs == [] and core.stats().num_waiting == 1
    core.call("resume")
    assert len(tokens_of(drain(core)["a"])) == 2
    with pytest.raises(UserError, match="choose one of: stats"):
        core.call("eval", ["1"])
    assert core.call("stats").compilations_after_ready == 0


def test_a_worker_that_is_gone_ends_the_core_between_steps():
    """C04-01: the reason stays, and no step runs after it."""

    class Lost(ToyExecutor):
        def check_health(self):
            raise EngineDeadError("rank 1 (process 7) ended with signal 9")

    core = EngineCore(toy_config(Lost))
    with pytest.raises(EngineDeadError, match="ended with signal 9"):
        core.check_health()
    core.add_request(request("a", [1, 2]))
    with pytest.raises(EngineDeadError, match="ended with signal 9"):
        core.step()
