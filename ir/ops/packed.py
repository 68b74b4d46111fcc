"""Products with weights that a pass has packed for the processor. Compiled code calls a kernel of ours for them.

The torch op is what torch.export sees; its name has the version of the layout, since compiled pieces look the kernel up by it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.ir.ops.registry import op
from treadle.ir.packing import unpack

TORCH_OP = "treadle::packed_linear_v1"
INT8_TORCH_OP = "treadle::packed_int8_linear_v1"


@torch.library.custom_op(TORCH_OP, mutates_args=())
def _packed_linear(x: Tensor, weight: Tensor, n: int) -> Tensor:
    return F.linear(x, unpack(weight, n, x.shape[-1]))


@_packed_linear.register_fake
def _(x: Tensor, weight: Tensor, n: int) -> Tensor:
    return x.new_empty((x.shape[0], n))


@op("packed_linear(Tensor x, Tensor weight, *, int n) -> Tensor")
def packed_linear(x: Tensor, weight: Tensor, *, n: int) -> Tensor:
    """`x @ weight.T` for a weight [n, K] in panels of 16 columns: x [T, K], weight as `ir/packing.py` lays it out -> [T, n]."""
    return torch.ops.treadle.packed_linear_v1(x, weight, n)


@torch.library.custom_op(INT8_TORCH_OP, mutates_args=())
def _packed_int8_linear(x: Tensor, weight: Tensor, scale: Tensor, n: int) -> Tensor:
    values, scales = unpack(weight, n, x.shape[-1]).float(), unpack(scale, n, scale.shape[1])
    return F.linear(x.float(), values * scales.repeat_interleave(x.shape[-1] // scales.shape[1], 1)).to(x.dtype)


@_packed_int8_linear.register_fake
def _(x: Tensor, weight: Tensor, scale: Tensor, n: int) -> Tensor:
    return x.new_empty((x.shape[0], n))


@op("packed_int8_linear(Tensor x, Tensor weight, Tensor scale, *, int n) -> Tensor")
def packed_int8_linear(x: Tensor, weight: Tensor, scale: Tensor, *, n: int) -> Tensor:
    """`packed_linear` of an int8 weight: x [T, K], weight i8 in panels, scale f32 [N / 16, groups, 16] -> [T, n].

    Each column's sum over a group of K is multiplied by its scale, in float32.
    """
    return torch.ops.treadle.packed_int8_linear_v1(x, weight, scale, n)
