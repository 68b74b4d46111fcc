"""Greedy tokens of the real model equal the reference, however the batch is scheduled."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.e2e.reference import Reference
from treadle import LLM, SamplingParams

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)

SCHEDULES = {
    "plain": {"enable_prefix_caching": False},
    "prefix caching": {"enable_prefix_caching": True},
    "chunked prefill, budget 64": {"max_num_batched_tokens": 64},
    "pool that preempts": {"num_gpu_blocks_override": 48, "enable_prefix_caching": True},
}


@pytest.fixture(scope="module")
def expected(bundle: Path, prompts: list[str], reference: Reference) -> list[list[int]]:
    """Tokens of the plain schedule, each compared with the reference once."""
    with LLM(str(bundle), enable_prefix_caching=False) as llm:
        outputs = llm.generate(prompts, GREEDY)
    for output in outputs:
        wrong = reference.first_difference(output.prompt_token_ids, output.outputs[0].token_ids)
        assert wrong is None, f"{output.prompt!r}: {wrong}"
    return [output.outputs[0].token_ids for output in outputs]


def same_or_tied(reference: Reference, prompt: list[int], got: list[int], expected: list[int]) -> bool:
    return got == expected or reference.first_difference(prompt, got) is None


@pytest.mark.parametrize("name", SCHEDULES)
def test_tokens_equal_reference(
    name: str, bundle: Path, prompts: list[str], expected: list[list[int]], reference: Reference
) -> None:
    """C03-01, C03-09, C12-05, C04-02: 32 mixed prompts, 64 greedy tokens each, equal to transformers in float32."""
    with LLM(str(bundle), **SCHEDULES[name]) as llm:
        rounds = 2 if SCHEDULES[name].get("enable_prefix_caching") else 1
        for _ in range(rounds):
            outputs = llm.generate(prompts, GREEDY)
            for output, tokens in zip(outputs, expected, strict=True):
                got = output.outputs[0].token_ids
                assert len(got) == 64
                assert same_or_tied(reference, output.prompt_token_ids, got, tokens), (name, output.prompt)
        stats = llm.stats()
        if name == "pool that preempts":
            assert stats.num_preemptions > 0
        if name == "prefix caching":
            assert stats.prefix_hits > 0
        assert stats.num_free_blocks == stats.num_blocks


def test_any_arrival_order(bundle: Path, prompts: list[str], expected: list[list[int]], reference: Reference) -> None:
    """C03-01: requests that arrive in another order, in small groups, get the same tokens."""
    order = list(range(len(prompts)))
    random.Random(3).shuffle(order)
    with LLM(str(bundle), max_num_seqs=5) as llm:
        outputs = llm.generate([prompts[index] for index in order], GREEDY)
    for index, output in zip(order, outputs, strict=True):
        assert same_or_tied(reference, output.prompt_token_ids, output.outputs[0].token_ids, expected[index])


def test_graph_modes_give_the_same_tokens(bundle: Path, prompts: list[str], expected: list[list[int]]) -> None:
    """C10-01, R-10.25, R-10.26: launch plan, and pieces called one by one, on the same artifacts; tokens are identical."""
    found = {}
    for mode in ("none", "full_decode_only"):
        with LLM(str(bundle), graph_mode=mode, enable_prefix_caching=False) as llm:
            found[mode] = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
            modes = llm.stats().graph_modes
        assert set(modes) == ({"NONE"} if mode == "none" else {"NONE", "FULL"})
    assert found["none"] == found["full_decode_only"] == expected
