"""Recognises gated activations.

    %a = aten.silu(%gate)
    %y = aten.mul(%a, %up)      ->    %y = gated_act(%gate, %up, act='silu')

Also gelu (exact, by erf), gelu_tanh, gelu_new (the tanh approximation spelled out in eight primitive ops), and relu.
Exact. The two operands must be computed values of one type: an activation times a weight or a scalar is not gated.
Does not handle other activations spelled out in primitive ops, nor gates with clamps or offsets (gpt-oss).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from treadle.ir.graph import Graph, Param, Value
from treadle.passes.base import NearMiss, Pass, PassReport, Tier
from treadle.passes.match import bind, op
from treadle.passes.rewrite import Build, Match, Rule, Where, rewrite
from treadle.passes.rewriter import Rewriter

MUL = "aten.mul.Tensor"


def _with(act: str) -> Build:
    def build(rewriter: Rewriter, match: Match) -> Value:
        gate, up = match["gate"], match["up"]
        return rewriter.call("gated_act", gate, up, act=act, source=match.root.source).result

    return build


def _same_type(match: Match) -> bool:
    return match["gate"].type == match["up"].type


def _computed(match: Match) -> bool:
    return not isinstance(match["up"], Param)


_WHERE: tuple[Where, ...] = (
    ("gate and up differ in type", _same_type),
    ("the other factor is a parameter, not a computed value", _computed),
)
_GATE = bind("gate")
_CUBE = op(MUL, op("aten.pow.Tensor_Scalar", _GATE, exponent=3.0), None, other=0.044715)
_INNER = op(MUL, op("aten.add.Tensor", _GATE, _CUBE), None, other=math.sqrt(2.0 / math.pi))
_GELU_NEW = op(
    MUL,
    op(MUL, _GATE, None, other=0.5),
    op("aten.add.Tensor", op("aten.tanh.default", _INNER), None, other=1.0),
)
_ACTIVATIONS = {
    "silu": op("aten.silu.default", _GATE),
    "gelu_tanh": op("aten.gelu.default", _GATE, approximate="tanh"),
    "gelu": op("aten.gelu.default", _GATE, approximate="none"),
    "gelu_new": _GELU_NEW,
    "relu": op("aten.relu.default", _GATE),
}
RULES = tuple(
    Rule(act, op(MUL, pattern, bind("up")), _with(act), _WHERE, near=7 if act == "gelu_new" else 2)
    for act, pattern in _ACTIVATIONS.items()
)


@dataclass(frozen=True)
class RaiseGatedAct(Pass):
    name: ClassVar[str] = "raise_gated_act"
    tier: ClassVar[Tier] = "exact"
    stage: ClassVar[str] = "raise"
    produces: ClassVar[tuple[str, ...]] = ("gated_act",)

    def run(self, graph: Graph) -> PassReport:
        report = rewrite(graph, self.report(), RULES)
        report.near_misses += _without_activation(graph)
        return report


def _without_activation(graph: Graph) -> Iterator[NearMiss]:
    """Products of two linears of one value: what is left of a gated activation that lost its activation."""
    for node in graph.nodes:
        factors = [value.producer for value in node.inputs()]
        if node.op != "aten.mul.Tensor" or len(factors) != 2:
            continue
        gate, up = factors
        if gate is None or up is None or gate is up or gate.op != "linear" or up.op != "linear":
            continue
        if next(gate.inputs()) is next(up.inputs()):
            acts = ", ".join(_ACTIVATIONS)
            yield NearMiss.of(node, f"neither factor is an activation ({acts}): both are linear", 3)
