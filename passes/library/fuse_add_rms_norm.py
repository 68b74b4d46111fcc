"""Joins a residual add with the norm that follows it.

    %s = aten.add(%residual, %x)
    %y = rms_norm(%s, %w)             ->    %y, %s = add_rms_norm(%x, %residual, %w)

The sum stays a result, as the next residual reads it. Exact: the same addition, then the same norm. Does not handle
sums with a factor (alpha), sums that broadcast, sums of a parameter, nor sums that more than one norm reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from treadle.ir.graph import Graph, Node, Param, Value
from treadle.passes.base import NearMiss, Pass, PassReport, Site, Tier
from treadle.passes.rewriter import Rewriter

ADD = "aten.add.Tensor"
_NORMS = ("rms_norm", "layer_norm")


@dataclass(frozen=True)
class FuseAddRmsNorm(Pass):
    name: ClassVar[str] = "fuse_add_rms_norm"
    tier: ClassVar[Tier] = "exact"
    measured: ClassVar[bool] = True
    produces: ClassVar[tuple[str, ...]] = ("add_rms_norm",)
    after: ClassVar[tuple[str, ...]] = ("raise_rms_norm",)
    norm: ClassVar[str] = "rms_norm"

    def run(self, graph: Graph) -> PassReport:
        report, rewriter, users = self.report(), Rewriter(graph), graph.users()
        dead: list[Node] = []
        for norm in graph.nodes:
            total = next(norm.inputs(), None)
            if norm.op != self.norm or total is None or total.producer is None or total.producer.op != ADD:
                continue
            if problem := _objection(total.producer, users[total]):
                report.near_misses.append(NearMiss.of(norm, problem, 2))
                continue
            _fuse(rewriter, total.producer, norm)
            dead += [total.producer, norm]
            report.sites.append(Site.of(norm))
            report.count(f"add_{self.norm}")
        rewriter.apply(dead)
        return report


def _objection(add: Node, users: list[Node]) -> str | None:
    left, right = add.operand("self"), add.operand("other")
    if right is None:
        return "the sum adds a constant"
    assert left is not None
    if add.attrs.get("alpha", 1) != 1:
        return "the sum has a factor"
    if isinstance(left, Param) or isinstance(right, Param):
        return "the sum adds a parameter"
    if left.type != right.type:
        return f"the sum broadcasts or promotes: {left.type} and {right.type}"
    if sum(user.op in _NORMS for user in users) > 1:
        return f"%{add.result.name} goes through more than one norm"
    return None


def _fuse(rewriter: Rewriter, add: Node, norm: Node) -> None:
    """Places the fused node where the sum was: its other readers may come before the norm."""
    left, right = add.operand("self"), add.operand("other")
    assert left is not None and right is not None
    residual, x = _older_first(left, right)
    names = [norm.result.name, add.result.name]
    rest = {name: value for name, value in norm.operands.items() if name != "x"}
    call = rewriter.at(add).call(
        f"add_{norm.op}", x, residual, source=norm.source, names=names, **rest, **norm.attrs
    )
    rewriter.replace(norm.result, call.results[0])
    rewriter.replace(add.result, call.results[1])


def _older_first(left: Value, right: Value) -> tuple[Value, Value]:
    """The residual stream is what a sum or the embedding made; the other side is the block's own output."""
    return (right, left) if _is_stream(right) and not _is_stream(left) else (left, right)


def _is_stream(value: Value) -> bool:
    return value.producer is None or value.producer.op in (ADD, "add_rms_norm", "add_layer_norm", "embedding")
