"""Small graphs for the fusions of norms, rotations, activations and experts."""

from __future__ import annotations

from tests.passes.harness import Case, Refusal
from treadle.passes.library.fuse_add_layer_norm import FuseAddLayerNorm
from treadle.passes.library.fuse_moe import FuseMoe
from treadle.passes.library.fuse_norm_rope import FuseNormRope
from treadle.passes.library.raise_gated_act import RaiseGatedAct
from treadle.passes.library.raise_rope import RaiseRope


def _graph(body: str) -> str:
    return "graph @case(T in 1..64) {\n" + body.strip("\n") + "\n}\n"


_RESIDUAL = """
  input %x: f32[T,8]
  input %r: f32[T,8]
  param %w: f32[8] = load("w")
  param %b: f32[8] = load("b")
  %s: f32[T,8] = aten.add.Tensor(%r, %x)
  %y: f32[T,8] = layer_norm(%s, %w, %b, eps=1e-06)   // norm | model.py:7
  {more}
  return %z, %s"""

_PARTIAL_PAIRS = _graph(
    """
  input %x: f32[T,3,8]
  input %c: f32[T,4]
  input %s: f32[T,4]
  %cos: f32[T,1,4] = aten.reshape.default(%c, shape=[T, 1, 4])
  %sin: f32[T,1,4] = aten.reshape.default(%s, shape=[T, 1, 4])
  %q: f32[T,3,4] = aten.slice.Tensor(%x, dim=2, end=4)
  %tail: f32[T,3,4] = aten.slice.Tensor(%x, dim=2, start=4)
  %mul: f32[T,3,4] = aten.mul.Tensor(%q, %cos)
  %even: f32[T,3,2] = aten.slice.Tensor(%q, dim=2, step=2)
  %odd: f32[T,3,2] = aten.slice.Tensor(%q, dim=2, start=1, step=2)
  %neg: f32[T,3,2] = aten.neg.default(%odd)
  %stack: f32[T,3,2,2] = aten.stack.default([%neg, %even], dim=-1)
  %turned: f32[T,3,4] = aten.reshape.default(%stack, shape=[T, 3, 4])
  %mul.1: f32[T,3,4] = aten.mul.Tensor(%turned, %sin)
  %add: f32[T,3,4] = aten.add.Tensor(%mul, %mul.1)   // rotary | model.py:9
  %y: f32[T,3,8] = aten.cat.default([%add, %tail], dim=2)
  return %y"""
)

_PER_HEAD = """
  input %q: f32[T,3,8]
  input %cos: f32[T,8]
  input %sin: f32[T,8]
  param %w: f32[8] = load("w")
  %n: f32[T,3,8] = rms_norm(%q, %w, eps=1e-06, offset=1.0, scale_in_f32=True)   // q_norm | model.py:3
  %y: f32[T,3,8] = rope(%n, %cos, %sin, interleaved=True)   // rotary | model.py:9
"""

_ACROSS = """
  input %q: f32[T,24]
  input %cos: f32[T,8]
  input %sin: f32[T,8]
  param %w: f32[24] = load("w")
  %n: f32[T,24] = rms_norm(%q, %w, eps=1e-06)   // q_norm | model.py:3
  %r: f32[T,3,8] = aten.reshape.default(%n, shape=[T, 3, 8])
  %y: f32[T,3,8] = rope(%r, %cos, %sin)   // rotary | model.py:9
  return %y"""

_EXPERTS = """
  input %x: {dtype}[T,8]
  param %router: {dtype}[4,8] = load("router")
  param %gate_up: {dtype}[4,12,8] = load("gate_up")
  param %down: {dtype}[4,8,6] = load("down")
  %l: {dtype}[T,4] = linear(%x, %router)   // gate | model.py:3
"""
_SOFTMAX = (
    _EXPERTS
    + """
  %s: f32[T,4] = aten.softmax.int(%l, dim=-1, dtype=f32)
  %w, %i: f32[T,2], i64[T,2] = aten.topk.default(%s, k=2)
"""
)
_RENORMALISED = (
    _SOFTMAX
    + """
  %t: f32[T,1] = aten.sum.dim_IntList(%w, dim=[1], keepdim=True)
  %n: f32[T,2] = aten.div.Tensor(%w, %t)
  %c: bf16[T,2] = aten.to.dtype(%n, dtype=bf16)
  %e: bf16[T,8] = experts(%x, %i, %c, %gate_up, %down, act='silu')   // experts | model.py:7
  return %e"""
)
_SHARED = (
    _SOFTMAX
    + """
  param %up: f32[8,8] = load("up")
  %e: f32[T,8] = experts(%x, %i, %w, %gate_up, %down, act='gelu')   // experts | model.py:7
  %h: f32[T,8] = linear({from}, %up)
  %y: f32[T,8] = aten.add.Tensor(%e, %h)
  return %y"""
)
_GROUPED = (
    _EXPERTS.replace("4,", "6,").replace("T,4]", "T,6]")
    + """
  param %bias: f32[6] = load("bias")
  %s: f32[T,6] = aten.sigmoid.default(%l)
  %choice: f32[T,6] = aten.add.Tensor(%s, %bias)
  %v: f32[T,3,2] = aten.reshape.default(%choice, shape=[T, 3, 2])
  %g, %gi: f32[T,3,2], i64[T,3,2] = aten.topk.default(%v, k=2)
  %best: f32[T,3] = aten.sum.dim_IntList(%g, dim=[2])
  %k, %ki: f32[T,2], i64[T,2] = aten.topk.default(%best, k=2, sorted=False)
  %zeros: f32[T,3] = aten.zeros_like.default(%best)
  %open: f32[T,3] = aten.scatter.value(%zeros, %ki, dim=1, value=1)
  %open.1: f32[T,3,1] = aten.reshape.default(%open, shape=[T, 3, 1])
  %open.2: f32[T,3,2] = aten.expand.default(%open.1, size=[T, 3, 2])
  %open.3: f32[T,6] = aten.reshape.default(%open.2, shape=[T, 6])
  %open.4: bool[T,6] = aten.to.dtype(%open.3, dtype=bool)
  %closed: bool[T,6] = aten.bitwise_not.default(%open.4)
  %allowed: f32[T,6] = aten.masked_fill.Scalar(%choice, %closed, value=-inf)
  %w, %i: f32[T,2], i64[T,2] = aten.topk.default(%allowed, k=2, sorted=False)
  %p: f32[T,2] = aten.gather.default(%s, %i, dim=1)
  %t: f32[T,1] = aten.sum.dim_IntList(%p, dim=[1], keepdim=True)
  %t.1: f32[T,1] = aten.add.Tensor(%t, other=1e-20)
  %n: f32[T,2] = aten.div.Tensor(%p, %t.1)
  %m: f32[T,2] = aten.mul.Tensor(%n, other=2.5)
  %e: f32[T,8] = experts(%x, %i, %m, %gate_up, %down, act='silu')   // experts | model.py:7
  return %e"""
)

_GELU_NEW = _graph(
    """
  input %gate: f32[T,8]
  input %up: f32[T,8]
  %half: f32[T,8] = aten.mul.Tensor(%gate, other=0.5)
  %pow: f32[T,8] = aten.pow.Tensor_Scalar(%gate, exponent=3.0)
  %cube: f32[T,8] = aten.mul.Tensor(%pow, other=FACTOR)
  %sum: f32[T,8] = aten.add.Tensor(%gate, %cube)
  %inner: f32[T,8] = aten.mul.Tensor(%sum, other=0.7978845608028654)
  %tanh: f32[T,8] = aten.tanh.default(%inner)
  %one: f32[T,8] = aten.add.Tensor(%tanh, other=1.0)
  %act: f32[T,8] = aten.mul.Tensor(%half, %one)   // act | activations.py:66
  %y: f32[T,8] = aten.mul.Tensor(%act, %up)   // mlp | model.py:4
  return %y"""
)


def _shared(source: str) -> str:
    body = _SHARED.replace("{dtype}", "f32").replace("{from}", source)
    lines = body.strip("\n").split("\n")
    params = [line for line in lines if line.startswith(("  input", "  param"))]
    return _graph("\n".join(params + [line for line in lines if line not in params]))


def _grouped() -> str:
    lines = _GROUPED.replace("{dtype}", "f32").strip("\n").split("\n")
    params = [line for line in lines if line.startswith(("  input", "  param"))]
    return _graph("\n".join(params + [line for line in lines if line not in params]))


CASES = [
    Case(
        "fuse_add_layer_norm",
        FuseAddLayerNorm(),
        {"add_layer_norm": 1},
        _graph(_RESIDUAL.format(more="%z: f32[T,8] = aten.add.Tensor(%s, %y)")),
    ),
    Case("raise_rope_partial_interleaved", RaiseRope(), {"partial_interleaved": 1}, _PARTIAL_PAIRS),
    Case("fuse_norm_rope_per_head", FuseNormRope(), {"per_head": 1}, _graph(_PER_HEAD + "  return %y")),
    Case("fuse_norm_rope_across_heads", FuseNormRope(), {"across_heads": 1}, _graph(_ACROSS)),
    Case(
        "raise_gated_act_gelu_new", RaiseGatedAct(), {"gelu_new": 1}, _GELU_NEW.replace("FACTOR", "0.044715")
    ),
    Case("fuse_moe", FuseMoe(), {"softmax": 1}, _graph(_RENORMALISED.format(dtype="bf16"))),
    Case("fuse_moe_shared", FuseMoe(), {"softmax_shared": 1}, _shared("%x")),
    Case("fuse_moe_grouped", FuseMoe(), {"grouped": 1}, _grouped()),
]

REFUSALS = [
    Refusal(
        "a sum that two layer norms read",
        FuseAddLayerNorm(),
        "goes through more than one norm",
        _graph(_RESIDUAL.format(more="%z: f32[T,8] = layer_norm(%s, eps=1e-06)")),
    ),
    Refusal(
        "a sign is missing in a pair",
        RaiseRope(),
        "expected aten.neg.default",
        _PARTIAL_PAIRS.replace("neg.default", "abs.default"),
    ),
    Refusal(
        "a normed query that is read elsewhere",
        FuseNormRope(),
        "%n is also used by aten.neg.default",
        _graph(_PER_HEAD + "  %o: f32[T,3,8] = aten.neg.default(%n)\n  return %y, %o"),
    ),
    Refusal(
        "another constant in the cube",
        RaiseGatedAct(),
        "other must be 0.044715, is 0.05",
        _GELU_NEW.replace("FACTOR", "0.05"),
    ),
    Refusal(
        "ids of other scores",
        FuseMoe(),
        "the experts' ids are not those of the top scores",
        _graph("  input %j: i64[T,2]" + _RENORMALISED.format(dtype="bf16").replace("(%x, %i,", "(%x, %j,")),
    ),
]
