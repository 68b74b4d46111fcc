"""Variants of rotation, activation and routing, from transformers' model to fused pieces: the same greedy tokens."""

from __future__ import annotations

import pytest
import torch

from tests.models import VARIANTS, make_model
from treadle.ir.loader import load_params
from treadle.ir.source import open_source
from treadle.ir.trace import trace
from treadle.passes.pipeline import run_pipeline
from treadle.passes.split import run_split

# name: (pass, kind, matches in three layers)
EXPECTED = {
    "gptj": ("raise_rope", "partial_interleaved", 6),
    "gpt_neox": ("raise_rope", "partial", 6),
    "llama_linear": ("raise_rope", "halves", 6),
    "llama_llama3": ("raise_rope", "halves", 6),
    "llama_yarn": ("raise_rope", "halves", 6),
    "gemma_erf": ("raise_gated_act", "gelu", 3),
    "gemma_new": ("raise_gated_act", "gelu_new", 3),
    "qwen2_moe": ("fuse_moe", "softmax_shared", 3),
    "deepseek_v3": ("fuse_moe", "grouped_shared", 2),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", VARIANTS)
def test_tokens_equal_transformers(name: str) -> None:
    """Prompts beyond the original context of scaled rotations; logits within 1e-4, every row's best token equal."""
    model = make_model(name)
    source = open_source(model)
    stages = run_pipeline(trace(source, dtype="f32"))
    step, kind, matches = EXPECTED[name]
    counts = {report.name: report.counts for report in stages.reports if report.counts}
    assert counts[step] == {kind: matches}
    params = dict(load_params(stages.unified.params, source))
    for tokens in (1, 7, 100):
        ids = torch.randint(3, 320, (tokens,), generator=torch.Generator().manual_seed(tokens))
        inputs = {"input_ids": ids, "positions": torch.arange(tokens), "logit_rows": torch.arange(tokens)}
        with torch.no_grad():
            wanted = model(ids[None], use_cache=False).logits[0]
            (given,) = run_split(stages.unified, inputs, params)
        torch.testing.assert_close(given, wanted, atol=1e-4, rtol=1e-4)
        assert torch.equal(given.argmax(-1), wanted.argmax(-1))
