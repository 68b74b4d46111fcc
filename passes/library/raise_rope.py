"""Recognises rotary position embeddings of queries and keys and moves them to [T, H, D].

    %c = reshape(%cos, [1,T,R])                           %x' = permute(%x, [1,0,2])
    %r = cat([neg(slice(%x, R/2..)), slice(%x, ..R/2)])   %y' = rope(%x', %cos, %sin)
    %y = add(mul(%x, %c), mul(%r, %s))              ->    %y  = permute(%y', [1,0,2])

Kinds: `halves` (neox) pairs feature i with i + R/2, `interleaved` (GPT-J) pairs 2i with 2i + 1; `partial` and
`partial_interleaved` turn only the first R features and pass the rest. In the op, the pairing is an attribute and R
is the width of cos. The permutes cancel against those around attention. Scaling needs no attribute: linear, llama3
and yarn stand in the frequencies (the literal that cos is computed from), yarn's factor multiplies cos and sin.
Exact. Runs after drop_batch_dim. Does not handle rotations written with complex numbers, nor
halves that are rotated separately and joined afterwards (gpt-oss).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from treadle.ir.graph import Graph, Node, Value
from treadle.ir.types import Dim, TensorType
from treadle.passes.base import Pass, PassReport, Tier
from treadle.passes.match import OpCall, Pattern, bind, op
from treadle.passes.rewrite import Build, Match, Rule, Where, rewrite
from treadle.passes.rewriter import Rewriter

ADD, MUL, CAT, SLICE = "aten.add.Tensor", "aten.mul.Tensor", "aten.cat.default", "aten.slice.Tensor"


def _turned(x: Pattern, swapped: Pattern) -> OpCall:
    return op(ADD, op(MUL, x, bind("cos")), op(MUL, swapped, bind("sin")))


def _swapped_halves(x: Pattern) -> Pattern:
    high = op(SLICE, x, name="high", step=1)
    return op(CAT, [op("aten.neg.default", high), op(SLICE, x, name="low", step=1)])


def _swapped_pairs(x: Pattern) -> Pattern:
    odd = op(SLICE, x, name="odd", step=2, start=1, end=None)
    even = op(SLICE, x, name="even", step=2, start=None, end=None)
    return op(
        "aten.reshape.default", op("aten.stack.default", [op("aten.neg.default", odd), even], name="stack")
    )


_HEAD = op(SLICE, bind("x"), name="head", shared=True, step=1)
_TAIL = op(SLICE, bind("x"), name="tail", step=1)


def _shape(value: Value) -> tuple[Dim, ...]:
    assert isinstance(value.type, TensorType)
    return value.type.shape


def _rotary(match: Match) -> Dim:
    return _shape(match["cos"])[-1]


def _is_last(node: Node) -> bool:
    return node.attrs.get("dim", 0) % len(_shape(node.results[0])) == len(_shape(node.results[0])) - 1


def _halves(match: Match) -> bool:
    low, high = match["low"], match["high"]
    half = _rotary(match) // 2  # type: ignore[operator]
    bounds = low.attrs.get("start"), low.attrs.get("end"), high.attrs.get("start"), high.attrs.get("end")
    return bounds == (None, half, half, None) and _is_last(low) and _is_last(high)


def _pairs(match: Match) -> bool:
    rank = len(_shape(match["x"]))
    dims = {match[name].attrs.get("dim", 0) for name in ("odd", "even")}
    return dims == {rank - 1} and match["stack"].attrs.get("dim", 0) % (rank + 1) == rank


def _head_and_tail(match: Match) -> bool:
    head, tail, size = match["head"], match["tail"], _rotary(match)
    bounds = head.attrs.get("start"), head.attrs.get("end"), tail.attrs.get("start"), tail.attrs.get("end")
    return bounds == (None, size, size, None) and _is_last(head) and _is_last(tail)


def _whole(match: Match) -> bool:
    return _rotary(match) == _shape(match["x"])[-1]


def _layout(match: Match) -> str | None:
    """`THD` or `HTD`, from where cos has its broadcast dimension."""
    x, cos, sin = (_shape(match[name]) for name in ("x", "cos", "sin"))
    if len(x) != 3 or cos != sin or len(cos) != 3:
        return None
    if cos[0] == 1 and cos[1] == x[1]:
        return "HTD"
    return "THD" if cos[1] == 1 and cos[0] == x[0] else None


_LAYOUT: Where = (
    "cos and sin do not broadcast over the heads of [T, H, D] or [H, T, D]",
    lambda m: bool(_layout(m)),
)
_HALVES: Where = ("the slices are not the two halves of the rotated features", _halves)
_PAIRS: Where = ("the slices are not the even and odd features", _pairs)
_WHOLE: Where = ("cos covers only a part of the features, and the rest is not joined to it", _whole)
_PARTIAL: Where = ("head and tail do not cut the features where cos ends", _head_and_tail)


def _with(interleaved: bool) -> Build:
    def build(rewriter: Rewriter, match: Match) -> Value:
        source = match.root.source
        swap = _layout(match) == "HTD"
        x, cos, sin = match["x"], *(_flat(rewriter, match[name]) for name in ("cos", "sin"))
        if swap:
            x = rewriter.call("aten.permute.default", x, dims=[1, 0, 2], source=source).result
        y = rewriter.call("rope", x, cos, sin, interleaved=interleaved, source=source).result
        return rewriter.call("aten.permute.default", y, dims=[1, 0, 2], source=source).result if swap else y

    return build


def _flat(rewriter: Rewriter, angle: Value) -> Value:
    """cos or sin as [T, R]: what was there before the head dimension came in."""
    shape = tuple(dim for axis, dim in enumerate(_shape(angle)) if axis == 2 or dim != 1)
    if angle.producer is not None and angle.producer.op == "aten.reshape.default":
        before = next(angle.producer.inputs())
        if _shape(before) == shape:
            return before
    return rewriter.call("aten.reshape.default", angle, shape=list(shape)).result


_X = bind("x")
RULES = (
    Rule(
        "partial",
        op(CAT, [_turned(_HEAD, _swapped_halves(_HEAD)), _TAIL]),
        _with(False),
        (_LAYOUT, _HALVES, _PARTIAL),
        near=4,
    ),
    Rule(
        "partial_interleaved",
        op(CAT, [_turned(_HEAD, _swapped_pairs(_HEAD)), _TAIL]),
        _with(True),
        (_LAYOUT, _PAIRS, _PARTIAL),
        near=4,
    ),
    Rule("halves", _turned(_X, _swapped_halves(_X)), _with(False), (_LAYOUT, _HALVES, _WHOLE), near=4),
    Rule("interleaved", _turned(_X, _swapped_pairs(_X)), _with(True), (_LAYOUT, _PAIRS, _WHOLE), near=4),
)


@dataclass(frozen=True)
class RaiseRope(Pass):
    name: ClassVar[str] = "raise_rope"
    tier: ClassVar[Tier] = "exact"
    stage: ClassVar[str] = "raise"
    produces: ClassVar[tuple[str, ...]] = ("rope",)

    def run(self, graph: Graph) -> PassReport:
        return rewrite(graph, self.report(), RULES)
