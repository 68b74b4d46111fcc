"""Bisection: a wrong pass among all is named, with the output, the value and the text around it (acceptance 6)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import pytest
import torch

from tests.passes.harness import traced
from treadle.ir.errors import ConfigError, VerifyError
from treadle.ir.graph import Graph, Node
from treadle.passes.base import STAGES, Pass, PassReport, Tier
from treadle.passes.bisect import Bisection, bisect, text_diff
from treadle.passes.pipeline import PipelineOptions, plan_pipeline
from treadle.passes.seeded_run import SeededRun, compare, describe

LAYER = "model.layers.1"


def all_passes() -> list[Pass]:
    plan = plan_pipeline(PipelineOptions())
    return [step for stage in STAGES for step in plan[stage]]


def _first(graph: Graph, op: str) -> Node:
    return next(node for node in graph.nodes if node.op == op and node.source.path.startswith(LAYER))


def swap_gate_and_up(graph: Graph) -> None:
    node = _first(graph, "gated_act")
    node.operands = {"gate": node.operands["up"], "up": node.operands["gate"]}


def forget_epsilon(graph: Graph) -> None:
    _first(graph, "add_rms_norm").attrs["eps"] = 0.5


def skip_attention(graph: Graph) -> None:
    node = _first(graph, "attention")
    graph.replace_uses({node.result: next(node.inputs())})
    graph.erase([node])


def widen(graph: Graph) -> None:
    _first(graph, "linear").result.type = graph.inputs[0].type


def turn_nothing(graph: Graph) -> None:
    return None


@dataclass(frozen=True)
class Wrong(Pass):
    """Changes one place for the worse; `counts` says whether it admits to it."""

    change: Callable[[Graph], None] = field(repr=False)
    counts: bool = True
    name: ClassVar[str] = "wrong"
    tier: ClassVar[Tier] = "exact"

    def spec(self) -> str:
        return "wrong"

    def run(self, graph: Graph) -> PassReport:
        self.change(graph)
        report = PassReport(self.name, self.tier)
        report.count("change", int(self.counts))
        return report


class _Needy(Wrong):
    requires: ClassVar[tuple[str, ...]] = ("raise_linear",)


def with_wrong(change: Callable[[Graph], None], *, counts: bool = True, before: str = "select_logit_rows") -> Bisection:
    steps = all_passes()
    at = next(i for i, step in enumerate(steps) if step.name == before)
    steps.insert(at, Wrong(change, counts))
    return bisect(traced("llama"), steps)


@pytest.mark.parametrize("change", [swap_gate_and_up, forget_epsilon])
def test_a_wrong_pass_is_found_among_all(change: Callable[[Graph], None]) -> None:
    """Every pass before it is cleared, none after it is run, and the text around its change is shown."""
    found = with_wrong(change)
    assert found.culprit is not None and found.culprit.spec == "wrong"
    assert found.culprit is found.steps[-1] and found.culprit.position == len(found.steps) == len(all_passes())
    assert found.culprit.difference is not None
    assert found.culprit.difference.output == "linear.43" and found.culprit.difference.max_abs > 1e-3
    assert all(step.difference is None or step.difference.bitwise for step in found.steps[:-1])
    assert found.diff.count("@@ -") == 1
    assert [line[0] for line in found.diff.splitlines()[3:] if line[0] in "+-"] == ["-", "+"]
    assert f"%{found.value}" in found.diff and LAYER in found.diff


def test_a_change_that_is_not_counted() -> None:
    """A pass that reports no match is compared too if the text has changed."""
    found = with_wrong(swap_gate_and_up, counts=False)
    assert found.culprit is not None and found.culprit.spec == "wrong" and found.culprit.matched == 0


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (skip_attention, "after wrong: an effect is lost: nothing writes the state %kv.1 any more"),
        (widen, "after wrong: linear gives"),
    ],
)
def test_a_pass_that_breaks_the_graph(change: Callable[[Graph], None], problem: str) -> None:
    """The verifier's words are the finding; the graph is not run."""
    found = with_wrong(change, before="fuse_add_rms_norm")
    assert found.culprit is not None and problem in found.culprit.error
    assert found.culprit.difference is None


def test_right_passes_are_cleared() -> None:
    found = bisect(traced("llama"), all_passes())
    assert found.culprit is None and found.diff == ""
    assert [step.spec for step in found.steps] == [step.spec() for step in all_passes()]
    assert with_wrong(turn_nothing, counts=False).culprit is None


def test_tolerance_decides() -> None:
    """A difference within the tolerance is let pass, and the default is the table's."""

    def nudge(graph: Graph) -> None:
        _first(graph, "rms_norm").attrs["eps"] = 1.02e-6

    steps: list[Pass] = [*all_passes()[:12], Wrong(nudge)]
    assert bisect(traced("llama"), steps).tolerance == 1e-5
    assert bisect(traced("llama"), steps, tolerance=0.5).culprit is None
    found = bisect(traced("llama"), steps, tolerance=0.0)
    assert found.culprit is not None and found.culprit.spec == "wrong"


def test_errors_of_the_user() -> None:
    """A token count outside the graph's range, and passes in a wrong order."""
    with pytest.raises(VerifyError, match="choose from 1 to 256"):
        bisect(traced("llama"), [], tokens=1000)
    with pytest.raises(ConfigError, match="'wrong' requires 'raise_linear', which runs later"):
        bisect(traced("llama"), [_Needy(turn_nothing), *all_passes()])


def test_seeded_runs_are_repeatable() -> None:
    """Equal seeds give equal bits, other seeds do not; a digest says so."""
    graph = traced("llama")
    run = partial(lambda seed: SeededRun(graph, seed=seed).outputs(graph))
    assert compare(graph, run(0), run(0)).bitwise
    assert not compare(graph, run(0), run(1)).bitwise
    assert describe("x", run(0)[0]) == describe("x", run(0)[0]) != describe("x", run(1)[0])
    assert "float32[11, 320]" in describe("x", run(0)[0])


def test_comparison_sees_signs_shapes_and_nans() -> None:
    """Zeros of two signs are not the same bits, NaN is no match for a number, and neither is another shape."""
    graph = traced("llama")
    zero, one = torch.zeros(2), torch.ones(2)
    signs = compare(graph, [zero], [-zero])
    assert not signs.bitwise and signs.max_abs == 0
    for bad in (torch.full((2,), float("nan")), torch.ones(3), one.double()):
        assert compare(graph, [one], [bad]).relative == float("inf")
    assert compare(graph, [one], []).relative == float("inf")


def test_difference_of_equal_graphs_is_empty() -> None:
    assert text_diff(traced("llama"), traced("llama")) == ""
