"""Ops on quantized tensors: eager references in float32, so that a CPU without 8-bit products computes the same.

`key` attributes are QuantKeys. Scales are tensors: [..., 1] per channel and per token, [..., K / group] per group.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.ir.group import Group
from treadle.ir.ops.collectives import all_reduce_add_rms_norm, all_reduce_rms_norm
from treadle.ir.ops.library import add_rms_norm, each_expert, gated_act, rms_norm, route
from treadle.ir.ops.registry import op
from treadle.ir.quant_key import QuantKey
from treadle.ir.quantize import dequantize_with, quantize_with, scale_of


@op("quantize_dynamic(Tensor x, *, str key) -> (Tensor, Tensor)")
def quantize_dynamic(x: Tensor, *, key: QuantKey) -> tuple[Tensor, Tensor]:
    """Quantizes with scales computed from x [..., K]: returns (quantized [..., K], scale)."""
    scale = scale_of(x, key)
    return quantize_with(x, scale, key), scale


@op("quantize_static(Tensor x, Tensor scale, *, str key) -> Tensor")
def quantize_static(x: Tensor, scale: Tensor, *, key: QuantKey) -> Tensor:
    """Quantizes x [..., K] with a scale that is known beforehand; larger values saturate."""
    return quantize_with(x, scale, key)


@op("dequantize(Tensor q, Tensor scale, *, str key, ScalarType dtype) -> Tensor")
def dequantize(q: Tensor, scale: Tensor, *, key: QuantKey, dtype: torch.dtype) -> Tensor:
    """The values that q [..., K] stands for, in `dtype`."""
    return dequantize_with(q, scale, key).to(dtype)


@op("weight_only_linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias=None, *, str key) -> Tensor")
def weight_only_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, key: QuantKey
) -> Tensor:
    """A linear whose weight is stored quantized: x [..., K], weight [N, K] -> [..., N], in x's dtype."""
    return F.linear(x, dequantize_with(weight, scale, key).to(x.dtype), bias)


@op(
    "scaled_linear(Tensor x, Tensor x_scale, Tensor weight, Tensor scale, Tensor? bias=None, *, "
    "str x_key, str key, ScalarType dtype) -> Tensor"
)
def scaled_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    x_key: QuantKey,
    key: QuantKey,
    dtype: torch.dtype,
) -> Tensor:
    """A linear of a quantized activation and a quantized weight: x [..., K], weight [N, K] -> [..., N] in `dtype`.

    Sums of products in float32, then both scales. Groups have their scales inside the sum: they are multiplied first.
    """
    if key.group or x_key.group:
        total = F.linear(dequantize_with(x, x_scale, x_key), dequantize_with(weight, scale, key))
    else:
        total = F.linear(x.float(), weight.float()) * x_scale.float() * scale.float().squeeze(-1)
    return (total if bias is None else total + bias.float()).to(dtype)


def _like_x(x: Tensor, **_: object) -> Tensor:
    return torch.empty_like(x)


@op(
    "experts_quant(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor gate_up_scale, Tensor down, "
    "Tensor down_scale, *, str act, str key, str? x_key=None) -> Tensor",
    splits=True,
    fake=_like_x,
)
def experts_quant(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    *,
    act: str,
    key: QuantKey,
    x_key: QuantKey | None = None,
) -> Tensor:
    """`experts` whose weights are stored quantized; scales [E, 2I, 1 or H / group] and [E, H, 1 or I / group].

    With `x_key` what goes into each product is rounded to it too. Only the experts that are used are widened.
    """

    def wide(values: Tensor, scale: Tensor) -> Callable[[int], Tensor]:
        return lambda expert: dequantize_with(values[expert], scale[expert], key).to(x.dtype)

    def rounded(value: Tensor) -> Tensor:
        if x_key is None:
            return value
        scale = scale_of(value, x_key)
        return dequantize_with(quantize_with(value, scale, x_key), scale, x_key).to(value.dtype)

    return each_expert(x, ids, weights, wide(gate_up, gate_up_scale), wide(down, down_scale), act, rounded)


@op(
    "moe_quant(Tensor x, Tensor router, Tensor gate_up, Tensor gate_up_scale, Tensor down, Tensor down_scale, "
    "Tensor? bias=None, Tensor? shared=None, *, int top_k, str act, str scoring='softmax', bool renormalise=False, "
    "float epsilon=0.0, float scale=1.0, int groups=1, int top_groups=1, bool router_in_f32=False, "
    "bool weights_in_f32=False, str key, str? x_key=None) -> Tensor",
    splits=True,
    fake=_like_x,
)
def moe_quant(
    x: Tensor,
    router: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    bias: Tensor | None = None,
    shared: Tensor | None = None,
    *,
    act: str,
    key: QuantKey,
    x_key: QuantKey | None = None,
    top_k: int,
    scoring: str = "softmax",
    renormalise: bool = False,
    epsilon: float = 0.0,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    router_in_f32: bool = False,
    weights_in_f32: bool = False,
) -> Tensor:
    """`moe` whose experts are stored quantized, as in `experts_quant`; the router is not."""
    weights, ids = route(
        x, router, bias, top_k=top_k, scoring=scoring, renormalise=renormalise, epsilon=epsilon, scale=scale, groups=groups,
        top_groups=top_groups, router_in_f32=router_in_f32, weights_in_f32=weights_in_f32,
    )  # fmt: skip
    out = experts_quant(x, ids, weights, gate_up, gate_up_scale, down, down_scale, act=act, key=key, x_key=x_key)
    return out if shared is None else out + shared


@op(
    "rms_norm_quant(Tensor x, Tensor? weight=None, *, float eps, float offset=0.0, bool scale_in_f32=False, "
    "str key) -> (Tensor, Tensor)"
)
def rms_norm_quant(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float,
    offset: float = 0.0,
    scale_in_f32: bool = False,
    key: QuantKey,
) -> tuple[Tensor, Tensor]:
    """`rms_norm`, then `quantize_dynamic`: returns (quantized, scale)."""
    return quantize_dynamic(rms_norm(x, weight, eps=eps, offset=offset, scale_in_f32=scale_in_f32), key=key)


@op(
    "add_rms_norm_quant(Tensor x, Tensor residual, Tensor? weight=None, *, float eps, float offset=0.0, "
    "bool scale_in_f32=False, str key) -> (Tensor, Tensor, Tensor)"
)
def add_rms_norm_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float,
    offset: float = 0.0,
    scale_in_f32: bool = False,
    key: QuantKey,
) -> tuple[Tensor, Tensor, Tensor]:
    """`add_rms_norm`, then `quantize_dynamic`: returns (quantized, scale, residual + x)."""
    normed, total = add_rms_norm(x, residual, weight, eps=eps, offset=offset, scale_in_f32=scale_in_f32)
    return *quantize_dynamic(normed, key=key), total


@op("gated_act_quant(Tensor gate, Tensor up, *, str act, str key) -> (Tensor, Tensor)")
def gated_act_quant(gate: Tensor, up: Tensor, *, act: str, key: QuantKey) -> tuple[Tensor, Tensor]:
    """`gated_act`, then `quantize_dynamic`: returns (quantized, scale)."""
    return quantize_dynamic(gated_act(gate, up, act=act), key=key)


def _normed_and_quantized(x: Tensor, *, key: QuantKey, **_: object) -> tuple[Tensor, Tensor]:
    return quantize_dynamic(torch.empty_like(x), key=key)


@op(
    "all_reduce_rms_norm_quant(Tensor x, Tensor? weight=None, *, int world, float eps, float offset=0.0, "
    "bool scale_in_f32=False, str key) -> (Tensor, Tensor)",
    splits=True,
    collective=True,
    fake=lambda x, weight=None, **attrs: _normed_and_quantized(x, key=attrs["key"]),
)
def all_reduce_rms_norm_quant(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    world: int,
    eps: float,
    offset: float = 0.0,
    scale_in_f32: bool = False,
    key: QuantKey,
    group: Group | None = None,
) -> tuple[Tensor, Tensor]:
    """`all_reduce_rms_norm`, then `quantize_dynamic`: returns (quantized, scale)."""
    normed = all_reduce_rms_norm(x, weight, world=world, eps=eps, offset=offset, scale_in_f32=scale_in_f32, group=group)
    return quantize_dynamic(normed, key=key)


@op(
    "all_reduce_add_rms_norm_quant(Tensor x, Tensor residual, Tensor? weight=None, *, int world, float eps, "
    "float offset=0.0, bool scale_in_f32=False, str key) -> (Tensor, Tensor, Tensor)",
    splits=True,
    collective=True,
    fake=lambda x, residual, weight=None, **attrs: (*_normed_and_quantized(x, key=attrs["key"]), torch.empty_like(residual)),
)
def all_reduce_add_rms_norm_quant(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    world: int,
    eps: float,
    offset: float = 0.0,
    scale_in_f32: bool = False,
    key: QuantKey,
    group: Group | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`all_reduce_add_rms_norm`, then `quantize_dynamic`: returns (quantized, scale, residual + sum)."""
    normed, total = all_reduce_add_rms_norm(
        x, residual, weight, world=world, eps=eps, offset=offset, scale_in_f32=scale_in_f32, group=group
    )
    return *quantize_dynamic(normed, key=key), total
