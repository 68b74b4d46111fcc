"""The one table of how far apart two computations of the same graph may be, by element type."""

from __future__ import annotations

import torch

REWRITE = {"f32": 1e-5, "bf16": 3e-2, "f16": 4e-3}
"""Largest difference of an output after a rewrite or a compile, relative to the largest element of the output.

float32 sums in another order; half precisions round to 8 and 11 bits wherever a fused op need not."""


def relative_error(wanted: torch.Tensor, given: torch.Tensor) -> float:
    """The largest difference relative to the largest element wanted; infinite for NaN, another shape or dtype."""
    if wanted.shape != given.shape or wanted.dtype != given.dtype:
        return float("inf")
    if wanted.numel() == 0 or torch.equal(wanted, given):
        return 0.0
    scale = max(wanted.abs().max().item(), 1e-3)
    error = (wanted.double() - given.double()).abs().max().item() / scale
    return error if error == error else float("inf")
