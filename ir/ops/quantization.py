"""Ops on quantized tensors: eager references in float32, so that a CPU without 8-bit products computes the same.

`key` attributes are QuantKeys. Scales are tensors: [..., 1] per channel and per token, [..., K / group] per group.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.ir.group import Group
from treadle.ir.ops.collectives import all_reduce_add_rms_norm, all_reduce_rms_norm
from treadle.ir.ops.library import add_rms_norm, gated_act, rms_norm
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
