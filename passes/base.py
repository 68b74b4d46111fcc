"""What a pass is, what it reports, and the runner that verifies, times and shows each one.

A pass is a frozen dataclass whose fields are its options. It rewrites a graph in place and returns a report of the
sites it changed and of the near misses: places where a pattern began to match and stopped, with the reason.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal

from treadle.ir.effects import effects_of
from treadle.ir.errors import ConfigError
from treadle.ir.graph import Graph, Node
from treadle.ir.text import print_node
from treadle.ir.verify import verify as verify_graph

Tier = Literal["exact", "changing"]
STAGES = ("clean", "raise", "fuse", "lower")
"""Where in the pipeline a pass can stand, in order."""


@dataclass(frozen=True)
class Site:
    """A place that was rewritten: the old node as text and where in the model it came from."""

    node: str
    source: str

    @staticmethod
    def of(node: Node) -> Site:
        return Site(print_node(node, source=False), str(node.source))


@dataclass(frozen=True)
class NearMiss:
    """A place that nearly matched: the node where matching stopped, its model source, and what it failed."""

    node: str
    source: str
    predicate: str
    matched: int = 0

    @staticmethod
    def of(node: Node, predicate: str, matched: int = 0) -> NearMiss:
        return NearMiss(print_node(node, source=False), str(node.source), predicate, matched)


@dataclass
class PassReport:
    """What one run of a pass did. `counts` splits the matches by kind; `spec` is the pass with its options as text.

    `warning` says that the pass was expected to match and matched nothing, and where to look.
    """

    name: str
    tier: Tier
    options: dict[str, Any] = field(default_factory=dict)
    sites: list[Site] = field(default_factory=list)
    near_misses: list[NearMiss] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    spec: str = ""
    warning: str = ""

    @property
    def matched(self) -> int:
        return sum(self.counts.values())

    def count(self, kind: str, number: int = 1) -> None:
        if number:
            self.counts[kind] = self.counts.get(kind, 0) + number

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a bundle's `reports/passes.json`."""
        return {**asdict(self), "matched": self.matched}


@dataclass(frozen=True)
class Pass(ABC):
    """Base of all passes. `exact` passes keep every output bit in eager mode; `changing` ones keep tolerances.

    A pass declares where it belongs: its `stage`, and names of passes, or of what they produce, that must have run
    (`requires`) or that it follows if they run at all (`after`). `produces` names what later passes may require, ops as
    a rule. `expects` makes a run without a match a warning. `measured` passes are for speed only: level 3 leaves them out
    where they do not pay.
    """

    name: ClassVar[str]
    tier: ClassVar[Tier]
    stage: ClassVar[str] = "fuse"
    requires: ClassVar[tuple[str, ...]] = ()
    produces: ClassVar[tuple[str, ...]] = ()
    after: ClassVar[tuple[str, ...]] = ()
    expects: ClassVar[bool] = False
    measured: ClassVar[bool] = False

    @abstractmethod
    def run(self, graph: Graph) -> PassReport:
        """Rewrites `graph` in place."""

    def options(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def spec(self) -> str:
        """The pass as `parse_passes` reads it: its name and the options that are not at their defaults."""
        changed = [f"{n}={spell_option(v)}" for n, v in self.options().items() if v != self._default(n)]
        return self.name + (f"{{{','.join(changed)}}}" if changed else "")

    def _default(self, name: str) -> Any:
        item = next(item for item in fields(self) if item.name == name)
        return item.default_factory() if item.default_factory is not MISSING else item.default

    def report(self) -> PassReport:
        """An empty report of this pass."""
        return PassReport(self.name, self.tier, self.options(), spec=self.spec())

    @classmethod
    def provides(cls) -> tuple[str, ...]:
        """The names by which others may require or follow this pass."""
        return (cls.name, *cls.produces)


def spell_option(value: Any) -> str:
    """An option's value as text that `parse_passes` reads back."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(spell_option, value))}]"
    return json.dumps(value)


Observe = Callable[[str, Graph], None]


def run_passes(
    graph: Graph,
    passes: Iterable[Pass],
    *,
    verify: bool = True,
    observe: Observe | None = None,
    done: Collection[str] | None = None,
    asked: Collection[str] = (),
) -> list[PassReport]:
    """Runs passes in order on `graph`, in place. Raises VerifyError naming the pass that broke a rule of the IR.

    `observe(pass name, graph)` is called after each pass that changed something; it must not change the graph.
    `done` names what has run on the graph before; None means that nobody knows, as for a graph read from a file. Then
    only the order of `passes` is checked against what they require. `asked` names passes that must not match nothing
    without a warning. Raises ConfigError, before anything runs, for a requirement that is not met.
    """
    steps = list(passes)
    check_requirements(steps, done)
    if verify:
        verify_graph(graph)
    reports = []
    for step in steps:
        before = effects_of(graph)
        begin = time.perf_counter()
        report = step.run(graph)
        report.seconds = time.perf_counter() - begin
        if not report.matched and (step.expects or step.name in asked):
            report.warning = _no_match(report)
        reports.append(report)
        if report.matched and verify:
            verify_graph(graph, after=step.name, before=before)
        if report.matched and observe is not None:
            observe(step.name, graph)
    return reports


def check_requirements(passes: Iterable[Pass], done: Collection[str] | None) -> None:
    """Raises ConfigError naming both passes if one comes before, or without, what it requires. See `run_passes`."""
    steps = list(passes)
    anywhere = {name for step in steps for name in step.provides()}
    provided = set(done or ())
    for step in steps:
        for name in step.requires:
            if name in provided or (done is None and name not in anywhere):
                continue
            where = "which runs later" if name in anywhere else "which has not run"
            raise ConfigError(f"pass {step.name!r} requires {name!r}, {where}; put {name!r} before it")
        provided.update(step.provides())


def _no_match(report: PassReport) -> str:
    if not report.near_misses:
        return f"{report.name} was expected to match and found nothing that looks like its pattern"
    miss = report.near_misses[0]
    return f"{report.name} was expected to match; nearest was {miss.node} ({miss.source}): {miss.predicate}"
