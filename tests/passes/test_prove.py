"""The prover: right passes hold on every architecture, a wrong one is found and named, weights stay the same numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from tests.passes.harness import ARCHITECTURES, traced_text
from treadle.ir.errors import VerifyError
from treadle.ir.graph import Graph
from treadle.ir.text import parse_graph
from treadle.ir.tolerance import relative_error
from treadle.ir.weights import Concat, Load, Slice
from treadle.passes.base import STAGES, Pass, PassReport, Tier
from treadle.passes.pipeline import PipelineOptions, plan_pipeline
from treadle.passes.prove import Check, make_trial, prove_passes
from treadle.passes.seeded import SeededWeights

SHAPES = (1, 2, 7)


def pipeline(**options: object) -> list[Pass]:
    plan = plan_pipeline(PipelineOptions(**options))  # type: ignore[arg-type]
    return [step for stage in STAGES for step in plan[stage]]


@dataclass(frozen=True)
class LowerEps(Pass):
    """Calls itself exact and changes the epsilon of every norm."""

    name: ClassVar[str] = "lower_eps"
    tier: ClassVar[Tier] = "exact"
    eps: float = 0.1

    def run(self, graph: Graph) -> PassReport:
        report = self.report()
        for node in graph.nodes:
            if node.op == "rms_norm":
                node.attrs["eps"] = self.eps
                report.count("rms_norm")
        return report


def prove(architecture: str, steps: list[Pass], shapes: tuple[int, ...] = SHAPES) -> list[Check]:
    traced = parse_graph(traced_text(architecture))
    return prove_passes(traced, steps, make_trial(traced, shapes, seed=0))[0]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_pass_and_all_together_hold(architecture: str) -> None:
    """Promise 9: every pass that matched is compared at every token count, exact ones bit by bit."""
    checks = prove(architecture, pipeline())
    assert [check for check in checks if not check.ok] == []
    proved = {check.name for check in checks if check.kind == "pass"}
    assert {"drop_batch_dim", "raise_linear" if architecture != "gpt2" else "raise_addmm", "fuse_qkv"} & proved
    assert [check.tokens for check in checks if check.kind == "all passes"] == list(SHAPES)
    assert all(check.bound == 0 for check in checks if check.name == "raise_rope")


def test_a_wrong_pass_is_named() -> None:
    """A pass that changes numbers fails by itself; the passes after it do not, all together does."""
    steps = pipeline()
    place = next(number for number, step in enumerate(steps) if step.name == "raise_rope")
    checks = prove("llama", [*steps[:place], LowerEps(), *steps[place:]], (2,))
    assert [(check.kind, check.name) for check in checks if not check.ok] == [
        ("pass", "lower_eps"),
        ("all passes", "all passes"),
    ]


def test_a_pass_that_leaves_a_graph_that_cannot_run() -> None:
    with pytest.raises(VerifyError, match="lower_eps"):
        prove("llama", [*pipeline(), LowerEps(eps="high")], (2,))  # type: ignore[arg-type]


def test_fused_weights_are_made_of_the_traced_ones() -> None:
    """A recipe over traced recipes reads the very numbers; one that reads something else is refused."""
    graph = parse_graph(
        'graph @g(T in 1..8) {\n  input %x: f32[T,4]\n  param %a: f32[2,4] = slice(load("ab"), dim=0, start=0, stop=2)\n'
        '  param %b: f32[2,4] = load("b")\n  %y: f32[T,2] = linear(%x, %a)\n  return %y\n}\n'
    )
    weights = SeededWeights(graph, seed=3)
    a, b = weights.of(graph.params)
    joined = graph.copy().params[0]
    joined.recipe = Concat((Load("b"), Slice(Load("ab"), dim=0, start=0, stop=2)), dim=0)
    assert torch.equal(weights.of([joined])[0], torch.cat([b, a]))
    joined.recipe = Load("ab")
    with pytest.raises(VerifyError, match="'ab'"):
        weights.of([joined])
    again = SeededWeights(graph, seed=3).of(graph.params)
    other = SeededWeights(graph, seed=4).of(graph.params)
    assert torch.equal(again[0], a) and not torch.equal(other[0], a)


def test_errors_are_relative_and_never_hide_nan() -> None:
    one = torch.tensor([1.0, 4.0])
    assert relative_error(one, torch.tensor([1.0, 3.0])) == 0.25
    assert relative_error(one, one.clone()) == 0
    assert relative_error(one, torch.tensor([1.0, float("nan")])) == float("inf")
    assert relative_error(one, torch.ones(3)) == float("inf")
    assert relative_error(one, one.double()) == float("inf")
