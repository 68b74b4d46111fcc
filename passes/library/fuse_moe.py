"""Joins a router with the experts it chooses, and with the sum over shared experts, into one op.

    %l = linear(%x, %router)
    %s = softmax(%l)
    %w, %i = topk(%s, k=2)
    %n = div(%w, sum(%w))                          ->    %y = moe(%x, %router, %gate_up, %down, %shared,
    %e = experts(%x, %i, %n, %gate_up, %down)                     top_k=2, act='silu', renormalise=True)
    %y = add(%e, %shared)

Kinds: `softmax` (Mixtral, Qwen-MoE, OLMoE; with or without renormalisation) and `grouped` (DeepSeek-V3: sigmoid or
softmax scores, a bias that takes part in the choice only, groups of experts, a factor). A summand that is computed
from the same x alone is a shared expert's; its own linears stay in the piece, where they are compiled, quantized and
sharded like all others. Exact. Does not handle routers with a bias of their own (gpt-oss), scores in less than
float32, jitter, nor experts that keep more than gate_up and down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from treadle.ir.graph import Graph, Node, Param, Value
from treadle.ir.types import TensorType
from treadle.passes.base import Pass, PassReport, Tier
from treadle.passes.match import Attr, OpCall, Pattern, bind, called, cast_of, either, keep, op, weight
from treadle.passes.rewrite import Match, Rule, Where, rewrite
from treadle.passes.rewriter import Rewriter

ADD, MUL, DIV, RESHAPE = "aten.add.Tensor", "aten.mul.Tensor", "aten.div.Tensor", "aten.reshape.default"
TOPK, SUM = "aten.topk.default", "aten.sum.dim_IntList"
_LAST = Attr("the last dimension", lambda dim: dim in (-1, 1))
_LAST_ONLY = Attr("the last dimension only", lambda dim: dim in ([-1], [1]))
_DEEPEST = Attr("the last dimension only", lambda dim: dim in ([-1], [2]))
_WIDE = Attr("float32, or what the logits have", lambda dtype: dtype is None or dtype == "f32")
_MINUS_INFINITY = Attr("minus infinity", lambda value: value == float("-inf"))

_LOGITS = op("linear", cast_of(bind("x")), cast_of(weight("router")), None, name="logits")
_SOFTMAX = op("aten.softmax.int", cast_of(_LOGITS), name="scores", dim=_LAST, dtype=_WIDE)
_SIGMOID = op("aten.sigmoid.default", cast_of(_LOGITS), name="scores")


def _renormalised(weights: Pattern) -> Pattern:
    """The weights, or the weights over their sum; DeepSeek adds a small number to it."""
    total = op(SUM, weights, dim=_LAST_ONLY, keepdim=True, name="total")
    guarded = op(ADD, total, None, other=keep("epsilon"))
    return either(op(DIV, weights, either(guarded, total)), weights)


def _scaled(weights: Pattern) -> Pattern:
    return either(op(MUL, weights, None, other=keep("scale")), weights)


def _experts(weights: Pattern) -> OpCall:
    operands = bind("x"), bind("ids"), cast_of(weights), weight("gate_up"), weight("down")
    return op("experts", *operands, act=keep("act"), name="experts")


_PLAIN = called("weights", op(TOPK, _SOFTMAX, k=keep("top_k"), dim=_LAST, largest=True, name="topk"))

_SCORES = called("score", either(_SIGMOID, _SOFTMAX))
_CHOICE = called("choice", op(ADD, _SCORES, weight("bias")))
_GROUPED = op(RESHAPE, _CHOICE, name="grouped")
_BEST = called("best", op(SUM, op(TOPK, _GROUPED, k=2), dim=_DEEPEST, keepdim=False))
_KEPT = op(TOPK, _BEST, k=keep("top_groups"), sorted=False, result=1)
_OPEN = op("aten.scatter.value", op("aten.zeros_like.default", _BEST), _KEPT, value=1)
_SPREAD = op(RESHAPE, op("aten.expand.default", op(RESHAPE, _OPEN)))
_CLOSED = op("aten.bitwise_not.default", op("aten.to.dtype", _SPREAD, dtype="bool"))
_ALLOWED = op("aten.masked_fill.Scalar", _CHOICE, _CLOSED, value=_MINUS_INFINITY)
_IDS = called("ids", op(TOPK, _ALLOWED, k=keep("top_k"), dim=_LAST, sorted=False, result=1))
_GATHERED = called("weights", op("aten.gather.default", _SCORES, _IDS, dim=_LAST))

_SOFT = _experts(_renormalised(_PLAIN))
_DEEP = _experts(_scaled(_renormalised(_GATHERED)))


def _ids_of_topk(match: Match) -> bool:
    return match["ids"] is match["topk"].results[1]


def _is_wide(match: Match) -> bool:
    kind = match["scores"].result.type
    return isinstance(kind, TensorType) and kind.dtype == "f32"


def _from_x_alone(match: Match) -> bool:
    """Whether the other summand needs nothing but x and parameters: an expert that every token goes through."""
    seen: set[Value] = set()
    pending: list[Value] = [match["shared"]]
    while pending:
        value = pending.pop()
        if value in seen or value is match["x"] or isinstance(value, Param):
            continue
        seen.add(value)
        if value.producer is None:
            return False
        pending += value.producer.inputs()
    return match["shared"] is not match["x"]


def _build(rewriter: Rewriter, match: Match) -> Value:
    experts: Node = match["experts"]
    operands = (match[name] for name in ("x", "router", "gate_up", "down"))
    attrs = _routing(match) | {
        "act": match["act"],
        "router_in_f32": match["logits"].operand("x") is not match["x"],
        "weights_in_f32": experts.operands["weights"].type.dtype == "f32" != match["x"].type.dtype,  # type: ignore[union-attr]
    }
    extra = match.get("bias"), match.get("shared")
    return rewriter.call("moe", *operands, *extra, source=experts.source, **attrs).result


def _routing(match: Match) -> dict[str, Any]:
    """How experts are chosen and weighted, as attributes of the op."""
    sigmoid = match["scores"].op == _SIGMOID.ops[0]
    attrs: dict[str, Any] = {
        "top_k": match["top_k"],
        "scoring": "sigmoid" if sigmoid else "softmax",
        "renormalise": match.get("total") is not None,
        "epsilon": float(match.get("epsilon") or 0.0),
        "scale": float(match.get("scale") or 1.0),
    }
    if (grouped := match.get("grouped")) is not None:
        groups = int(grouped.result.type.shape[1])
        attrs |= {"groups": groups, "top_groups": match["top_groups"]}
    return attrs


_CHECKED: tuple[Where, ...] = (("the scores are not computed in float32", _is_wide),)
_SOFT_IDS: Where = ("the experts' ids are not those of the top scores", _ids_of_topk)
_SHARED: Where = ("the other summand is not computed from x alone", _from_x_alone)
_NEVER = 99  # an add after experts is a residual add in most models: no near miss


def _rules(kind: str, experts: OpCall, *where: Where) -> tuple[Rule, Rule]:
    """With a shared expert, and without one."""
    with_shared = op(ADD, experts, bind("shared"))
    return (
        Rule(f"{kind}_shared", with_shared, _build, (*_CHECKED, *where, _SHARED), near=_NEVER),
        Rule(kind, experts, _build, (*_CHECKED, *where)),
    )


RULES = (*_rules("softmax", _SOFT, _SOFT_IDS), *_rules("grouped", _DEEP))


@dataclass(frozen=True)
class FuseMoe(Pass):
    name: ClassVar[str] = "fuse_moe"
    tier: ClassVar[Tier] = "exact"
    produces: ClassVar[tuple[str, ...]] = ("moe",)
    after: ClassVar[tuple[str, ...]] = ("raise_linear",)

    def run(self, graph: Graph) -> PassReport:
        return rewrite(graph, self.report(), RULES)
