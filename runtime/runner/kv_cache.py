"""How much memory the KV cache gets, and the cache itself: one flat buffer with a strided view for each layer."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from treadle.codegen.program import KVLayer
from treadle.ir.errors import ConfigError
from treadle.runtime.kv_layout import allocate_buffer, bytes_per_block, layer_views, plan_layout
from treadle.runtime.kv_specs import (
    FullAttentionSpec,
    KVCacheGroup,
    KVCacheSpec,
    SlidingWindowSpec,
)

logger = logging.getLogger(__name__)

DEFAULT_SHARE = 0.4
"""Of the memory that is free at start."""

DEFAULT_LIMIT = 4 << 30
"""Bytes the cache takes at most unless asked for more."""


def layer_specs(layers: Sequence[KVLayer], *, block_size: int, dtype: str) -> dict[int, KVCacheSpec]:
    """The KV-cache spec of each attention layer, by layer index."""
    specs: dict[int, KVCacheSpec] = {}
    for layer in layers:
        shared = {
            "block_size": block_size,
            "num_kv_heads": layer.num_kv_heads,
            "head_size": layer.head_size,
            "dtype": dtype,
        }
        if layer.window is None:
            specs[layer.layer] = FullAttentionSpec(**shared)
        else:
            specs[layer.layer] = SlidingWindowSpec(**shared, sliding_window=layer.window)
    return specs


def available_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes this process may still take: what the system has free, within the limit of its control group."""
    free = next(
        int(line.split()[1]) * 1024 for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable")
    )
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()))
    return max(free, 0)


@dataclass(frozen=True, kw_only=True)
class CachePlan:
    """The cache that will be allocated. `num_blocks` includes the null block; `reason` says how it was found."""

    groups: tuple[KVCacheGroup, ...]
    num_blocks: int
    block_bytes: int
    max_model_len: int
    reason: str

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


def blocks_for(groups: Sequence[KVCacheGroup], num_tokens: int) -> int:
    """Most blocks that one request of `num_tokens` tokens holds, over all groups."""
    return sum(math.ceil(g.spec.max_memory_bytes(num_tokens) / g.spec.page_size_bytes) for g in groups)


def plan_cache(
    groups: tuple[KVCacheGroup, ...],
    *,
    num_blocks: int | None,
    kv_cache_bytes: int | None,
    max_num_seqs: int,
    max_model_len: int,
    model_len_asked: bool,
    available: int,
) -> CachePlan:
    """Sizes the pool: the number of blocks asked for, else the bytes, else a share of the `available` memory.

    A pool is never larger than all slots can use. If one longest request does not fit, the length is lowered when
    nobody asked for it (and no block count was given); else this raises ConfigError with the bytes that it needs.
    """
    block_bytes = bytes_per_block(groups)
    if not groups or num_blocks is not None:
        reason = "asked for" if groups else "no layer keeps a cache"
        return CachePlan(
            groups=groups, num_blocks=num_blocks or 2, block_bytes=block_bytes, max_model_len=max_model_len, reason=reason
        )
    budget, reason = _budget(kv_cache_bytes, available)
    fitting = budget // block_bytes
    useful = max_num_seqs * blocks_for(groups, max_model_len) + 1
    if fitting > useful:
        fitting, reason = useful, f"all that {max_num_seqs} requests of {max_model_len} tokens can use"
    if fitting < blocks_for(groups, max_model_len) + 1:
        shorter = _longest_fitting(groups, fitting, max_model_len)
        if model_len_asked or shorter < 2:
            needed = (blocks_for(groups, max_model_len) + 1) * block_bytes
            raise ConfigError(
                f"a request of max_model_len={max_model_len} tokens needs {needed} bytes of KV cache, but there are "
                f"{budget} ({reason}); set kv_cache_bytes to at least that, or lower max_model_len"
            )
        logger.warning("max_model_len lowered from %d to %d: the KV cache has %d bytes", max_model_len, shorter, budget)
        max_model_len, reason = shorter, f"{reason}; max_model_len lowered to {shorter} to fit"
    return CachePlan(
        groups=groups, num_blocks=fitting, block_bytes=block_bytes, max_model_len=max_model_len, reason=reason
    )


def _budget(kv_cache_bytes: int | None, available: int) -> tuple[int, str]:
    if kv_cache_bytes is not None:
        return kv_cache_bytes, "kv_cache_bytes"
    share = int(available * DEFAULT_SHARE)
    if share > DEFAULT_LIMIT:
        return DEFAULT_LIMIT, "the default limit"
    return share, f"{DEFAULT_SHARE:.0%} of the {available} bytes of free memory"


def _longest_fitting(groups: Sequence[KVCacheGroup], num_blocks: int, limit: int) -> int:
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if blocks_for(groups, middle) + 1 <= num_blocks else (low, middle - 1)
    return low


class KVCache:
    """The buffer and, by layer index, the views [B, H, N, C] through which attention sees it.

    A block that is taken again keeps what its last owner left in it. That is safe without zeroing: attention reads
    positions below a request's length only, and all of those were written by the request itself. Layers that read
    beyond (state-space ones would) have the scheduler list their blocks, which `zero_blocks` then clears.
    """

    def __init__(self, plan: CachePlan):
        layout = plan_layout(plan.groups, plan.num_blocks)
        self.buffer = allocate_buffer(layout)
        self.views: dict[int, torch.Tensor] = layer_views(layout, self.buffer)
        # Groups lie over one another, so the layers of the largest group cover every byte of a block.
        self._covering = max((record.layers for record in layout.records), key=len, default=())

    def zero_blocks(self, block_ids: list[int]) -> None:
        """Clears blocks in all layers."""
        for layer in self._covering:
            self.views[layer][block_ids] = 0
