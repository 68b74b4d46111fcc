"""Other architectures with small seeded random weights: greedy tokens equal to transformers in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.reference import Reference
from tests.models import ARCHITECTURES, save_model
from treadle import LLM, SamplingParams

pytestmark = pytest.mark.slow


COMPILED = ("llama", "gemma2", "qwen3", "gpt2", "mixtral")
"""One of each kind is compiled in the default run: plain, windows and soft caps, q/k norms, learned positions, experts."""

CASES = [(name, 0) for name in ARCHITECTURES] + [
    pytest.param(name, 2, marks=() if name in COMPILED else pytest.mark.exhaustive) for name in ARCHITECTURES
]
CASES += [("llama", 1), pytest.param("llama", 3, marks=pytest.mark.exhaustive)]
MODES_OF_LEVEL = {0: {"NONE"}, 1: {"NONE"}, 2: {"FULL"}, 3: {"FULL"}}
"""Level 1 asks for piecewise graphs, which need token counts that have artifacts of their own."""

WITHOUT_A_PLAN = ("mixtral",)
"""Experts run in Python between the pieces, so no launch plan can be made: every level runs these piece by piece."""


@pytest.mark.parametrize(("name", "level"), CASES)
def test_greedy_tokens_equal_transformers(name: str, level: int, tmp_path: Path, store: Path) -> None:
    """C09-11, C14-01: prompts of mixed length in one batch, longer than the window where there is one."""
    model = save_model(name, tmp_path / "model")
    generator = torch.Generator().manual_seed(1)
    lengths = (1, 2, 7, 19, 40)
    vocabulary = model.config.get_text_config().vocab_size
    prompts = [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]
    with LLM(str(tmp_path / "model"), dtype="float32", store=store, optimization_level=level, max_num_seqs=8) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
        modes = llm.stats().graph_modes
    if name in COMPILED:
        assert set(modes) == ({"NONE"} if name in WITHOUT_A_PLAN else MODES_OF_LEVEL[level])
    reference = Reference(model)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == 16
        assert reference.first_difference(prompt, output.outputs[0].token_ids) is None
