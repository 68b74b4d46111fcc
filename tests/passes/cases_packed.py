"""Small graphs for packing weights."""

from __future__ import annotations

from tests.passes.harness import Case, Refusal
from treadle.passes.library.prepack_weights import PrepackWeights


def _graph(body: str) -> str:
    return "graph @case(T in 1..64) {\n" + body.strip("\n") + "\n}\n"


_TIED = """
  input %ids: i64[T]
  param %table: f32[40,24] = load("embed")
  param %b: f32[40] = load("bias")
  %x: f32[T,24] = embedding(%table, %ids)
  %y: f32[T,40] = linear(%x, %table, %b)   // head | model.py:7
  %z: f32[T,40] = linear(%x, %table)
  return %y, %z
"""
_BF16 = """
  input %x: bf16[T,40]
  param %w: bf16[20,40] = load("w")
  %y: bf16[T,20] = linear(%x, %w)   // up | model.py:2
  return %y
"""

_INT8 = """
  input %x: f32[T,64]
  param %w: i8[20,64] = quantize(load("w"), key=quant(i8, per_channel))
  param %s: f32[20,1] = quantization_scale(load("w"), key=quant(i8, per_channel))
  param %b: f32[20] = load("bias")
  %y: f32[T,20] = weight_only_linear(%x, %w, %s, %b, key=quant(i8, per_channel))   // up | model.py:2
  return %y
"""
_GROUPS = _INT8.replace("per_channel", "per_group=32").replace("f32[20,1]", "f32[20,2]")

CASES = [
    Case("prepack_weights", PrepackWeights(), {"linear": 1}, _graph(_BF16)),
    Case("prepack_weights_int8", PrepackWeights(), {"weight_only_linear": 1}, _graph(_INT8)),
    Case("prepack_weights_int8_groups", PrepackWeights(), {"weight_only_linear": 1}, _graph(_GROUPS)),
    Case("prepack_weights_tied", PrepackWeights(), {"linear": 2}, _graph(_TIED)),
]
REFUSALS = [
    Refusal("a product of float16", PrepackWeights(), "products of f16 have no kernel", _graph(_BF16.replace("bf16", "f16"))),
    Refusal("a weight of fp8", PrepackWeights(), "weights of f8e4m3 are not packed", _graph(_INT8.replace("i8", "f8e4m3"))),
    Refusal(
        "groups that a step of the kernel would straddle",
        PrepackWeights(),
        "groups of 16 are not a multiple of 32",
        _graph(_GROUPS.replace("per_group=32", "per_group=16").replace("f32[20,2]", "f32[20,4]")),
    ),
    Refusal(
        "a weight that is computed",
        PrepackWeights(),
        "is computed in the graph",
        _graph(_BF16.replace("%y: bf16[T,20] = linear(%x, %w)", "%v: bf16[20,40] = aten.neg.default(%w)\n  %y: bf16[T,20] = linear(%x, %v)")),
    ),
    Refusal(
        "an input of three dimensions",
        PrepackWeights(),
        "3 dimensions, not 2",
        _graph(_BF16.replace("%x: bf16[T,40]", "%x: bf16[2,T,40]").replace("%y: bf16[T,20]", "%y: bf16[2,T,20]")),
    ),
]
