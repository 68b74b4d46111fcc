"""The arithmetic of quantization, in torch calls that torch.export can trace: scales, rounding, and back.

Symmetric only: value = quantized * scale. A scale has the rank of what it scales: [N, 1], [N, K / group] or [1, 1].
fp8 is rounded to nearest even and saturates, as the OCP 8-bit floating point specification asks of conversions.
"""

from __future__ import annotations

from torch import Tensor

from treadle.ir.dtypes import DTYPES
from treadle.ir.quant_key import QuantKey

_SMALLEST = 1e-12  # a row of zeros gets this scale, not 0


def scale_of(x: Tensor, key: QuantKey) -> Tensor:
    """The scale that maps the largest magnitude of each row, group or tensor to the largest element.

    x [..., K] -> [..., 1], [..., K / group] or, per tensor, [1, ..., 1].
    """
    _check(x, key)
    wide = x.float().abs()
    if key.granularity == "per_tensor":
        peak = wide.amax(dim=list(range(x.dim())), keepdim=True)
    elif key.granularity == "per_group":
        peak = wide.unflatten(-1, (x.shape[-1] // key.group, key.group)).amax(-1)
    else:
        peak = wide.amax(-1, keepdim=True)
    return (peak / key.largest).clamp(min=_SMALLEST).to(DTYPES[key.scale].torch)


_CANDIDATES = tuple(1.0 + step / 8 for step in range(8))
"""A float's rounding error repeats with every power of two of its scale, so one octave holds the best scale."""


def fitted_scale_of(x: Tensor, key: QuantKey) -> Tensor:
    """The scale for weights: as `scale_of`, but for float elements the multiple of it that leaves the least squared error.

    An integer grid is finest at the smallest scale that holds the peak; a float grid is not, its steps grow with the value.
    """
    peak = scale_of(x, key)
    if key.element == "i8":
        return peak
    best, least = peak, None
    for factor in _CANDIDATES:
        scale = (peak * factor).to(peak.dtype)
        error = _squared_error(x, scale, key)
        if least is None:
            least = error
            continue
        better = error < least
        best, least = best.where(~better, scale), least.where(~better, error)
    return best


def _squared_error(x: Tensor, scale: Tensor, key: QuantKey) -> Tensor:
    """Of each scaled row, group or tensor; has the shape of the scale."""
    square = (dequantize_with(quantize_with(x, scale, key), scale, key) - x.float()).square()
    if key.granularity == "per_tensor":
        return square.sum().reshape(scale.shape)
    if key.granularity == "per_group":
        return square.unflatten(-1, (x.shape[-1] // key.group, key.group)).sum(-1)
    return square.sum(-1, keepdim=True)


def quantize_with(x: Tensor, scale: Tensor, key: QuantKey) -> Tensor:
    """x [..., K] divided by its scale and rounded to the element type; what is too large saturates."""
    _check(x, key)
    scaled = (x.float() / _spread(scale, x, key)).clamp(-key.largest, key.largest)
    return (scaled.round() if key.element == "i8" else scaled).to(DTYPES[key.element].torch)


def dequantize_with(q: Tensor, scale: Tensor, key: QuantKey) -> Tensor:
    """The values that q [..., K] stands for, in float32."""
    _check(q, key)
    return q.float() * _spread(scale, q, key)


def _spread(scale: Tensor, x: Tensor, key: QuantKey) -> Tensor:
    wide = scale.float()
    return wide.repeat_interleave(key.group, dim=-1, output_size=x.shape[-1]) if key.group else wide


def _check(x: Tensor, key: QuantKey) -> None:
    if not key.symmetric:
        raise ValueError(f"{key}: only symmetric keys can be computed")
    if key.group and x.shape[-1] % key.group:
        raise ValueError(f"{key}: {x.shape[-1]} values do not divide into groups of {key.group}")


__all__ = ["dequantize_with", "fitted_scale_of", "quantize_with", "scale_of"]
