"""Computes logits only for the rows that are sampled.

                                          input %logit_rows: i64[T]
                                          %s = select_rows(%h, %logit_rows)
    %y = linear(%h, %w)             ->    %y = linear(%s, %w)
    %z = aten.tanh(%y)                    %z = aten.tanh(%y)

Walks back from the logits through ops that work on each element alone (soft cap, casts, scales) to the last linear
and selects just before it. What follows has S rows where T stands in its types. Changing: a product with fewer rows
may sum in another order. If the walk meets anything else first, the rows are taken from the logits themselves and a
near miss says what was met. Does nothing to a graph that has `logit_rows` already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from treadle.ir.graph import Graph, Node, Param, Value
from treadle.ir.types import T, TensorType, tensor
from treadle.passes.base import NearMiss, Pass, PassReport, Site, Tier
from treadle.passes.library.drop_batch_dim import POINTWISE
from treadle.passes.rewriter import Rewriter

ROWS = "logit_rows"
_LINEARS = ("linear", "aten.linear.default", "aten.mm.default")


class _Stop(Exception):
    """The walk cannot go on: at which node, and why."""

    def __init__(self, node: Node | None, reason: str):
        super().__init__(reason)
        self.node = node
        self.reason = reason


@dataclass(frozen=True)
class SelectLogitRows(Pass):
    name: ClassVar[str] = "select_logit_rows"
    tier: ClassVar[Tier] = "changing"
    stage: ClassVar[str] = "lower"
    produces: ClassVar[tuple[str, ...]] = ("select_rows",)
    expects: ClassVar[bool] = True

    def run(self, graph: Graph) -> PassReport:
        report = self.report()
        if any(value.name == ROWS for value in graph.inputs):
            return report
        (logits,) = graph.outputs
        rows = Value(ROWS, tensor("i64", (T,)))
        graph.inputs.append(rows)
        rewriter, call = Rewriter(graph), "select_rows"
        try:
            last = _last_linear(logits, graph.users())
        except _Stop as stop:
            if stop.node is not None:
                report.near_misses.append(NearMiss.of(stop.node, stop.reason, 1))
            end = graph.nodes[-1]
            graph.outputs = [rewriter.at(end, after=True).call(call, logits, rows, source=end.source).result]
        else:
            hidden = next(last.inputs())
            selected = rewriter.at(last).call(call, hidden, rows, source=last.source).result
            report.sites.append(Site.of(last))
            last.replace_operands(lambda value: selected if value is hidden else value)
        report.count(call)
        rewriter.apply()
        return report


def _last_linear(logits: Value, users: dict[Value, list[Node]]) -> Node:
    """The linear that makes the logits, if nothing but elementwise work follows it and nothing else reads that."""
    value = logits
    while True:
        node = value.producer
        if node is None:
            raise _Stop(None, "the logits are an input")
        if len(users.get(value, ())) > (value is not logits):
            raise _Stop(node, f"%{value.name} is also read elsewhere")
        if node.op in _LINEARS:
            return node
        if node.op not in POINTWISE:
            raise _Stop(node, f"expected a linear or an elementwise op before the logits, found {node.op}")
        computed = [v for v in node.inputs() if not isinstance(v, Param)]
        if len(computed) != 1 or not _has_tokens_first(computed[0]):
            raise _Stop(node, f"{node.op} joins several values, or one that does not lead with T")
        value = computed[0]


def _has_tokens_first(value: Value) -> bool:
    return isinstance(value.type, TensorType) and value.type.shape[:1] == (T,)
