"""The golden traced graphs still stand for what the tracer makes: a fresh trace gives the same match counts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.models import make_model
from tests.passes.harness import golden_json, match_counts
from treadle.ir.source import open_source
from treadle.ir.trace import trace
from treadle.passes.pipeline import run_pipeline

_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_CHANGES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3": _ALTERNATING | {"num_hidden_layers": 3},
    "mixtral": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", _CHANGES)
def test_a_fresh_trace_matches_alike(architecture: str) -> None:
    """Three layers traced now give the pieces and counts of `golden/match_counts.json`."""
    model = make_model(architecture, **_CHANGES[architecture])
    stages = run_pipeline(trace(open_source(model), dtype="f32"))
    given = {"pieces": list(stages.unified.pieces), "matches": match_counts(stages.reports)}
    assert given == golden_json("match_counts.json")[architecture]
