"""What a pass is, what it reports, and the runner that verifies, times and shows each one.

A pass is a frozen dataclass whose fields are its options. It rewrites a graph in place and returns a report of the
sites it changed and of the near misses: places where a pattern began to match and stopped, with the reason.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal

from treadle.ir.graph import Graph, Node
from treadle.ir.text import print_node
from treadle.ir.verify import verify as verify_graph

Tier = Literal["exact", "changing"]


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
    """What one run of a pass did. `counts` splits the matches by kind."""

    name: str
    tier: Tier
    options: dict[str, Any] = field(default_factory=dict)
    sites: list[Site] = field(default_factory=list)
    near_misses: list[NearMiss] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

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
    """Base of all passes. `exact` passes keep every output bit in eager mode; `changing` ones keep tolerances."""

    name: ClassVar[str]
    tier: ClassVar[Tier]

    @abstractmethod
    def run(self, graph: Graph) -> PassReport:
        """Rewrites `graph` in place."""

    def options(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def report(self) -> PassReport:
        """An empty report of this pass."""
        return PassReport(self.name, self.tier, self.options())


Observe = Callable[[str, Graph], None]


def run_passes(
    graph: Graph, passes: Iterable[Pass], *, verify: bool = True, observe: Observe | None = None
) -> list[PassReport]:
    """Runs passes in order on `graph`, in place. Raises VerifyError naming the pass that broke a rule of the IR.

    `observe(pass name, graph)` is called after each pass that changed something; it must not change the graph.
    """
    if verify:
        verify_graph(graph)
    reports = []
    for step in passes:
        begin = time.perf_counter()
        report = step.run(graph)
        report.seconds = time.perf_counter() - begin
        reports.append(report)
        if report.matched and verify:
            verify_graph(graph, after=step.name)
        if report.matched and observe is not None:
            observe(step.name, graph)
    return reports
