"""At level 3: times the program with and without each fusing pass on this machine, and leaves out those that do not pay.

A pass rewrites the whole graph, so the choice is made for the whole program: the time of the pieces that differ, each
counted as often as the program calls it, averaged over a few token counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import TYPE_CHECKING, Any

from treadle.codegen.target import Target, resolve_target
from treadle.codegen.time_pieces import Timer, bind, interleaved, usable_counts
from treadle.ir.errors import ConfigError
from treadle.ir.graph import Graph
from treadle.ir.hashing import structural_hash

if TYPE_CHECKING:
    from treadle.codegen.loader import Artifact
    from treadle.passes.pipeline import CompiledStages, PipelineOptions
    from treadle.passes.split import SplitGraph

REPORT = "reports/profit.json"
MARGIN = 1.02
"""A pass is left out when the program is slower with it by more than this factor; closer is noise."""

Build = Callable[["CompiledStages", Mapping[str, Graph]], Mapping[str, "Artifact"]]
"""Compiles the named pieces of a program and loads them."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Seconds of all calls of the pieces that the pass changes, in one step of `tokens` tokens."""

    tokens: int
    with_pass: float
    without: float


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What was measured for one pass and decided; `reason` says it in words."""

    name: str
    kept: bool
    times: tuple[Point, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Profit:
    """The choices, or (`reason`) why nothing was measured."""

    choices: tuple[Choice, ...] = ()
    reason: str = ""

    @property
    def left_out(self) -> tuple[str, ...]:
        return tuple(choice.name for choice in self.choices if not choice.kept)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def unmeasured_reason(target: Target) -> str:
    """Why times of this machine say nothing about `target`; empty if they do."""
    here = resolve_target("cpu")
    return "" if target == here else f"passes were not measured: the target is {target.name}, this machine is {here.name}"


def choose_by_time(
    stages: CompiledStages, options: PipelineOptions, target: Target, build: Build, timer: Timer = interleaved
) -> Profit:
    """Measures every pass with `measured = True` that rewrote something. `stages` is the compile with all of them."""
    from treadle.passes.pipeline import measured_passes

    if reason := unmeasured_reason(target):
        return Profit(reason=reason)
    active = {report.name for report in stages.reports if report.matched}
    choices = []
    for name in measured_passes(options):
        if name in active:
            choices.append(_choose(name, stages, options, build, timer))
    return Profit(choices=tuple(choices))


def _choose(
    name: str, stages: CompiledStages, options: PipelineOptions, build: Build, timer: Timer
) -> Choice:
    from treadle.passes.pipeline import run_pipeline

    try:
        others = run_pipeline(stages.traced, replace(options, without=(*options.without, name)))
    except ConfigError as error:
        return Choice(name=name, kept=True, times=(), reason=f"kept unmeasured: {error}")
    ours, theirs = _comparable(stages.unified, others.unified)
    with_pass, without = build(stages, ours), build(others, theirs)
    points = tuple(
        _time(tokens, (stages.unified, ours, with_pass), (others.unified, theirs, without), timer)
        for tokens in usable_counts(stages.traced.tokens[1])
    )
    return _decide(name, points)


def _decide(name: str, points: tuple[Point, ...]) -> Choice:
    kept = mean(point.with_pass / point.without for point in points) <= MARGIN
    times = "; ".join(
        f"{point.with_pass * 1e3:.3g} ms with it and {point.without * 1e3:.3g} ms without for {point.tokens} tokens"
        for point in points
    )
    return Choice(name=name, kept=kept, times=points, reason=f"{'kept' if kept else 'left out'}: {times}")


def _comparable(ours: SplitGraph, theirs: SplitGraph) -> tuple[dict[str, Graph], dict[str, Graph]]:
    """The pieces that stand for the difference: those that the layers share, if the pass changes any, else all.

    Pieces that a deep model calls once would cost two thirds of the compile and a thirtieth of the time.
    """
    sides = _differing(ours, theirs), _differing(theirs, ours)
    shared = tuple(
        {name: piece for name, piece in side.items() if _calls(program)[name] > 1}
        for program, side in ((ours, sides[0]), (theirs, sides[1]))
    )
    same_calls = sorted(_calls(ours)[name] for name in shared[0]) == sorted(_calls(theirs)[name] for name in shared[1])
    return (shared[0], shared[1]) if shared[0] and same_calls else sides


def _calls(program: SplitGraph) -> Counter[str]:
    """How often the program calls each piece."""
    return Counter(call.piece for call in program.calls())


def _differing(program: SplitGraph, other: SplitGraph) -> dict[str, Graph]:
    """The pieces of `program` that `other` has not."""
    known = {structural_hash(piece) for piece in other.pieces.values()}
    return {name: piece for name, piece in program.pieces.items() if structural_hash(piece) not in known}


_Side = tuple["SplitGraph", Mapping[str, Graph], Mapping[str, "Artifact"]]


def _time(tokens: int, ours: _Side, theirs: _Side, timer: Timer) -> Point:
    """Both sides in one call of the timer, so that their rounds interleave."""
    calls: dict[str, Callable[[], object]] = {}
    for side, (_, pieces, artifacts) in (("with", ours), ("without", theirs)):
        calls |= {f"{side} {name}": bind(artifacts[name], piece, tokens) for name, piece in pieces.items()}
    seconds = timer(calls)
    sums = []
    for side, (program, pieces, _) in (("with", ours), ("without", theirs)):
        number = _calls(program)
        sums.append(sum(number[name] * seconds[f"{side} {name}"] for name in pieces))
    return Point(tokens=tokens, with_pass=sums[0], without=sums[1])
