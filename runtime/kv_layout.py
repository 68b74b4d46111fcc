"""Where the bytes of the KV cache lie: layout records, and strided views of one flat int8 buffer.

A layout is named by its dimensions, outermost first: L layer, B block, H head, N state in block, C state content.
LBHNC gives each layer its own region; BLHNC and BHLNC keep the bytes of a block together over all layers.

    LBHNC   |layer 0: block 0, block 1, ... |layer 1: block 0, block 1, ... |
    BLHNC   |block 0: layer 0, layer 1, ... |block 1: layer 0, layer 1, ... |

All groups lie over the same buffer: a block belongs to one group at a time, and has one page for each layer of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from treadle.ir.errors import ConfigError
from treadle.runtime.kv_specs import AttentionSpec, KVCacheGroup, KVCacheSpec, choose

LAYOUTS = ("LBHNC", "BLHNC", "BHLNC")

TORCH_DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
    "i8": torch.int8,
}


@dataclass(frozen=True)
class LayoutRecord:
    """The layers of one group. All strides and sizes are in bytes; layer i of `layers` starts at i * layer_stride."""

    layers: tuple[int, ...]
    spec: KVCacheSpec
    num_blocks: int
    size: int
    layer_stride: int
    block_stride: int
    head_stride: int
    state_stride: int


@dataclass(frozen=True)
class CacheLayout:
    """All groups over one buffer of `size` bytes."""

    name: str
    size: int
    num_blocks: int
    records: tuple[LayoutRecord, ...]


def bytes_per_block(groups: Sequence[KVCacheGroup]) -> int:
    """Returns the bytes that one block takes over all layers: a page for each layer of the largest group."""
    page = max((group.spec.page_size_bytes for group in groups), default=0)
    return page * max((len(group.layers) for group in groups), default=0)


def plan_layout(groups: Sequence[KVCacheGroup], num_blocks: int, name: str = "LBHNC") -> CacheLayout:
    """Returns where every group's pages lie. Raises ConfigError for a layout that cannot hold these groups."""
    choose("KV-cache layout", name, LAYOUTS)
    size = bytes_per_block(groups) * num_blocks
    num_layers = max((len(group.layers) for group in groups), default=0)
    page = max((group.spec.page_size_bytes for group in groups), default=0)
    if name == "BHLNC" and any(_geometry(group.spec) != _geometry(groups[0].spec) for group in groups):
        raise ConfigError("layout BHLNC needs equal head geometry in all layers; choose LBHNC or BLHNC")
    if name == "BHLNC" and any(group.spec.dense_page_size_bytes != page for group in groups):
        raise ConfigError("layout BHLNC has no room for page padding; choose LBHNC or BLHNC")
    records = []
    for group in groups:
        heads, states, content = _geometry(group.spec)
        extents = {"L": num_layers, "B": num_blocks, "H": heads, "N": states, "C": content}
        strides = _strides(name, extents, page)
        records.append(
            LayoutRecord(
                layers=group.layers,
                spec=group.spec,
                num_blocks=num_blocks,
                size=size,
                layer_stride=strides["L"],
                block_stride=strides["B"],
                head_stride=strides["H"],
                state_stride=strides["N"],
            )
        )
    return CacheLayout(name, size, num_blocks, tuple(records))


def _geometry(spec: KVCacheSpec) -> tuple[int, int, int]:
    return spec.num_heads, spec.num_states_per_block, spec.state_content_size_bytes


def _strides(name: str, extents: Mapping[str, int], page: int) -> dict[str, int]:
    """Walks from the innermost dimension outwards; a page that is complete is padded to `page` bytes."""
    strides: dict[str, int] = {}
    stride = 1
    for dimension in reversed(name):
        strides[dimension] = stride
        stride *= extents[dimension]
        if strides.keys() == {"H", "N", "C"}:
            stride = page
    return strides


def allocate_buffer(layout: CacheLayout, device: torch.device | str = "cpu") -> torch.Tensor:
    """Returns the flat int8 buffer, zeroed, so that no unwritten slot can hold a NaN.

    In host memory the zeros come from the operating system page by page, when a block is first written: a pool of
    gigabytes costs neither start-up time nor memory until it is used.
    """
    if torch.device(device).type == "cpu":
        return torch.from_numpy(np.zeros(layout.size, dtype=np.int8))
    return torch.zeros(layout.size, dtype=torch.int8, device=device)


def layer_views(
    layout: CacheLayout, buffer: torch.Tensor, kernel_block_size: int | None = None
) -> dict[int, torch.Tensor]:
    """Returns for each layer a view [B, H, N, C] of `buffer`, C in elements of the cache's type; nothing is copied.

    With a `kernel_block_size` below a group's block size, each block shows as several kernel blocks:
    block b becomes b * f .. b * f + f - 1. Raises ConfigError where that is impossible.
    """
    assert buffer.dtype is torch.int8 and buffer.numel() == layout.size
    views = {}
    for record in layout.records:
        shape, strides, dtype = _view_geometry(record, kernel_block_size or record.spec.block_size)
        for position, layer in enumerate(record.layers):
            offset = position * record.layer_stride // dtype.itemsize
            views[layer] = buffer.view(dtype).as_strided(shape, strides, offset)
    return views


def _view_geometry(record: LayoutRecord, kernel_block_size: int) -> tuple[list[int], list[int], torch.dtype]:
    """Returns shape and strides [B, H, N, C] in elements, and the element type."""
    spec, (heads, states, content) = record.spec, _geometry(record.spec)
    dtype = TORCH_DTYPES[spec.cache_dtype] if isinstance(spec, AttentionSpec) else torch.int8
    factor = _split_factor(record, kernel_block_size)
    byte_strides = [record.block_stride, record.head_stride, record.state_stride]
    if factor > 1:
        states //= factor
        byte_strides = [record.block_stride // factor, states * content, content]
    if any(stride % dtype.itemsize for stride in [*byte_strides, record.layer_stride]):
        raise ConfigError(f"pages of {spec.page_size_bytes} bytes do not align with {dtype}; choose an even alignment")
    shape = [record.num_blocks * factor, heads, states, content // dtype.itemsize]
    return shape, [stride // dtype.itemsize for stride in byte_strides] + [1], dtype


def _split_factor(record: LayoutRecord, kernel_block_size: int) -> int:
    """Returns how many kernel blocks stand for one block."""
    spec = record.spec
    factor, rest = divmod(spec.block_size, kernel_block_size)
    if factor == 1 and rest == 0:
        return 1
    if factor == 0 or rest or spec.num_states_per_block % factor:
        raise ConfigError(
            f"blocks of {spec.block_size} tokens do not split into kernel blocks of {kernel_block_size}; choose a "
            f"block_size that is a multiple of {kernel_block_size}"
        )
    if record.block_stride != spec.dense_page_size_bytes:
        raise ConfigError(
            f"blocks of {spec.block_size} tokens cannot be split into kernel blocks of {kernel_block_size}: blocks lie "
            f"{record.block_stride} bytes apart but a dense page has {spec.dense_page_size_bytes}; choose "
            f"block_size={kernel_block_size} or an unpadded layout that keeps layers apart (LBHNC)"
        )
    return factor
