"""Joins the sum over ranks with the norm that follows it, so that one step between pieces does both.

    %y = all_reduce(%x, world=2)
    %n, %s = add_rms_norm(%y, %r, %w)    ->    %n, %s = all_reduce_add_rms_norm(%x, %r, %w, world=2)

The same for a bare rms_norm. Exact: the same sum, then the same norm. Does not handle a sum that is read elsewhere
(the embedding's, which is also the residual), nor layer norms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from treadle.ir.graph import Graph, Node, Value
from treadle.passes.base import NearMiss, Pass, PassReport, Site, Tier
from treadle.passes.rewriter import Rewriter

_FUSED = {"rms_norm": "all_reduce_rms_norm", "add_rms_norm": "all_reduce_add_rms_norm"}


@dataclass(frozen=True)
class FuseAllReduceRmsNorm(Pass):
    name: ClassVar[str] = "fuse_all_reduce_rms_norm"
    tier: ClassVar[Tier] = "exact"
    stage: ClassVar[str] = "lower"
    requires: ClassVar[tuple[str, ...]] = ("shard_tensor_parallel",)

    def run(self, graph: Graph) -> PassReport:
        report, rewriter, users = self.report(), Rewriter(graph), graph.users()
        dead: list[Node] = []
        for norm in graph.nodes:
            reduce = _summed(norm)
            if reduce is None:
                continue
            if problem := _objection(reduce.result, norm, users[reduce.result], graph.outputs):
                report.near_misses.append(NearMiss.of(norm, problem, 2))
                continue
            _fuse(rewriter, reduce, norm)
            dead += [reduce, norm]
            report.sites.append(Site.of(norm))
            report.count(_FUSED[norm.op])
        rewriter.apply(dead)
        return report


def _summed(norm: Node) -> Node | None:
    """The all_reduce whose sum `norm` works on."""
    value = norm.operand("x") if norm.op in _FUSED else None
    found = value.producer if value is not None else None
    return found if found is not None and found.op == "all_reduce" else None


def _objection(total: Value, norm: Node, users: list[Node], outputs: list[Value]) -> str | None:
    if norm.operands.get("residual") is total:
        return f"%{total.name} is added to itself"
    if total in outputs:
        return f"%{total.name} is an output"
    if others := [user.op for user in users if user is not norm]:
        return f"%{total.name} is also read by {others[0]}"
    return None


def _fuse(rewriter: Rewriter, reduce: Node, norm: Node) -> None:
    """Places the fused op where the norm was: the residual is known there."""
    operands = [next(reduce.inputs()), *[norm.operand(name) for name in ("residual",) if name in norm.operands]]
    fused = rewriter.at(norm).call(
        _FUSED[norm.op],
        *operands,
        norm.operand("weight"),
        source=norm.source,
        names=[value.name for value in norm.results],
        world=reduce.attrs["world"],
        **norm.attrs,
    )
    for old, new in zip(norm.results, fused.results, strict=True):
        rewriter.replace(old, new)
