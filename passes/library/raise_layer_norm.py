"""Gives layer norms over the last dimension our name.

    %y = aten.layer_norm(%x, %w, %b, normalized_shape=[64])   ->   %y = layer_norm(%x, %w, %b, eps=1e-05)

Exact. Does not handle norms over several dimensions, nor layer norms spelled out in primitive ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from treadle.ir.graph import Graph, Value
from treadle.passes.base import Pass, PassReport, Tier
from treadle.passes.match import Attr, bind, keep, op
from treadle.passes.rewrite import Match, Rule, rewrite
from treadle.passes.rewriter import Rewriter

_LAST = Attr("one dimension", lambda shape: len(shape) == 1)


def _build(rewriter: Rewriter, match: Match) -> Value:
    operands = match["x"], match.get("w"), match.get("b")
    return rewriter.call("layer_norm", *operands, eps=float(match["eps"]), source=match.root.source).result


def _rules() -> tuple[Rule, ...]:
    cases = ((bind("x"), bind("w"), bind("b")), (bind("x"), bind("w"), None), (bind("x"), None, None))
    return tuple(
        Rule(
            "layer_norm",
            op("aten.layer_norm.default", *operands, normalized_shape=_LAST, eps=keep("eps")),
            _build,
            near=1,
        )
        for operands in cases
    )


RULES = _rules()


@dataclass(frozen=True)
class RaiseLayerNorm(Pass):
    name: ClassVar[str] = "raise_layer_norm"
    tier: ClassVar[Tier] = "exact"
    stage: ClassVar[str] = "raise"
    produces: ClassVar[tuple[str, ...]] = ("layer_norm",)

    def run(self, graph: Graph) -> PassReport:
        return rewrite(graph, self.report(), RULES)
