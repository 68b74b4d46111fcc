"""The ops of the dialect, each with its eager reference in plain torch (float32 inside, as transformers does)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.ir.dtypes import DTYPES
from treadle.ir.ops.reference_attention import attend_one_sequence
from treadle.ir.ops.registry import op
from treadle.ir.quant_key import QuantKey
from treadle.ir.quantize import quantize_with


def _linear_of_one_dtype(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """On meta, torch multiplies any two dtypes; on a device it does not."""
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        raise TypeError(f"x is {x.dtype}, weight {weight.dtype}, bias {bias.dtype if bias is not None else None}")
    return F.linear(x, weight, bias)


@op("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", fake=_linear_of_one_dtype)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`: x [..., K], weight [N, K], bias [N] -> [..., N]."""
    return F.linear(x, weight, bias)


@op("embedding(Tensor table, Tensor ids) -> Tensor")
def embedding(table: Tensor, ids: Tensor) -> Tensor:
    """Rows of a table: table [V, H], ids [...] -> [..., H]."""
    return F.embedding(ids, table)


@op(
    "rms_norm(Tensor x, Tensor? weight=None, *, float eps, float offset=0.0, bool scale_in_f32=False) -> Tensor",
    inplace=("x",),
)
def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, eps: float, offset: float = 0.0, scale_in_f32: bool = False
) -> Tensor:
    """Root-mean-square norm over the last dimension, in float32, times `weight + offset`.

    `scale_in_f32` multiplies by the weight before rounding to x's dtype (Gemma, OLMo 2), else after (Llama).
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if scale_in_f32:
        scale = weight.float() + offset if offset else weight.float()
        return (normed * scale).to(x.dtype)
    scale = weight + offset if offset else weight
    return scale * normed.to(x.dtype)


@op(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight=None, *, float eps, float offset=0.0, "
    "bool scale_in_f32=False) -> (Tensor, Tensor)",
    inplace=("x", "residual"),
)
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float,
    offset: float = 0.0,
    scale_in_f32: bool = False,
) -> tuple[Tensor, Tensor]:
    """Residual add, then norm: returns (rms_norm(residual + x), residual + x)."""
    total = residual + x
    return rms_norm(total, weight, eps=eps, offset=offset, scale_in_f32=scale_in_f32), total


@op("layer_norm(Tensor x, Tensor? weight=None, Tensor? bias=None, *, float eps) -> Tensor", inplace=("x",))
def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float) -> Tensor:
    """Layer norm over the last dimension."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


@op(
    "add_layer_norm(Tensor x, Tensor residual, Tensor? weight=None, Tensor? bias=None, *, float eps) "
    "-> (Tensor, Tensor)",
    inplace=("x", "residual"),
)
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float
) -> tuple[Tensor, Tensor]:
    """Residual add, then layer norm: returns (layer_norm(residual + x), residual + x)."""
    total = residual + x
    return layer_norm(total, weight, bias, eps=eps), total


@op("rope(Tensor x, Tensor cos, Tensor sin, *, bool interleaved=False) -> Tensor", inplace=("x",))
def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotary embedding: x [T, H, D], cos and sin [T, R] with R <= D; the first R of D features turn.

    Pairs are (i, i + R/2), or (2i, 2i + 1) if `interleaved`. cos and sin hold each angle once for each feature.
    """
    size = cos.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    if interleaved:
        swapped = torch.stack((-turned[..., 1::2], turned[..., 0::2]), dim=-1).flatten(-2)
    else:
        half = size // 2
        swapped = torch.cat((-turned[..., half:], turned[..., :half]), dim=-1)
    out = turned * cos.unsqueeze(-2) + swapped * sin.unsqueeze(-2)
    return out if size == x.shape[-1] else torch.cat((out, rest), dim=-1)


@op(
    "rms_norm_rope(Tensor x, Tensor cos, Tensor sin, Tensor? weight=None, *, float eps, float offset=0.0, "
    "bool scale_in_f32=False, bool across_heads=False, bool interleaved=False) -> Tensor",
    inplace=("x",),
)
def rms_norm_rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float,
    offset: float = 0.0,
    scale_in_f32: bool = False,
    across_heads: bool = False,
    interleaved: bool = False,
) -> Tensor:
    """Norm of queries or keys, then rope: x [T, H, D] -> [T, H, D].

    The norm is over the D features of each head, weight [D]; if `across_heads` over all of a token's H * D, weight
    [H * D] (OLMo 2). The rest as in rms_norm and rope.
    """
    normed = rms_norm(
        x.flatten(-2) if across_heads else x, weight, eps=eps, offset=offset, scale_in_f32=scale_in_f32
    )
    return rope(normed.reshape(x.shape), cos, sin, interleaved=interleaved)


def _gelu_new(x: Tensor) -> Tensor:
    """The tanh approximation as GPT-2's authors spelled it; F.gelu rounds differently."""
    return 0.5 * x * (1.0 + torch.tanh((x + 0.044715 * torch.pow(x, 3.0)) * math.sqrt(2.0 / math.pi)))


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_new": _gelu_new,
    "relu": F.relu,
}


@op("gated_act(Tensor gate, Tensor up, *, str act) -> Tensor", inplace=("gate",))
def gated_act(gate: Tensor, up: Tensor, *, act: str) -> Tensor:
    """`act(gate) * up`; act is silu, gelu (exact, by erf), gelu_tanh, gelu_new (tanh spelled out) or relu."""
    return _ACTIVATIONS[act](gate) * up


@op("split(Tensor x, *, int[] sizes, int dim=-1) -> Tensor[]")
def split(x: Tensor, *, sizes: list[int], dim: int = -1) -> list[Tensor]:
    """Cuts one dimension into parts of the given sizes."""
    return list(torch.split(x, sizes, dim))


def _like_query(
    q: Tensor, k: Tensor, v: Tensor, cache: object = None, batch: object = None, sinks: Tensor | None = None, **rest: Any
) -> Tensor:
    key = rest.get("out_key")
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype if key is None else DTYPES[key.element].torch)


@op(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? cache=None, Tensor? batch=None, Tensor? sinks=None, "
    "Tensor? output_scale=None, *, int layer, float scale, int? window=None, float? softcap=None, bool causal=True, "
    "str? out_key=None) -> Tensor",
    splits=True,
    reads=("batch",),
    writes=("cache",),
    fake=_like_query,
)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: object = None,
    batch: object = None,
    sinks: Tensor | None = None,
    output_scale: Tensor | None = None,
    *,
    layer: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    causal: bool = True,
    out_key: QuantKey | None = None,
) -> Tensor:
    """Self-attention with a KV cache: q [T, Hq, D], k [T, Hk, D], v [T, Hk, Dv] -> [T, Hq, Dv].

    `cache` and `batch` are state; without them the reference treats the T tokens as one whole sequence.
    `window` counts visible tokens, the query's own included. With `out_key` the output is quantized with `output_scale`,
    one for the whole tensor. The runtime calls an attention backend instead.
    """
    assert cache is None and batch is None, "the reference attends within one sequence; backends do the rest"
    out = attend_one_sequence(q, k, v, scale=scale, window=window, softcap=softcap, causal=causal, sinks=sinks)
    if out_key is None:
        return out
    assert output_scale is not None, "out_key comes with output_scale"
    return quantize_with(out, output_scale, out_key)


@op("select_rows(Tensor x, Tensor rows) -> Tensor", splits=True)
def select_rows(x: Tensor, rows: Tensor) -> Tensor:
    """The rows that need logits: x [T, H], rows [S] -> [S, H]. What follows has S where the rest has T."""
    return x.index_select(0, rows)


def _like_tokens(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, **_: object) -> Tensor:
    return torch.empty_like(x)


@op(
    "experts(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, *, str act) -> Tensor",
    splits=True,
    fake=_like_tokens,
)
def experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *, act: str) -> Tensor:
    """Mixture of experts after routing: x [T, H], ids and weights [T, K], gate_up [E, 2I, H], down [E, H, I].

    Each token's output is the weighted sum of its K experts. Runs the experts that are used, one after another.
    """
    return each_expert(x, ids, weights, gate_up.__getitem__, down.__getitem__, act)


def each_expert(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Callable[[int], Tensor],
    down: Callable[[int], Tensor],
    act: str,
    round_input: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor:
    """The body of `experts`: the weights come by expert, and `round_input` is done to what goes into each product."""
    out = torch.zeros_like(x)
    x = round_input(x)
    for expert in torch.unique(ids).tolist():
        token, slot = torch.where(ids == expert)
        gate, up = F.linear(x[token], gate_up(expert)).chunk(2, dim=-1)
        inner = round_input(_ACTIVATIONS[act](gate) * up)
        done = F.linear(inner, down(expert)) * weights[token, slot, None]
        out.index_add_(0, token, done.to(out.dtype))
    return out


def _like_routed(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, **_: object) -> Tensor:
    return torch.empty_like(x)


@op(
    "moe(Tensor x, Tensor router, Tensor gate_up, Tensor down, Tensor? bias=None, Tensor? shared=None, *, "
    "int top_k, str act, str scoring='softmax', bool renormalise=False, float epsilon=0.0, float scale=1.0, "
    "int groups=1, int top_groups=1, bool router_in_f32=False, bool weights_in_f32=False) -> Tensor",
    splits=True,
    fake=_like_routed,
)
def moe(
    x: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    bias: Tensor | None = None,
    shared: Tensor | None = None,
    *,
    top_k: int,
    act: str,
    scoring: str = "softmax",
    renormalise: bool = False,
    epsilon: float = 0.0,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    router_in_f32: bool = False,
    weights_in_f32: bool = False,
) -> Tensor:
    """Mixture of experts with its router: x [T, H], router [E, H], gate_up [E, 2I, H], down [E, H, I] -> [T, H].

    Scores are the softmax or sigmoid of the router's logits, in float32. `bias` [E] takes part in choosing the `top_k`
    experts, not in their weights; with `groups` only the `top_groups` best groups of experts may be chosen
    (DeepSeek-V3). Weights are divided by their sum + epsilon if `renormalise`, then multiplied by `scale`, and rounded
    to x's dtype unless `weights_in_f32`. `shared` [T, H] is what shared experts gave; it is added at the end.
    """
    weights, ids = route(
        x, router, bias, top_k=top_k, scoring=scoring, renormalise=renormalise, epsilon=epsilon, scale=scale, groups=groups,
        top_groups=top_groups, router_in_f32=router_in_f32, weights_in_f32=weights_in_f32,
    )  # fmt: skip
    out = experts(x, ids, weights, gate_up, down, act=act)
    return out if shared is None else out + shared


def route(
    x: Tensor,
    router: Tensor,
    bias: Tensor | None,
    *,
    top_k: int,
    scoring: str,
    renormalise: bool,
    epsilon: float,
    scale: float,
    groups: int,
    top_groups: int,
    router_in_f32: bool,
    weights_in_f32: bool,
) -> tuple[Tensor, Tensor]:
    """Weights and ids [T, K] of each token's experts, as `moe` says."""
    logits = F.linear(x.float(), router.float()) if router_in_f32 else F.linear(x, router)
    wide = logits.float()
    scores = torch.softmax(wide, dim=-1) if scoring == "softmax" else torch.sigmoid(wide)
    weights, ids = _choose(scores, bias, top_k, groups, top_groups)
    if renormalise:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / (total + epsilon if epsilon else total)
    if scale != 1.0:
        weights = weights * scale
    return weights if weights_in_f32 else weights.to(x.dtype), ids


def _choose(
    scores: Tensor, bias: Tensor | None, top_k: int, groups: int, top_groups: int
) -> tuple[Tensor, Tensor]:
    """Weights and ids [T, K] of the chosen experts, from scores [T, E]."""
    if bias is None:
        weights, ids = torch.topk(scores, top_k, dim=-1)
        return weights, ids
    choice = scores + bias
    if groups > 1:
        best = choice.unflatten(-1, (groups, -1)).topk(2, dim=-1).values.sum(dim=-1)
        kept = torch.topk(best, top_groups, dim=-1, sorted=False).indices
        open_groups = torch.zeros_like(best, dtype=torch.bool).scatter(1, kept, True)
        size = scores.shape[-1] // groups
        choice = choice.masked_fill(~open_groups.repeat_interleave(size, dim=-1), float("-inf"))
    ids = torch.topk(choice, top_k, dim=-1, sorted=False).indices
    return scores.gather(1, ids), ids
