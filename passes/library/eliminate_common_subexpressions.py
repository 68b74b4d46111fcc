"""Computes equal things once.

    %a = aten.reshape(%x, [1,T,64])
    %b = aten.reshape(%x, [1,T,64])     ->     %a, used for both

Two pure nodes are equal if op, operands and attributes are. Exact. Does not look through commutativity, and leaves ops
that read or write state, or that draw random numbers, alone.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

from treadle.ir.graph import Graph, Node
from treadle.ir.ops.registry import get_op
from treadle.passes.base import Pass, PassReport, Site, Tier
from treadle.passes.rewriter import Rewriter

_RANDOM = ("aten.rand", "aten.bernoulli", "aten.multinomial", "aten.dropout")


@dataclass(frozen=True)
class EliminateCommonSubexpressions(Pass):
    name: ClassVar[str] = "eliminate_common_subexpressions"
    tier: ClassVar[Tier] = "exact"

    def run(self, graph: Graph) -> PassReport:
        report, rewriter = self.report(), Rewriter(graph)
        seen: dict[Hashable, Node] = {}
        dead: list[Node] = []
        for node in graph.nodes:
            node.replace_operands(lambda value: rewriter.swaps.get(value, value))
            if not _pure(node):
                continue
            twin = seen.setdefault(_key(node), node)
            if twin is not node:
                for old, new in zip(node.results, twin.results, strict=True):
                    rewriter.replace(old, new)
                dead.append(node)
                report.sites.append(Site.of(node))
                report.count(node.op)
        rewriter.apply(dead)
        return report


def _pure(node: Node) -> bool:
    op = get_op(node.op)
    return op.pure and not op.reads and not node.op.startswith(_RANDOM)


def _key(node: Node) -> Hashable:
    operands = tuple(
        (name, tuple(map(id, operand)) if isinstance(operand, tuple) else id(operand))
        for name, operand in node.operands.items()
    )
    return node.op, operands, tuple((name, _frozen(attr)) for name, attr in node.attrs.items())


def _frozen(attr: Any) -> Hashable:
    return tuple(map(_frozen, attr)) if isinstance(attr, list | tuple) else (type(attr), attr)
