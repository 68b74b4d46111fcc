"""Makes one op of a SwiGLU feed-forward block.

    %p = linear(%x, %gate_up)
    %g, %u = split(%p, sizes=[F, F], dim=-1)
    %a = gated_act(%g, %u, act="silu")
    %y = linear(%a, %down)                     ->    %y = swiglu_mlp(%x, %gate_up, %down, slices=2)

Changing: the products are summed slice by slice. Does not handle biases, other activations, halves of unequal width, nor
a width that `slices` does not divide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import treadle_example_pass.ops  # noqa: F401  (registers swiglu_mlp)
from treadle.ir.graph import Graph, Value
from treadle.passes.base import Pass, PassReport, Tier
from treadle.passes.match import bind, op, weight
from treadle.passes.rewrite import Match, Rule, rewrite
from treadle.passes.rewriter import Rewriter

_PRODUCT = op("linear", bind("x"), weight("gate_up"), None)
_ACT = op("gated_act", op("split", _PRODUCT, result=0), op("split", _PRODUCT, result=1), act="silu", name="act")
_PATTERN = op("linear", _ACT, weight("down"), None)


@dataclass(frozen=True)
class FuseSwigluMlp(Pass):
    name: ClassVar[str] = "fuse_swiglu_mlp"
    tier: ClassVar[Tier] = "changing"
    requires: ClassVar[tuple[str, ...]] = ("gated_act",)
    produces: ClassVar[tuple[str, ...]] = ("swiglu_mlp",)
    after: ClassVar[tuple[str, ...]] = ("fuse_gate_up",)
    expects: ClassVar[bool] = True

    slices: int = 2

    def run(self, graph: Graph) -> PassReport:
        words = f"the width must be half of gate_up and divide into {self.slices} slices"
        rule = Rule("swiglu_mlp", _PATTERN, self._build, where=((words, self._fits),))
        return rewrite(graph, self.report(), (rule,))

    def _fits(self, match: Match) -> bool:
        width = match["act"].result.type.shape[-1]
        return match["gate_up"].type.shape[0] == 2 * width and width % self.slices == 0

    def _build(self, rewriter: Rewriter, match: Match) -> Value:
        operands = match["x"], match["gate_up"], match["down"]
        return rewriter.call("swiglu_mlp", *operands, slices=self.slices, source=match.root.source).result
