"""The real model in bfloat16: logprobs stay near the float32 reference, as near as transformers' own bfloat16."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import treadle
from tests.e2e.reference import Reference
from tests.tolerance import LOGPROBS
from treadle import LLM, SamplingParams

pytestmark = pytest.mark.slow

TOP = 5


def test_logprobs_within_table(store: Path, tmp_path: Path, prompts: list[str], reference: Reference) -> None:
    """C06-02: logprobs of the top tokens, prompt and output, against float32 by the tolerance table."""
    bundle = treadle.compile("smollm2", output=tmp_path / "b.bundle", store=store, dtype="bfloat16")
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=TOP)
    with LLM(str(bundle)) as llm:
        outputs = llm.generate(prompts[2:5], params)
    ours, theirs = [], []
    half = Reference(copy.deepcopy(reference.model).to(torch.bfloat16))
    halves = [half.logits(o.prompt_token_ids + o.outputs[0].token_ids) for o in outputs]
    for output, half_rows in zip(outputs, halves, strict=True):
        completion, start = output.outputs[0], len(output.prompt_token_ids) - 1
        rows = torch.log_softmax(reference.logits(output.prompt_token_ids + completion.token_ids), dim=-1)
        half_rows = torch.log_softmax(half_rows, dim=-1)
        for index, entries in enumerate(completion.logprobs):
            for token, entry in entries.items():
                ours.append(abs(entry.logprob - float(rows[start + index, token])))
                theirs.append(abs(float(half_rows[start + index, token] - rows[start + index, token])))
    largest, mean = LOGPROBS["bfloat16"]
    assert len(ours) >= 3 * 6 * TOP
    assert max(ours) <= largest and sum(ours) / len(ours) <= mean, (max(ours), sum(ours) / len(ours))
    assert sum(ours) <= 1.5 * sum(theirs), (sum(ours), sum(theirs))
