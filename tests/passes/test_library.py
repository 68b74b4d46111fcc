"""Every pass of the library on small graphs (C02: passes are checked; acceptance 3 of the pass author's promises)."""

from __future__ import annotations

import sys

import pytest

from tests.passes.cases import CASES, REFUSALS
from tests.passes.harness import Case, Refusal, Weights, apply, assert_same, example_inputs, outputs
from treadle.ir.text import parse_graph, print_graph
from treadle.passes.pipeline import clean_passes, fuse_passes, last_passes, raise_passes, target_passes


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_text_after_and_counts(case: Case) -> None:
    """The rewritten graph reads as its golden text, and the report counts the matches by kind."""
    graph, report = apply(case.step, case.before)
    assert report.counts == case.counts
    assert print_graph(graph) == case.golden.read_text()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_second_run_matches_nothing(case: Case) -> None:
    """A pass leaves nothing of its own to do."""
    graph, _ = apply(case.step, case.before)
    text = print_graph(graph)
    again = case.step.run(graph)
    assert again.matched == 0 and print_graph(graph) == text


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_outputs_are_kept(case: Case) -> None:
    """Bitwise for exact passes, within the tolerance table for the others."""
    before = parse_graph(case.before)
    weights, inputs = Weights(before), example_inputs(before)
    after, _ = apply(case.step, case.before)
    everything = {**example_inputs(after), **inputs}
    wanted, given = outputs(before, weights, inputs), outputs(after, weights, everything)
    for one, other in zip(wanted, given, strict=True):
        assert_same(one, other, exact=case.step.tier == "exact")


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_refusals_say_why(refusal: Refusal) -> None:
    """A graph that must not match stays as it is, and a near miss names the node and the failed predicate."""
    graph, report = apply(refusal.step, refusal.before)
    assert report.matched == 0, report.counts
    assert print_graph(graph) == print_graph(parse_graph(refusal.before))
    reasons = [miss.predicate for miss in report.near_misses]
    assert bool(reasons) == bool(refusal.reason) and any(
        refusal.reason in reason for reason in reasons or [""]
    )


def test_every_pass_has_a_case_and_a_refusal() -> None:
    """A pass added to the pipeline comes with its proof."""
    names = {step.name for step in [*clean_passes(), *raise_passes(), *fuse_passes(), *last_passes(), *target_passes()]}
    assert names == {case.step.name for case in CASES} == {refusal.step.name for refusal in REFUSALS}


def test_every_pass_is_documented_with_a_sketch() -> None:
    """The docstring of each pass's file draws the graph before and after and says what it leaves alone."""
    for step in {type(case.step) for case in CASES}:
        text = sys.modules[step.__module__].__doc__ or ""
        tier = "Exact" if step.tier == "exact" else "Changing"
        assert "->" in text and tier in text, step.__module__
