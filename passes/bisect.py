"""Finds the first pass after which a graph's outputs differ: each pass at its turn, against the unrewritten graph.

It runs the passes in order once, as the pipeline does, and evaluates the graph after each one that matched.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from treadle.ir.effects import effects_of
from treadle.ir.errors import VerifyError
from treadle.ir.graph import Graph
from treadle.ir.text import print_graph
from treadle.ir.tolerance import relative_error
from treadle.ir.verify import verify
from treadle.passes.base import Pass, Tier, check_requirements
from treadle.passes.seeded_run import TOKENS, Difference, SeededRun, compare, tolerance_of

CONTEXT = 3
"""Unchanged lines around a change in the difference of two texts."""


@dataclass(frozen=True)
class Step:
    """One pass that ran: how often it matched and how far the outputs are then from the unrewritten graph's."""

    position: int
    spec: str
    tier: Tier
    matched: int
    difference: Difference | None = None
    error: str = ""


@dataclass(frozen=True)
class Bisection:
    """`culprit` is the first step beyond the tolerance, or that broke the graph; None if every pass is right.

    `value` names the first value that the culprit changed, as far as names tell; `diff` is the text around it.
    """

    tolerance: float
    steps: list[Step] = field(default_factory=list)
    culprit: Step | None = None
    value: str = ""
    diff: str = ""


def bisect(
    graph: Graph, passes: Iterable[Pass], *, tolerance: float | None = None, tokens: int = TOKENS, seed: int = 0
) -> Bisection:
    """Runs `passes` on a copy of `graph` up to the first wrong one.

    `tolerance` is relative to the largest element of an output; None is the table's for the outputs' element type.
    Raises VerifyError if `graph` itself breaks a rule, ConfigError for passes in an order that cannot be had.
    """
    verify(graph)
    steps = list(passes)
    check_requirements(steps, done=None)
    trial = SeededRun(graph, tokens=tokens, seed=seed)
    bound = tolerance_of(graph) if tolerance is None else tolerance
    wanted = trial.outputs(graph)
    result = Bisection(bound)
    current = graph.copy()
    for position, step in enumerate(steps, 1):
        before = current.copy()
        done = _take(step, position, before, current, trial, wanted)
        result.steps.append(done)
        if done.error or (done.difference and done.difference.relative > bound):
            value = "" if done.error else _first_changed(before, current, trial, bound)
            return Bisection(bound, result.steps, done, value, text_diff(before, current, around=value))
    return result


def _take(
    step: Pass, position: int, before: Graph, graph: Graph, trial: SeededRun, wanted: Sequence[torch.Tensor]
) -> Step:
    """Runs one pass on `graph`, in place, and compares; a change that the pass does not count is seen too."""
    report = step.run(graph)
    done = Step(position, step.spec(), step.tier, report.matched)
    if not report.matched and print_graph(graph) == print_graph(before):
        return done
    try:
        verify(graph, after=step.name, before=effects_of(before))
    except VerifyError as error:
        return replace(done, error=str(error))
    return replace(done, difference=compare(graph, wanted, trial.outputs(graph)))


def _first_changed(before: Graph, after: Graph, trial: SeededRun, bound: float) -> str:
    """The first value of `after` that differs from the value of that name in `before`; empty if names do not tell."""
    old, new = trial.values(before), trial.values(after)
    for name, value in new.items():
        if name in old and old[name].shape == value.shape and relative_error(old[name], value) > bound:
            return name
    return ""


def text_diff(before: Graph, after: Graph, *, around: str = "", show: Callable[[Graph], str] = print_graph) -> str:
    """The unified difference of two graphs' texts; with `around`, only the part nearest to where that value is made."""
    old, new = show(before).splitlines(), show(after).splitlines()
    lines = list(difflib.unified_diff(old, new, "before", "after", lineterm="", n=CONTEXT))
    if not around or not lines:
        return "\n".join(lines)
    made = next((i for i, line in enumerate(new, 1) if re.match(rf"\s*(%\S+, )*%{re.escape(around)}[:,]", line)), 1)
    heads = [i for i, line in enumerate(lines) if line.startswith("@@")]
    hunks = [lines[begin:end] for begin, end in zip(heads, [*heads[1:], len(lines)], strict=True)]
    nearest = min(hunks, key=lambda hunk: _distance(hunk[0], made))
    return "\n".join([*lines[:2], *nearest])


def _distance(head: str, line: int) -> int:
    """Lines between a hunk, by its `@@ -a,b +c,d @@`, and a line of the new text."""
    match = re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", head)
    assert match is not None, head
    begin, count = int(match[1]), int(match[2] or 1)
    return max(begin - line, line - (begin + count - 1), 0)
