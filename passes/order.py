"""Puts passes that were asked for into an order that fits what they declare: `requires` and `after`, as given otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from treadle.ir.errors import ConfigError
from treadle.passes.base import STAGES, Pass

Plan = dict[str, list[Pass]]
"""The passes of each stage, in order."""


def add_extra(plan: Plan, extra: Sequence[Pass]) -> None:
    """Puts each extra pass at the end of its stage. Raises ConfigError naming the passes that cannot be ordered."""
    _refuse_twins(extra)
    for stage in STAGES:
        plan[stage].extend(ordered([step for step in extra if step.stage == stage]))
    _check_order(plan, extra)


def ordered(passes: Sequence[Pass]) -> list[Pass]:
    """`passes` in an order in which each follows those it requires or comes after; as given where that leaves a choice.

    Raises ConfigError naming the passes of a cycle.
    """
    left, done = list(passes), []
    while left:
        ready = next((step for step in left if not _before(step, left)), None)
        if ready is None:
            raise ConfigError(f"these passes each wait for another of them: {_cycle(left)}; change their requires or after")
        left.remove(ready)
        done.append(ready)
    return done


def _before(step: Pass, others: Sequence[Pass]) -> list[Pass]:
    """Those of `others` that must run before `step`."""
    wanted = {*step.requires, *step.after}
    return [other for other in others if other is not step and wanted.intersection(other.provides())]


def _cycle(stuck: Sequence[Pass]) -> str:
    """One cycle among passes of which none is ready: `a after b after a`."""
    path = [stuck[0]]
    while (following := _before(path[-1], stuck)[0]) not in path:
        path.append(following)
    names = [step.name for step in [*path[path.index(following) :], following]]
    return " after ".join(names)


def _refuse_twins(extra: Sequence[Pass]) -> None:
    names = [step.name for step in extra]
    if twins := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"pass {twins[0]!r} is asked for twice; give it once, with all its options")


def _check_order(plan: Plan, extra: Sequence[Pass]) -> None:
    """Raises ConfigError for a pass whose stage ends before something that it has to follow begins."""
    steps = [step for stage in STAGES for step in plan[stage]]
    for step in extra:
        place = steps.index(step)
        earlier = {name for other in steps[:place] for name in other.provides()}
        for late in steps[place + 1 :]:
            if set(step.after).intersection(late.provides()).difference(earlier):
                raise ConfigError(
                    f"pass {step.name!r} (stage {step.stage}) must come after {late.name!r}, which runs in stage "
                    f"{_stage(plan, late)}; give {step.name!r} that stage or a later one"
                )


def _stage(plan: Plan, step: Pass) -> str:
    return next(stage for stage in STAGES if step in plan[stage])
