"""Recognises root-mean-square norms.

    %s = aten.pow(%x, 2)
    %m = aten.mean(%s, dim=[-1], keepdim=True)
    %r = aten.rsqrt(aten.add(%m, eps))
    %n = aten.mul(%x, %r)
    %y = aten.mul(%w, %n)                           ->    %y = rms_norm(%x, %w, eps=eps)

Kinds: `llama` multiplies by the weight after rounding to the model's dtype, `f32` before (OLMo 2), `gemma` by
1 + weight before rounding, `bare` has no weight. Exact: the reference of rms_norm does the same operations.
Does not handle norms over more than the last dimension, nor `x / sqrt(...)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from treadle.ir.graph import Graph, Value
from treadle.ir.types import TensorType
from treadle.passes.base import Pass, PassReport, Tier
from treadle.passes.match import Attr, OpCall, bind, cast_of, either, keep, op, weight
from treadle.passes.rewrite import Build, Match, Rule, Where, rewrite
from treadle.passes.rewriter import Rewriter

MUL, ADD, CAST = "aten.mul.Tensor", "aten.add.Tensor", "aten.to.dtype"
_LAST = Attr("the last dimension only", lambda dims: dims is not None and len(dims) == 1)
_NUMBER = Attr("a number", lambda eps: isinstance(eps, float | int), name="eps")
_WIDE = cast_of(bind("x"), shared=True)


def _normed() -> OpCall:
    """`x * rsqrt(mean(x * x) + eps)`, in float32."""
    square = either(op("aten.pow.Tensor_Scalar", _WIDE, exponent=2), op(MUL, _WIDE, _WIDE))
    mean = op("aten.mean.dim", square, dim=_LAST, keepdim=True, name="mean")
    return op(MUL, _WIDE, op("aten.rsqrt.default", op(ADD, mean, None, other=_NUMBER)))


def _over_last(match: Match) -> bool:
    mean = match["mean"]
    source = next(mean.inputs())
    return mean.attrs["dim"][0] in (-1, len(source.type.shape) - 1)


def _computed_in_f32(match: Match) -> bool:
    kind = match["mean"].result.type
    return isinstance(kind, TensorType) and kind.dtype == "f32"


_WHERE: tuple[Where, ...] = (
    ("the mean is not over the last dimension", _over_last),
    ("the norm is not computed in float32", _computed_in_f32),
)


def _with(**attrs: Any) -> Build:
    def build(rewriter: Rewriter, match: Match) -> Value:
        given: dict[str, Any] = {"eps": float(match["eps"]), **attrs}
        if "offset" in match.env.bound:
            given["offset"] = float(match["offset"])
        return rewriter.call("rms_norm", match["x"], match.get("w"), source=match.root.source, **given).result

    return build


def _same_dtype(match: Match) -> bool:
    kinds = match.root.result.type, match["x"].type
    return len({kind.dtype for kind in kinds if isinstance(kind, TensorType)}) == 1


_SAME: Where = ("the result does not have the dtype of the input", _same_dtype)
_GEMMA_SCALE = either(
    op(ADD, cast_of(weight("w")), None, other=keep("offset"), shared=True),
    op("aten.add.Scalar", cast_of(weight("w")), other=keep("offset"), shared=True),
)

_SCALED = op(MUL, _normed(), _GEMMA_SCALE)
_WEIGHTED = op(MUL, _normed(), cast_of(weight("w")))


def _rule(kind: str, pattern: OpCall, build: Build, *where: Where) -> Rule:
    return Rule(
        kind, pattern, build, (*_WHERE, *where), anchors=frozenset({"aten.rsqrt.default", "aten.mean.dim"})
    )


RULES = (
    _rule("gemma", op(CAST, _SCALED), _with(scale_in_f32=True), _SAME),
    _rule("gemma", _SCALED, _with(scale_in_f32=True), _SAME),
    _rule("f32", op(CAST, _WEIGHTED), _with(scale_in_f32=True), _SAME),
    _rule("llama", op(MUL, cast_of(_normed()), weight("w")), _with()),
    _rule("bare", op(CAST, _normed()), _with(), _SAME),
    _rule("bare", op(MUL, *_normed().operands), _with(), _SAME),
)


@dataclass(frozen=True)
class RaiseRmsNorm(Pass):
    name: ClassVar[str] = "raise_rms_norm"
    tier: ClassVar[Tier] = "exact"
    stage: ClassVar[str] = "raise"
    produces: ClassVar[tuple[str, ...]] = ("rms_norm",)

    def run(self, graph: Graph) -> PassReport:
        return rewrite(graph, self.report(), RULES)
