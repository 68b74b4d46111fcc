"""Blocks for requests over all KV-cache groups: prefix hits, allocation, release. The scheduler sees only this.

    computed | prefix hit | new | lookahead        slots of a request, in token order
               touched      taken: all or nothing
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from treadle.ir.errors import ConfigError, TreadleError
from treadle.runtime.kv_registry import KV_SPECS, SpecRegistry
from treadle.runtime.kv_specs import KVCacheGroup
from treadle.runtime.request import Request
from treadle.runtime.scheduler.block_hash import BlockHasher, HashView, environment_seed
from treadle.runtime.scheduler.block_pool import Block, BlockPool
from treadle.runtime.scheduler.config import SchedulerConfig
from treadle.runtime.scheduler.group_manager import GroupManager
from treadle.runtime.scheduler.output import GroupBlockIds


@dataclass(frozen=True, slots=True)
class KVCacheBlocks:
    """Blocks of one request: outer by group, inner in token order."""

    groups: tuple[Sequence[Block], ...]

    def block_ids(self) -> GroupBlockIds:
        return tuple([block.block_id for block in blocks] for blocks in self.groups)

    def __bool__(self) -> bool:
        return any(self.groups)


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Blocks that hold the first `num_tokens` tokens of a request already. They are not held until attached."""

    blocks: KVCacheBlocks
    num_tokens: int


class KVManager:
    """One pool of `num_blocks` blocks (the null block included), one manager for each group."""

    def __init__(
        self,
        config: SchedulerConfig,
        groups: Sequence[KVCacheGroup],
        num_blocks: int,
        registry: SpecRegistry = KV_SPECS,
    ):
        registry.check({layer: group.spec for group in groups for layer in group.layers})
        if num_blocks < 2:
            raise ConfigError(f"the KV cache needs at least 2 blocks (one is the null block), not {num_blocks}")
        self.config = config
        self.caching = config.enable_prefix_caching
        self.pool = BlockPool(num_blocks, self.caching)
        self.managers: list[GroupManager] = [
            registry.manager_for(type(group.spec))(group.spec, self.pool, i) for i, group in enumerate(groups)
        ]
        sizes = [manager.block_size for manager in self.managers] or [1]
        self.hash_block_size, self._alignment = math.gcd(*sizes), math.lcm(*sizes)
        self.hasher = BlockHasher(config.prefix_hash, self.hash_block_size, environment_seed()) if self.caching else None
        self.nothing = PrefixHit(KVCacheBlocks(tuple(() for _ in groups)), 0)
        self._deferred: deque[tuple[int, list[Block]]] = deque()  # (fence, blocks), fences never decrease
        self._processed_step = -1
        self._new_block_ids: list[int] = []

    # Capacity

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    @property
    def usage(self) -> float:
        """Fraction of the usable blocks that someone holds."""
        return 1 - self.pool.num_free / self.pool.num_usable

    def peak_blocks(self, num_tokens: int) -> int:
        """Returns the most blocks that a request holds at once while it grows to `num_tokens` slots."""
        step = self.config.max_num_scheduled_tokens + 2 * self.config.num_lookahead_tokens
        return sum(manager.peak_blocks(num_tokens, step) for manager in self.managers)

    def max_request_slots(self, limit: int) -> int:
        """Returns the largest number of slots, up to `limit`, that one request alone can have."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.peak_blocks(middle) <= self.pool.num_usable:
                low = middle
            else:
                high = middle - 1
        return low

    def missing_blocks(self, request: Request) -> int:
        """Returns how many blocks a running request still needs for the tokens it has now."""
        held = sum(not block.is_null for m in self.managers for block in m.tables.get(request.request_id, ()))
        return max(self.peak_blocks(request.num_tokens) - held, 0)

    # Prefix hits

    def longest_hit(self, request: Request) -> PrefixHit:
        """Returns the longest prefix that every group can serve; always at least one token is left to compute."""
        if not (self.caching and request.reads_prefix_cache and self.managers):
            return self.nothing
        length = request.num_tokens - 1
        while True:
            blocks, shorter = [], length
            for manager in self.managers:
                hashes = HashView(request.block_hashes, manager.block_size // self.hash_block_size)
                blocks.append(manager.longest_hit(hashes, shorter, self._alignment))
                shorter = min(shorter, len(blocks[-1]) * manager.block_size)
            if len(self.managers) == 1 or shorter in (length, 0):
                return PrefixHit(KVCacheBlocks(tuple(blocks)), shorter) if shorter else self.nothing
            length = shorter

    # Allocation

    def allocate(
        self, request: Request, num_new: int, hit: PrefixHit | None = None, keep_free: int = 0, whole: bool = False
    ) -> KVCacheBlocks | None:
        """Returns the blocks taken for `num_new` tokens after what is computed and hit, and for the lookahead.

        Returns None if they would leave less than `keep_free` blocks, or with `whole` if all known tokens would;
        then nothing has changed but the release of blocks that a window has left behind.
        """
        first, hit = hit is not None, hit or self.nothing
        computed = request.num_computed_tokens + hit.num_tokens
        slots = min(computed + num_new + self.config.num_lookahead_tokens, self.config.max_model_len)
        if not first:
            if all(manager.has_slots(request.request_id, slots) for manager in self.managers):
                return self.nothing.blocks
            self._release_unneeded(request)
        needed = self._blocks_to_take(request, slots, hit)
        if whole:
            needed = max(needed, min(self._blocks_to_take(request, request.num_tokens, hit), self.peak_blocks(request.num_tokens)))
        if needed > self.num_free - keep_free:
            return None
        if first:  # in all groups before any takes a block: until then the hit lies in the free queue
            for manager, blocks in zip(self.managers, hit.blocks.groups, strict=True):
                manager.attach(request.request_id, blocks)
        taken = [manager.take(request.request_id, slots) for manager in self.managers]
        if self.config.zero_new_blocks:
            self._new_block_ids.extend(block.block_id for blocks in taken for block in blocks)
        return KVCacheBlocks(tuple(taken))

    def _blocks_to_take(self, request: Request, slots: int, hit: PrefixHit) -> int:
        pairs = zip(self.managers, hit.blocks.groups, strict=True)
        return sum(manager.blocks_to_take(request.request_id, slots, blocks) for manager, blocks in pairs)

    def remember(self, request: Request, num_computed: int) -> None:
        """Lets others hit the full blocks among the first `num_computed` tokens, which are or surely will be computed.

        Drafts and outputs that are not back yet are not shared.
        """
        if not self.caching:
            return
        num_tokens = min(num_computed, request.num_tokens)
        for manager in self.managers:
            hashes = HashView(request.block_hashes, manager.block_size // self.hash_block_size)
            manager.remember(request.request_id, hashes, num_tokens)

    def block_ids(self, request: Request) -> GroupBlockIds:
        """Returns the whole block table of a request."""
        return tuple([block.block_id for block in m.tables[request.request_id]] for m in self.managers)

    def pop_new_block_ids(self) -> list[int]:
        """Returns, once, the blocks taken since the last call, if they are to be zeroed."""
        ids, self._new_block_ids = self._new_block_ids, []
        return ids

    # Release

    def free(self, request: Request) -> None:
        """Takes all blocks from a request."""
        self._release(request, [manager.detach(request.request_id) for manager in self.managers])

    def can_free_now(self, request: Request) -> bool:
        """Whether the blocks of a request would be free at once, not only after a step that is in flight."""
        return not self.config.defer_block_frees or request.last_scheduled_step <= self._processed_step

    def step_processed(self, step: int) -> None:
        """Releases the blocks that waited for this step or an earlier one."""
        self._processed_step = max(self._processed_step, step)
        while self._deferred and self._deferred[0][0] <= self._processed_step:
            self.pool.release(self._deferred.popleft()[1])

    def _release_unneeded(self, request: Request) -> None:
        rollback = request.num_output_placeholders if self.config.num_lookahead_tokens else 0
        computed = request.num_computed_tokens - rollback  # drafts in flight may be rejected
        self._release(request, [m.take_out_unneeded(request.request_id, computed) for m in self.managers])

    def _release(self, request: Request, groups: Sequence[list[Block]]) -> None:
        blocks = [block for group in groups for block in group]
        if not blocks:
            return
        if self.can_free_now(request):
            self.pool.release(blocks)
        else:
            last_fence = self._deferred[-1][0] if self._deferred else -1
            self._deferred.append((max(request.last_scheduled_step, last_fence), blocks))

    # Whole cache

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached content. Returns False, and does nothing, while any block is held."""
        return self.pool.reset_index()

    def check_integrity(self, live: set[str]) -> None:
        """Raises TreadleError if a block is lost, held twice too often, or held for a request not in `live`."""
        strangers = {req_id for manager in self.managers for req_id in manager.tables} - live
        if strangers:
            raise TreadleError(f"blocks are held for requests that do not run: {sorted(strangers)}")
        held = [block for manager in self.managers for table in manager.tables.values() for block in table]
        self.pool.check_integrity(held + [block for _, blocks in self._deferred for block in blocks])
