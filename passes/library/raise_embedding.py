"""Gives table look-ups our name.

    %h = aten.embedding(%table, %ids)   ->   %h = embedding(%table, %ids)

Exact. Options that matter in training only (padding index, gradient scaling) are dropped.
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
    return rewriter.call("embedding", match["table"], match["ids"], source=match.root.source).result


RULES = (Rule("embedding", op("aten.embedding.default", weight("table"), bind("ids")), _build, near=1),)


@dataclass(frozen=True)
class RaiseEmbedding(Pass):
    name: ClassVar[str] = "raise_embedding"
    tier: ClassVar[Tier] = "exact"
    stage: ClassVar[str] = "raise"
    produces: ClassVar[tuple[str, ...]] = ("embedding",)
    expects: ClassVar[bool] = True

    def run(self, graph: Graph) -> PassReport:
        return rewrite(graph, self.report(), RULES)
