"""Joins a residual add with the layer norm that follows it.

    %s = aten.add(%residual, %x)
    %y = layer_norm(%s, %w, %b)       ->    %y, %s = add_layer_norm(%x, %residual, %w, %b)

The sum stays a result, as the next residual reads it. Exact: the same addition, then the same norm. Does not handle
sums with a factor (alpha), sums that broadcast, sums of a parameter, nor sums that more than one norm reads (the
parallel blocks of GPT-NeoX).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from treadle.passes.base import Tier
from treadle.passes.library.fuse_add_rms_norm import FuseAddRmsNorm


@dataclass(frozen=True)
class FuseAddLayerNorm(FuseAddRmsNorm):
    name: ClassVar[str] = "fuse_add_layer_norm"
    tier: ClassVar[Tier] = "exact"
    produces: ClassVar[tuple[str, ...]] = ("add_layer_norm",)
    after: ClassVar[tuple[str, ...]] = ("raise_layer_norm",)
    norm: ClassVar[str] = "layer_norm"
