"""The layout in which CPU kernels read a weight: panels of 16 columns, contiguous each (kernels/cpu/packed_linear.h).

    f32    [N, K] -> [ceil(N / 16), K, 16]          column n of the product stands in panel n // 16, lane n % 16
    bf16   [N, K] -> [ceil(N / 16), K' / 2, 16, 2]  K' is K rounded up to 32; a pair is two neighbours along K
    i8     as bf16; its scales [N, groups] as f32

What is added to fill up is zero.
"""

from __future__ import annotations

import torch

from treadle.ir.types import DType

COLUMNS = 16
_PAIRED_MULTIPLE = 32  # K of one AMX tile of bf16
PACKED_DTYPES = ("f32", "bf16", "i8")


def packed_shape(dtype: DType | str, rows: int, size: int) -> tuple[int, ...]:
    """The shape of a packed [rows, size] weight."""
    panels = -(-rows // COLUMNS)
    if str(dtype) == "f32":
        return (panels, size, COLUMNS)
    return (panels, -(-size // _PAIRED_MULTIPLE) * _PAIRED_MULTIPLE // 2, COLUMNS, 2)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """A weight [N, K] of float32, bfloat16 or int8 in panels. Raises ValueError for another dtype."""
    dtype = DType.of(weight.dtype)
    if str(dtype) not in PACKED_DTYPES:
        raise ValueError(f"a weight of {dtype} cannot be packed; dtypes are {', '.join(PACKED_DTYPES)}")
    rows, size = weight.shape
    panels, *inner = packed_shape(dtype, rows, size)
    depth = inner[0] * inner[2] if len(inner) == 3 else inner[0]
    filled = weight.new_zeros(panels * COLUMNS, depth)
    filled[:rows, :size] = weight
    if len(inner) == 3:
        return filled.reshape(panels, COLUMNS, inner[0], 2).permute(0, 2, 1, 3).contiguous()
    return filled.reshape(panels, COLUMNS, depth).transpose(1, 2).contiguous()


def unpack(packed: torch.Tensor, rows: int, size: int) -> torch.Tensor:
    """The weight [rows, size] that `pack` was given."""
    if packed.dim() == 4:
        filled = packed.permute(0, 2, 1, 3).reshape(packed.shape[0] * COLUMNS, -1)
    else:
        filled = packed.transpose(1, 2).reshape(packed.shape[0] * COLUMNS, -1)
    return filled[:rows, :size]
