"""Turns products with a [K, N] weight (GPT-2's Conv1D) into linears, transposing the weight in its plan.

    param %w: f32[64,192] = load("c_attn.weight")          param %w.t: f32[192,64] = transpose(load(...), dim0=0, dim1=1)
    %y = aten.addmm(%b, %x, %w)                       ->   %y = linear(%x, %w.t, %b)

Changing: the product reads the weight in another layout, so sums may be taken in another order. Does not handle
alpha or beta other than 1, nor a weight that something else reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from treadle.ir.graph import Graph, Param, Value
from treadle.ir.types import TensorType, tensor
from treadle.ir.weights import Transpose
from treadle.passes.base import Pass, PassReport, Tier
from treadle.passes.match import bind, op, weight
from treadle.passes.rewrite import Match, Rule, rewrite
from treadle.passes.rewriter import Rewriter


def _build(rewriter: Rewriter, match: Match) -> Value:
    turned = _transposed(rewriter, match["w"])
    return rewriter.call("linear", match["x"], turned, match.get("b"), source=match.root.source).result


def _transposed(rewriter: Rewriter, param: Param) -> Param:
    assert isinstance(param.type, TensorType)
    rows, columns = param.type.shape
    return rewriter.param(param.name, tensor(param.type.dtype, (columns, rows)), Transpose(param.recipe))


def _bias_is_vector(match: Match) -> bool:
    return isinstance(match["b"].type, TensorType) and len(match["b"].type.shape) == 1


RULES = (
    Rule(
        "addmm",
        op("aten.addmm.default", weight("b"), bind("x"), weight("w"), beta=1, alpha=1),
        _build,
        (("the added matrix is not a bias vector", _bias_is_vector),),
        near=1,
    ),
    Rule("matmul", op(("aten.mm.default", "aten.matmul.default"), bind("x"), weight("w")), _build, near=1),
)


@dataclass(frozen=True)
class RaiseAddmm(Pass):
    name: ClassVar[str] = "raise_addmm"
    tier: ClassVar[Tier] = "changing"
    stage: ClassVar[str] = "raise"
    produces: ClassVar[tuple[str, ...]] = ("linear",)

    def run(self, graph: Graph) -> PassReport:
        return rewrite(graph, self.report(), RULES)
