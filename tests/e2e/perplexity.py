"""Perplexity of a compiled model on a fixed text, from the log-probabilities of a prompt."""

from __future__ import annotations

import math
from pathlib import Path

from treadle import LLM, SamplingParams

TEXT = (Path(__file__).parent / "data" / "lighthouse.txt").read_text()


def perplexity(llm: LLM, text: str = TEXT) -> float:
    """exp of the mean negative log-probability of each token but the first, given those before it."""
    output = llm.generate([text], SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))[0]
    assert output.prompt_logprobs is not None
    rows = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    losses = [-row[token].logprob for token, row in rows]
    return math.exp(sum(losses) / len(losses))
