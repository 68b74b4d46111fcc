"""Small graphs for constant folding and the removal of work that changes nothing."""

from __future__ import annotations

from tests.passes.harness import Case, Refusal
from treadle.passes.library.eliminate_no_ops import EliminateNoOps
from treadle.passes.library.fold_constants import FoldConstants

_LITERAL = """graph @case(T in 1..64) {
  input %x: f32[T,4]
  param %f: f32[4] = literal(dtype=f32, shape=[4], values=[1.0, 0.5, 0.25, 0.125])
  %r: f32[4] = aten.reciprocal.default(%f)
  %b: f32[4] = aten.to.dtype(%r, dtype=f32)
  %y: f32[T,4] = aten.mul.Tensor(%x, %b)   // scale | model.py:3
  return %y
}
"""

_SPLIT = """graph @case(T in 1..64) {
  input %x: bf16[T,8]
  %a, %b: bf16[T,4], bf16[T,4] = split(%x, sizes=[4, 4])
  %c: bf16[T,8] = aten.cat.default([%a, %b], dim=1)   // join | model.py:3
  %d: f32[T,8] = aten.to.dtype(%c, dtype=f32)
  %e: bf16[T,8] = aten.to.dtype(%d, dtype=bf16)
  %f: bf16[T,8] = aten.neg.default(%e)
  %g: bf16[T,8] = aten.neg.default(%f)
  %h: bf16[T,8] = aten.abs.default(%g)
  return %h
}
"""

_BUFFER = """graph @case(T in 1..64) {
  input %x: f32[T,4]
  input %y: f32[T,2]
  %empty: f32[T,6] = aten.zeros.default(size=[T, 6], dtype=f32)
  %s: f32[T,4] = aten.slice.Tensor(%empty, dim=1, end=4)
  %c: f32[T,4] = aten.copy.default(%s, %x)
  %p: f32[T,6] = aten.slice_scatter.default(%empty, %c, dim=1, start=0, end=4)
  %q: f32[T,6] = aten.slice_scatter.default(%p, %y, dim=1, start=4, end=9223372036854775807)   // k | model.py:4
  return %q
}
"""

CASES = [
    Case("fold_constants", FoldConstants(), {"aten.reciprocal.default": 1, "aten.to.dtype": 1}, _LITERAL),
    Case(
        "eliminate_no_ops",
        EliminateNoOps(),
        {"aten.cat.default": 1, "aten.to.dtype": 1, "aten.neg.default": 1},
        _SPLIT,
    ),
    Case(
        "eliminate_no_ops_buffer",
        EliminateNoOps(),
        {"aten.copy.default": 1, "aten.slice_scatter.default": 1},
        _BUFFER,
    ),
]

REFUSALS = [
    Refusal("a large constant", FoldConstants(max_elements=3), "4 elements, more than 3", _LITERAL),
    Refusal(
        "parts that change places",
        EliminateNoOps(),
        "joined in another order",
        _SPLIT.replace("[%a, %b]", "[%b, %a]").split("  %d:")[0] + "  return %c\n}\n",
    ),
    Refusal(
        "a cast through a smaller type",
        EliminateNoOps(),
        "bf16 does not hold every f32",
        """graph @case(T in 1..64) {
  input %x: f32[T,8]
  %a: bf16[T,8] = aten.to.dtype(%x, dtype=bf16)
  %b: f32[T,8] = aten.to.dtype(%a, dtype=f32)
  return %b
}
""",
    ),
]
