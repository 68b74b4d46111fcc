"""Removes nodes, and parameters, whose results nothing reads.

    %m = aten.cumsum(%p)     (no reader)     ->     gone

Exact. Keeps nodes that write state (attention writes the KV cache).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from treadle.ir.graph import Graph
from treadle.ir.ops.registry import get_op
from treadle.passes.base import Pass, PassReport, Tier
from treadle.passes.rewriter import drop_dead


@dataclass(frozen=True)
class EliminateDeadCode(Pass):
    name: ClassVar[str] = "eliminate_dead_code"
    tier: ClassVar[Tier] = "exact"
    stage: ClassVar[str] = "clean"

    def run(self, graph: Graph) -> PassReport:
        report = self.report()
        params = len(graph.params)
        pure = [node for node in graph.nodes if get_op(node.op).pure]
        report.count("nodes", drop_dead(graph, pure))
        report.count("params", params - len(graph.params))
        return report
