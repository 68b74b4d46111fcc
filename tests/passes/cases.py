"""Small graphs for each pass: some that match, some that must not."""

from __future__ import annotations

from tests.passes import cases_folded, cases_fused, cases_packed
from tests.passes.harness import Case, Refusal
from treadle.passes.library.canonicalise import Canonicalise
from treadle.passes.library.drop_batch_dim import DropBatchDim
from treadle.passes.library.eliminate_common_subexpressions import EliminateCommonSubexpressions
from treadle.passes.library.eliminate_dead_code import EliminateDeadCode
from treadle.passes.library.fuse_add_rms_norm import FuseAddRmsNorm
from treadle.passes.library.fuse_linears import FuseGateUp, FuseQkv
from treadle.passes.library.join_slices import JoinSlices
from treadle.passes.library.raise_addmm import RaiseAddmm
from treadle.passes.library.raise_embedding import RaiseEmbedding
from treadle.passes.library.raise_gated_act import RaiseGatedAct
from treadle.passes.library.raise_layer_norm import RaiseLayerNorm
from treadle.passes.library.raise_linear import RaiseLinear
from treadle.passes.library.raise_rms_norm import RaiseRmsNorm
from treadle.passes.library.raise_rope import RaiseRope
from treadle.passes.library.select_logit_rows import SelectLogitRows
from treadle.passes.library.sink_permutes import SinkPermutes


def _graph(body: str) -> str:
    return "graph @case(T in 1..64) {\n" + body.strip("\n") + "\n}\n"


_NORMED = """
  input %x: {dtype}[T,8]
  param %w: {dtype}[8] = load("w")
  %wide: f32[T,8] = aten.to.dtype(%x, dtype=f32)
  %pow: f32[T,8] = aten.pow.Tensor_Scalar(%wide, exponent=2)
  %mean: f32[T,1] = aten.mean.dim(%pow, dim=[{dim}], keepdim=True)   // norm | model.py:3
  %add: f32[T,1] = aten.add.Tensor(%mean, other=1e-06)
  %rsqrt: f32[T,1] = aten.rsqrt.default(%add)
  %normed: f32[T,8] = aten.mul.Tensor(%wide, %rsqrt)
"""


def _normed(tail: str, *, dtype: str = "bf16", dim: str = "-1") -> str:
    return _graph(_NORMED.format(dtype=dtype, dim=dim) + tail)


_ROPE = """
  input %x: f32[{x},8]
  input %c: f32[T,{r}]
  input %s: f32[T,{r}]
  %cos: f32[{c},{r}] = aten.reshape.default(%c, shape=[{c}, {r}])
  %sin: f32[{c},{r}] = aten.reshape.default(%s, shape=[{c}, {r}])
"""
_HALVES = """
  %low: f32[{x},{h}] = aten.slice.Tensor(%{q}, dim=2, end={h})
  %high: f32[{x},{h}] = aten.slice.Tensor(%{q}, dim=2, start={h})
  %neg: f32[{x},{h}] = aten.neg.default(%high)
  %turned: f32[{x},{r}] = aten.cat.default([%neg, %low], dim=2)
  %mul: f32[{x},{r}] = aten.mul.Tensor(%{q}, %cos)
  %mul.1: f32[{x},{r}] = aten.mul.Tensor(%turned, %sin)
  %add: f32[{x},{r}] = aten.add.Tensor(%mul, %mul.1)   // rotary | model.py:9
"""


def _rope(
    tail: str = "  return %add", *, x: str = "3,T", c: str = "1,T", r: int = 8, h: int = 4, q: str = "x"
) -> str:
    text = (
        _ROPE
        + ("  %q: f32[{x},{r}] = aten.slice.Tensor(%x, dim=2, end={r})\n" if q == "q" else "")
        + _HALVES
        + tail
    )
    return _graph(text.format(x=x, c=c, r=r, h=h, q=q))


_PAIRS = (
    _ROPE
    + """
  %odd: f32[{x},4] = aten.slice.Tensor(%x, dim=2, start=1, step=2)
  %even: f32[{x},4] = aten.slice.Tensor(%x, dim=2, step=2)
  %neg: f32[{x},4] = aten.neg.default(%odd)
  %stack: f32[{x},4,2] = aten.stack.default([%neg, %even], dim=-1)
  %turned: f32[{x},8] = aten.reshape.default(%stack, shape=[{x}, 8])
  %mul: f32[{x},8] = aten.mul.Tensor(%x, %cos)
  %mul.1: f32[{x},8] = aten.mul.Tensor(%turned, %sin)
  %add: f32[{x},8] = aten.add.Tensor(%mul, %mul.1)
  return %add
"""
)

_QKV = """
  input %x: f32[T,8]
  param %a.q.weight: f32[8,8] = load("q")
  param %a.k.weight: f32[4,8] = load("k")
  param %a.v.weight: f32[4,8] = load("v")
  param %a.q.bias: f32[8] = load("qb")
  param %a.k.bias: f32[4] = load("kb")
  param %a.v.bias: f32[4] = load("vb")
  %q: f32[T,8] = linear(%x, %a.q.weight, %a.q.bias)   // attn.q | model.py:5
  %k: f32[T,4] = linear(%x, %a.k.weight{kb})
  %v: f32[T,4] = linear(%x, %a.v.weight, %a.v.bias)
  %q2: f32[T,2,4] = aten.reshape.default(%q, shape=[T, 2, 4])
  %k2: f32[T,1,4] = aten.reshape.default(%k, shape=[T, 1, 4])
  %v2: f32[T,1,4] = aten.reshape.default(%v, shape=[T, 1, 4])
  %o: f32[T,2,4] = attention(%q2, %k2, %v2, layer=0, scale=0.5)
  return %o
"""

_GATE_UP = """
  input %x: f32[T,8]
  param %m.gate.weight: f32[6,8] = load("gate")
  param %m.up.weight: f32[6,8] = load("up")
  %gate: f32[T,6] = linear(%x, %m.gate.weight)
  %up: f32[T,6] = linear(%x, %m.up.weight)
  %y: f32[T,6] = gated_act(%gate, %up, act='silu')
"""

_RESIDUAL = """
  input %x: f32[T,8]
  input %r: f32[T,8]
  param %w: f32[8] = load("w")
  %s: f32[T,8] = aten.add.Tensor(%r, %x{alpha})
  %y: f32[T,8] = rms_norm(%s, %w, eps=1e-06)   // norm | model.py:7
"""

_LOGITS = """
  input %h: f32[T,8]
  param %w: f32[16,8] = load("w")
  %y: f32[T,16] = linear(%h, %w)   // lm_head | model.py:11
  %div: f32[T,16] = aten.div.Tensor(%y, other=30.0)
  %tanh: f32[T,16] = aten.tanh.default(%div)
  %mul: f32[T,16] = aten.mul.Tensor(%tanh, other=30.0)
"""


def _gated(act: str, attrs: str = "") -> str:
    return _graph(
        f"""
  input %gate: f32[T,8]
  input %up: f32[T,8]
  %a: f32[T,8] = aten.{act}.default(%gate{attrs})
  %y: f32[T,8] = aten.mul.Tensor(%up, %a)
  return %y"""
    )


CASES = [
    *cases_folded.CASES,
    *cases_fused.CASES, *cases_packed.CASES,
    Case(
        "canonicalise",
        Canonicalise(),
        {
            "aten.unsqueeze.default": 1,
            "aten.view.default": 1,
            "aten.transpose.int": 2,
            "aten.to.dtype": 1,
            "aten.slice.Tensor": 1,
            "normal aten.slice.Tensor": 1,
            "aten.mul.Tensor": 1,
            "aten.chunk.default": 1,
            "aten.select.int": 1,
            "aten.cat.default": 1,
            "normal aten.cat.default": 1,
        },
        _graph(
            """
  input %x: f32[T,8]
  %a: f32[1,T,8] = aten.unsqueeze.default(%x, dim=0)
  %b: f32[1,T,2,4] = aten.view.default(%a, size=[1, T, 2, 4])
  %c: f32[1,2,T,4] = aten.transpose.int(%b, dim0=1, dim1=2)
  %d: f32[1,2,T,4] = aten.to.dtype(%c, dtype=f32)
  %e: f32[1,2,T,4] = aten.slice.Tensor(%d, dim=3, start=0, end=9223372036854775807)
  %f: f32[1,T,2,4] = aten.transpose.int(%e, dim0=1, dim1=2)
  %g: f32[1,T,2,4] = aten.mul.Tensor(%f, other=1.0)
  %h, %i: f32[1,T,2,2], f32[1,T,2,2] = aten.chunk.default(%g, chunks=2, dim=-1)
  %j: f32[T,2,2] = aten.select.int(%h, dim=0, index=0)
  %k: f32[T,2,2] = aten.reshape.default(%i, shape=[T, 2, 2])
  %l: f32[T,2,0] = aten.slice.Tensor(%j, dim=2, start=2, end=9223372036854775807)
  %m: f32[T,2,2] = aten.cat.default([%k, %l], dim=-1)
  %n: f32[T,2,4] = aten.cat.default([%j, %m], dim=-1)
  return %n"""
        ),
    ),
    Case(
        "drop_batch_dim",
        DropBatchDim(),
        {
            "aten.linear.default": 1,
            "aten.reshape.default": 2,
            "aten.permute.default": 1,
            "aten.mul.Tensor": 1,
        },
        _graph(
            """
  input %x: f32[T,8]
  param %w: f32[8,8] = load("w")
  param %scale: f32[1,1,8] = load("scale")
  %a: f32[1,T,8] = aten.reshape.default(%x, shape=[1, T, 8])
  %b: f32[1,T,8] = aten.linear.default(%a, %w)   // proj | model.py:4
  %c: f32[1,T,8] = aten.mul.Tensor(%b, %scale)
  %d: f32[1,T,2,4] = aten.reshape.default(%c, shape=[1, T, 2, 4])
  %e: f32[1,2,T,4] = aten.permute.default(%d, dims=[0, 2, 1, 3])
  %f: f32[2,T,4] = aten.reshape.default(%e, shape=[2, T, 4])
  return %f"""
        ),
    ),
    Case(
        "raise_rms_norm_llama",
        RaiseRmsNorm(),
        {"llama": 1},
        _normed(
            """
  %cast: bf16[T,8] = aten.to.dtype(%normed, dtype=bf16)
  %y: bf16[T,8] = aten.mul.Tensor(%w, %cast)   // norm | model.py:5
  return %y"""
        ),
    ),
    Case(
        "raise_rms_norm_gemma",
        RaiseRmsNorm(),
        {"gemma": 1},
        _normed(
            """
  %w32: f32[8] = aten.to.dtype(%w, dtype=f32)
  %w1: f32[8] = aten.add.Tensor(%w32, other=1.0)
  %scaled: f32[T,8] = aten.mul.Tensor(%normed, %w1)
  %y: bf16[T,8] = aten.to.dtype(%scaled, dtype=bf16)
  return %y"""
        ),
    ),
    Case(
        "raise_rms_norm_f32_scale",
        RaiseRmsNorm(),
        {"f32": 1},
        _normed(
            """
  %scaled: f32[T,8] = aten.mul.Tensor(%w, %normed)
  %y: bf16[T,8] = aten.to.dtype(%scaled, dtype=bf16)
  return %y"""
        ),
    ),
    Case(
        "raise_rms_norm_bare",
        RaiseRmsNorm(),
        {"bare": 1},
        _normed(
            """
  %y: bf16[T,8] = aten.to.dtype(%normed, dtype=bf16)
  return %y"""
        ),
    ),
    Case(
        "raise_layer_norm",
        RaiseLayerNorm(),
        {"layer_norm": 2},
        _graph(
            """
  input %x: f32[T,8]
  param %w: f32[8] = load("w")
  param %b: f32[8] = load("b")
  %y: f32[T,8] = aten.layer_norm.default(%x, %w, %b, normalized_shape=[8], eps=1e-06)   // ln | model.py:2
  %z: f32[T,8] = aten.layer_norm.default(%y, normalized_shape=[8])
  return %z"""
        ),
    ),
    Case("raise_rope_halves", RaiseRope(), {"halves": 1}, _rope()),
    Case("raise_rope_tokens_first", RaiseRope(), {"halves": 1}, _rope(x="T,3", c="T,1")),
    Case(
        "raise_rope_partial",
        RaiseRope(),
        {"partial": 1},
        _rope(
            """
  %tail: f32[{x},4] = aten.slice.Tensor(%x, dim=2, start=4)
  %y: f32[{x},8] = aten.cat.default([%add, %tail], dim=2)
  return %y""",
            r=4,
            h=2,
            q="q",
        ),
    ),
    Case(
        "raise_rope_interleaved",
        RaiseRope(),
        {"interleaved": 1},
        _graph(_PAIRS.format(x="3,T", c="1,T", r=8)),
    ),
    Case(
        "raise_linear",
        RaiseLinear(),
        {"linear": 3},
        _graph(
            """
  input %x: f32[T,8]
  param %w: f32[6,8] = load("w")
  param %b: f32[6] = load("b")
  %y: f32[T,6] = aten.linear.default(%x, %w, %b)   // fc | model.py:2
  %z: f32[T,6] = aten.linear.default(%x, %w)
  %t: f32[8,6] = aten.permute.default(%w, dims=[1, 0])
  %u: f32[T,6] = aten.matmul.default(%x, %t)
  return %y, %z, %u"""
        ),
    ),
    Case(
        "raise_addmm",
        RaiseAddmm(),
        {"addmm": 1, "matmul": 1},
        _graph(
            """
  input %x: f32[T,8]
  param %c.weight: f32[8,6] = load("w")
  param %c.bias: f32[6] = load("b")
  param %d.weight: f32[6,4] = load("v")
  %y: f32[T,6] = aten.addmm.default(%c.bias, %x, %c.weight)   // c | pytorch_utils.py:100
  %z: f32[T,4] = aten.mm.default(%y, %d.weight)
  return %z"""
        ),
    ),
    Case(
        "raise_embedding",
        RaiseEmbedding(),
        {"embedding": 1},
        _graph(
            """
  input %ids: i64[T]
  param %table: f32[32,8] = load("table")
  %h: f32[T,8] = aten.embedding.default(%table, %ids, padding_idx=0)
  return %h"""
        ),
    ),
    Case("raise_gated_act_silu", RaiseGatedAct(), {"silu": 1}, _gated("silu")),
    Case("raise_gated_act_gelu", RaiseGatedAct(), {"gelu": 1}, _gated("gelu")),
    Case(
        "raise_gated_act_gelu_tanh", RaiseGatedAct(), {"gelu_tanh": 1}, _gated("gelu", ", approximate='tanh'")
    ),
    Case("raise_gated_act_relu", RaiseGatedAct(), {"relu": 1}, _gated("relu")),
    Case(
        "sink_permutes",
        SinkPermutes(),
        {"rms_norm": 1, "cast": 1},
        _graph(
            """
  input %x: f32[T,3,8]
  param %w: f32[8] = load("w")
  %p: f32[3,T,8] = aten.permute.default(%x, dims=[1, 0, 2])
  %n: f32[3,T,8] = rms_norm(%p, %w, eps=1e-06, offset=1.0)   // q_norm | model.py:8
  %q: f32[3,T,8] = aten.permute.default(%x, dims=[1, 0, 2])
  %c: bf16[3,T,8] = aten.to.dtype(%q, dtype=bf16)
  return %n, %c"""
        ),
    ),
    Case(
        "join_slices",
        JoinSlices(),
        {"split": 1},
        _graph(
            """
  input %x: f32[T,16]
  %v: f32[T,4] = aten.slice.Tensor(%x, dim=1, start=12)
  %q: f32[T,8] = aten.slice.Tensor(%x, dim=1, end=8)   // attn | model.py:3
  %k: f32[T,4] = aten.slice.Tensor(%x, dim=1, start=8, end=12)
  return %q, %k, %v"""
        ),
    ),
    Case(
        "fuse_add_rms_norm",
        FuseAddRmsNorm(),
        {"add_rms_norm": 1},
        _graph(_RESIDUAL.format(alpha="") + "  %z: f32[T,8] = aten.add.Tensor(%s, %y)\n  return %z"),
    ),
    Case("fuse_qkv", FuseQkv(), {"qkv": 1}, _graph(_QKV.format(kb=", %a.k.bias"))),
    Case("fuse_gate_up", FuseGateUp(), {"gate_up": 1}, _graph(_GATE_UP + "  return %y")),
    Case(
        "eliminate_common_subexpressions",
        EliminateCommonSubexpressions(),
        {"aten.neg.default": 1, "aten.add.Tensor": 1},
        _graph(
            """
  input %x: f32[T,8]
  %a: f32[T,8] = aten.neg.default(%x)
  %b: f32[T,8] = aten.neg.default(%x)
  %c: f32[T,8] = aten.add.Tensor(%a, other=1.0)
  %d: f32[T,8] = aten.add.Tensor(%b, other=1.0)
  %e: f32[T,8] = aten.add.Tensor(%b, other=2.0)
  return %c, %d, %e"""
        ),
    ),
    Case(
        "eliminate_dead_code",
        EliminateDeadCode(),
        {"nodes": 2, "params": 1},
        _graph(
            """
  input %x: f32[T,8]
  param %w: f32[8] = load("w")
  %a: f32[T,8] = aten.mul.Tensor(%x, %w)
  %b: f32[T,8] = aten.neg.default(%a)
  %c: f32[T,8] = aten.neg.default(%x)
  return %c"""
        ),
    ),
    Case("select_logit_rows", SelectLogitRows(), {"select_rows": 1}, _graph(_LOGITS + "  return %mul")),
]

REFUSALS = [
    *cases_folded.REFUSALS,
    *cases_fused.REFUSALS, *cases_packed.REFUSALS,
    Refusal(
        "a reshape that changes the shape stays",
        Canonicalise(),
        "",
        _graph(
            """
  input %x: f32[T,8]
  %a: f32[T,2,4] = aten.reshape.default(%x, shape=[T, 2, 4])
  return %a"""
        ),
    ),
    Refusal(
        "work along the batch dimension",
        DropBatchDim(),
        "works along the leading dimension",
        _graph(
            """
  input %x: f32[T,8]
  %a: f32[1,T,8] = aten.reshape.default(%x, shape=[1, T, 8])
  %c: f32[2,T,8] = aten.cat.default([%a, %a])
  return %c"""
        ),
    ),
    Refusal(
        "norm over the wrong dimension",
        RaiseRmsNorm(),
        "dim must be the last dimension only",
        _normed("  %y: f32[T,8] = aten.mul.Tensor(%w, %normed)\n  return %y", dtype="f32")
        .replace("f32[T,1] = aten.mean.dim(%pow, dim=[-1]", "f32[1,1] = aten.mean.dim(%pow, dim=[0, 1]")
        .replace("%add: f32[T,1]", "%add: f32[1,1]")
        .replace("%rsqrt: f32[T,1]", "%rsqrt: f32[1,1]"),
    ),
    Refusal(
        "the normed value is read elsewhere",
        RaiseRmsNorm(),
        "%rsqrt is also used by",
        _normed(
            """
  %y: f32[T,8] = aten.mul.Tensor(%w, %normed)
  %other: f32[T,1] = aten.neg.default(%rsqrt)
  return %y, %other""",
            dtype="f32",
        ),
    ),
    Refusal(
        "a norm over two dimensions",
        RaiseLayerNorm(),
        "normalized_shape must be one dimension",
        _graph(
            """
  input %x: f32[T,4,8]
  %y: f32[T,4,8] = aten.layer_norm.default(%x, normalized_shape=[4, 8])
  return %y"""
        ),
    ),
    Refusal(
        "slices that are not halves",
        RaiseRope(),
        "not the two halves",
        _rope().replace(
            "low: f32[3,T,4] = aten.slice.Tensor(%x, dim=2, end=4)",
            "low: f32[3,T,4] = aten.slice.Tensor(%x, dim=2, start=1, end=5)",
        ),
    ),
    Refusal(
        "a sign is missing",
        RaiseRope(),
        "expected aten.neg.default",
        _rope().replace("neg.default", "abs.default"),
    ),
    Refusal(
        "a product of computed values",
        RaiseLinear(),
        "'w' must be a parameter",
        _graph(
            """
  input %x: f32[T,8]
  input %y: f32[6,8]
  %z: f32[T,6] = aten.linear.default(%x, %y)
  return %z"""
        ),
    ),
    Refusal(
        "a scaled product",
        RaiseAddmm(),
        "alpha must be 1",
        _graph(
            """
  input %x: f32[T,8]
  param %w: f32[8,6] = load("w")
  param %b: f32[6] = load("b")
  %y: f32[T,6] = aten.addmm.default(%b, %x, %w, alpha=2)
  return %y"""
        ),
    ),
    Refusal(
        "a computed table",
        RaiseEmbedding(),
        "'table' must be a parameter",
        _graph(
            """
  input %ids: i64[T]
  input %table: f32[32,8]
  %h: f32[T,8] = aten.embedding.default(%table, %ids)
  return %h"""
        ),
    ),
    Refusal(
        "an activation times a weight",
        RaiseGatedAct(),
        "gate and up differ in type",
        _graph(
            """
  input %x: f32[T,8]
  param %w: f32[8] = load("w")
  %a: f32[T,8] = aten.silu.default(%x)
  %y: f32[T,8] = aten.mul.Tensor(%a, %w)
  return %y"""
        ),
    ),
    Refusal(
        "a permute of the last dimension",
        SinkPermutes(),
        "a reordering that keeps the last dimension",
        _graph(
            """
  input %x: f32[T,3,8]
  %p: f32[T,8,3] = aten.permute.default(%x, dims=[0, 2, 1])
  %n: f32[T,8,3] = rms_norm(%p, eps=1e-06)
  return %n"""
        ),
    ),
    Refusal(
        "slices that leave a gap",
        JoinSlices(),
        "one begins at 12, expected 8",
        _graph(
            """
  input %x: f32[T,16]
  %q: f32[T,8] = aten.slice.Tensor(%x, dim=1, end=8)
  %v: f32[T,4] = aten.slice.Tensor(%x, dim=1, start=12)
  return %q, %v"""
        ),
    ),
    Refusal(
        "a sum with a factor",
        FuseAddRmsNorm(),
        "the sum has a factor",
        _graph(_RESIDUAL.format(alpha=", alpha=2") + "  return %y"),
    ),
    Refusal(
        "a missing bias",
        FuseQkv(),
        "some have none",
        _graph(_QKV.format(kb="")).replace('  param %a.k.bias: f32[4] = load("kb")\n', ""),
    ),
    Refusal(
        "a shared weight",
        FuseGateUp(),
        "%m.up.weight is read by another node",
        _graph(_GATE_UP + "  %again: f32[T,6] = linear(%x, %m.up.weight)\n  return %y, %again"),
    ),
    Refusal(
        "different attributes",
        EliminateCommonSubexpressions(),
        "",
        _graph(
            """
  input %x: f32[T,8]
  %a: f32[T,8] = aten.add.Tensor(%x, other=1)
  %b: f32[T,8] = aten.add.Tensor(%x, other=1.0)
  return %a, %b"""
        ),
    ),
    Refusal(
        "attention writes the cache",
        EliminateDeadCode(),
        "",
        _graph(
            """
  input %x: f32[T,2,4]
  input %kv.0: kv<2,4>
  input %batch: batch
  %o: f32[T,2,4] = attention(%x, %x, %x, %kv.0, %batch, layer=0, scale=0.5)
  return %x"""
        ),
    ),
    Refusal(
        "rows are selected already",
        SelectLogitRows(),
        "",
        _graph(_LOGITS.replace("  param %w", "  input %logit_rows: i64[T]\n  param %w") + "  return %mul"),
    ),
]
