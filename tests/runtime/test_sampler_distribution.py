"""Chi-square tests of what is drawn against the reference chain. Deterministic: every seed is fixed."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.runtime.reference_sampler import run_chain
from treadle.runtime.sampling.batch import SamplingBatch
from treadle.runtime.sampling.sampler import Sampler
from treadle.runtime.sampling_params import SamplingParams

pytestmark = pytest.mark.slow

VOCAB, DRAWS = 40, 3000
PROMPT, OUTPUT = [1, 2, 3, 4], [3, 5, 5, 9]
LOGITS = np.random.default_rng(12).normal(0, 1.5, VOCAB).astype(np.float32)

CASES = {
    "plain": dict(),
    "cold": dict(temperature=0.5),
    "hot": dict(temperature=3.0),
    "top_k": dict(top_k=8),
    "top_p": dict(top_p=0.7),
    "min_p": dict(min_p=0.1, temperature=1.4),
    "top_k_top_p": dict(top_k=12, top_p=0.8, temperature=1.5),
    "min_p_top_p": dict(min_p=0.05, top_p=0.75),
    "penalties": dict(repetition_penalty=1.5, frequency_penalty=0.6, presence_penalty=0.4),
    "all": dict(
        temperature=1.7, top_k=20, top_p=0.9, min_p=0.04, repetition_penalty=1.3, frequency_penalty=-0.5,
        logit_bias={7: 1.0, 5: -2.0}, allowed_token_ids=list(range(35)),
    ),
}  # fmt: skip


def excess(counts: np.ndarray, probs: np.ndarray) -> float:
    """How many standard deviations chi-square lies above its mean; infinite if something impossible was drawn."""
    if counts[probs == 0].any():
        return math.inf
    expected = probs * counts.sum()
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = max(len(expected) - 1, 1)
    return float((((observed - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def draw(case: str, how: str) -> np.ndarray:
    """Counts of `DRAWS` tokens: from the engine's stream, from many seeds, or from one seed over positions."""
    batch = SamplingBatch(DRAWS, VOCAB, seed=21)
    for slot in range(DRAWS):
        seed = {"unseeded": None, "seeds": slot, "positions": 17}[how]
        params = SamplingParams(seed=seed, **CASES[case])  # type: ignore[arg-type]
        position = slot if how == "positions" else 0
        # Only the length of the output counts for the stream; penalties would see it, so they are left out.
        output = [0] * position if how == "positions" else OUTPUT
        batch.add(slot, str(slot), params, PROMPT, output)
    logits = torch.from_numpy(LOGITS).repeat(DRAWS, 1)
    sampled = Sampler()(logits, batch.metadata(DRAWS)).token_ids.flatten()
    return torch.bincount(sampled, minlength=VOCAB).numpy()


def reference(case: str) -> np.ndarray:
    probs = run_chain(LOGITS, SamplingParams(**CASES[case]), PROMPT, OUTPUT).probs  # type: ignore[arg-type]
    assert probs is not None
    return probs


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("how", ["unseeded", "seeds"])
def test_draws_follow_the_reference(case: str, how: str) -> None:
    """C06-02, C06-06, C06-07: temperature, filters and penalties give the reference's distribution."""
    assert excess(draw(case, how), reference(case)) < 4


@pytest.mark.parametrize("case", ["plain", "hot", "top_k_top_p"])
def test_one_seed_follows_the_reference_over_positions(case: str) -> None:
    """C06-04: the tokens of one seeded request are as random as any."""
    assert excess(draw(case, "positions"), reference(case)) < 4


@pytest.mark.parametrize("case", [case for case in CASES if case != "plain"])
def test_the_test_can_tell_distributions_apart(case: str) -> None:
    """Draws of one case against the distribution of another are noticed."""
    assert excess(draw(case, "unseeded"), reference("plain")) > 20
