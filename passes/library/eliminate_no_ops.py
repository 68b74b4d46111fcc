"""Removes work that changes nothing, where it takes more than one node to see it.

    %a, %b = split(%x); %y = cat([%a, %b])                      ->  %x
    %y = to.dtype(to.dtype(%x, f32), bf16)     (%x is bf16)     ->  %x
    %y = neg(neg(%x));  %y = aten.copy(%buffer, %x)             ->  %x
    %y = slice_scatter(slice_scatter(%buffer, %a, ..n), %b, n..)  ->  cat([%a, %b])

Runs after canonicalise, which removes what a single node gives away. Exact: a cast to a wider float and back keeps
every value. Does not handle parts rejoined in another order, nor buffers that are filled in part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from treadle.ir.graph import Graph, Node, Value
from treadle.ir.types import Dim, TensorType
from treadle.passes.base import NearMiss, Pass, PassReport, Site, Tier
from treadle.passes.rewriter import Rewriter

CAST, CAT, NEG, SCATTER = (
    "aten.to.dtype",
    "aten.cat.default",
    "aten.neg.default",
    "aten.slice_scatter.default",
)
_WIDENED = {("bf16", "f32"), ("f16", "f32"), ("bf16", "f64"), ("f16", "f64"), ("f32", "f64")}
_END = 1 << 31  # an end beyond any size


@dataclass(frozen=True)
class EliminateNoOps(Pass):
    name: ClassVar[str] = "eliminate_no_ops"
    tier: ClassVar[Tier] = "exact"

    def run(self, graph: Graph) -> PassReport:
        report, rewriter = self.report(), Rewriter(graph)
        dead: list[Node] = []
        for node in graph.nodes:
            node.replace_operands(lambda value: rewriter.swaps.get(value, value))
            rule = _RULES.get(node.op)
            new = rule(rewriter.at(node), node) if rule is not None else None
            if isinstance(new, str):
                report.near_misses.append(NearMiss.of(node, new, 2))
            elif new is not None and new.type == node.result.type:
                rewriter.replace(node.result, new)
                dead += [node, *(value.producer for value in node.inputs() if value.producer is not None)]
                report.sites.append(Site.of(node))
                report.count(node.op)
        rewriter.apply([*dead, *_feeding(dead)])
        return report


Result = Value | str | None  # what takes the node's place, or why nothing does although it was close


def _feeding(nodes: list[Node]) -> list[Node]:
    """What only fed removed nodes, two steps up: a buffer and its slices."""
    above = [value.producer for node in nodes for value in node.inputs() if value.producer is not None]
    return [
        *above,
        *(value.producer for node in above for value in node.inputs() if value.producer is not None),
    ]


def _shape(value: Value) -> tuple[Dim, ...]:
    assert isinstance(value.type, TensorType)
    return value.type.shape


def _rejoined(rewriter: Rewriter, node: Node) -> Result:
    parts = list(node.inputs())
    whole = parts[0].producer
    if whole is None or whole.op != "split" or len(parts) < 2:
        return None
    rank = len(_shape(node.result))
    if (
        set(parts) != set(whole.results)
        or node.attrs.get("dim", 0) % rank != whole.attrs.get("dim", -1) % rank
    ):
        return None
    return (
        next(whole.inputs())
        if parts == list(whole.results)
        else "the parts of the split are joined in another order"
    )


def _there_and_back(rewriter: Rewriter, node: Node) -> Result:
    wide = next(node.inputs())
    if wide.producer is None or wide.producer.op != CAST:
        return None
    source = next(wide.producer.inputs())
    if source.type != node.result.type:
        return None
    dtypes = (str(source.type.dtype), str(wide.type.dtype))  # type: ignore[union-attr]
    return source if dtypes in _WIDENED else f"{dtypes[1]} does not hold every {dtypes[0]}"


def _twice(rewriter: Rewriter, node: Node) -> Result:
    inner = next(node.inputs()).producer
    return next(inner.inputs()) if inner is not None and inner.op == NEG else None


def _copied(rewriter: Rewriter, node: Node) -> Result:
    return node.operand("src")


def _filled(rewriter: Rewriter, node: Node) -> Result:
    """Scatters that fill a buffer from the first element to the last, one after another."""
    dim, parts, at = node.attrs.get("dim", 0), [], _shape(node.result)[node.attrs.get("dim", 0)]
    current: Node | None = node
    while current is not None and current.op == SCATTER and current.attrs.get("dim", 0) == dim:
        end, part = current.attrs.get("end"), current.operand("src")
        reaches = at if end is None or (isinstance(end, int) and end > _END) else end
        if part is None or reaches != at or current.attrs.get("step", 1) != 1:
            return "the buffer is not filled piece after piece"
        parts.append(part)
        at = current.attrs.get("start") or 0
        if at == 0:
            return rewriter.call(CAT, parts[::-1], dim=dim, source=node.source).result
        base = current.operand("self")
        current = base.producer if base is not None else None
    return None


_RULES: dict[str, Callable[[Rewriter, Node], Result]] = {
    CAT: _rejoined,
    CAST: _there_and_back,
    NEG: _twice,
    "aten.copy.default": _copied,
    SCATTER: _filled,
}
