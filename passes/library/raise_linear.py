"""Gives matrix products with a weight our name.

    %y = aten.linear(%x, %w, %b)     ->   %y = linear(%x, %w, %b)
    %y = aten.matmul(%x, permute(%w, [1, 0]))   ->   %y = linear(%x, %w)

Exact. Does not handle products of two computed values, nor addmm with an untransposed weight (see raise_addmm).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from treadle.ir.graph import Graph, Value
from treadle.passes.base import Pass, PassReport, Tier
from treadle.passes.match import bind, op, weight
from treadle.passes.rewrite import Match, Rule, rewrite
from treadle.passes.rewriter import Rewriter


def _build(rewriter: Rewriter, match: Match) -> Value:
    return rewriter.call("linear", match["x"], match["w"], match.get("b"), source=match.root.source).result


_TRANSPOSED = op("aten.permute.default", weight("w"), dims=[1, 0])
RULES = (
    Rule("linear", op("aten.linear.default", bind("x"), weight("w"), weight("b")), _build, near=1),
    Rule("linear", op("aten.linear.default", bind("x"), weight("w"), None), _build, near=1),
    Rule("linear", op(("aten.matmul.default", "aten.mm.default"), bind("x"), _TRANSPOSED), _build),
)


@dataclass(frozen=True)
class RaiseLinear(Pass):
    name: ClassVar[str] = "raise_linear"
    tier: ClassVar[Tier] = "exact"
    stage: ClassVar[str] = "raise"
    produces: ClassVar[tuple[str, ...]] = ("linear",)
    expects: ClassVar[bool] = True

    def run(self, graph: Graph) -> PassReport:
        return rewrite(graph, self.report(), RULES)
