"""Block tables of one KV-cache group: which blocks each request holds there, in token order.

One manager for each kind of spec. Managers are composed by `KVManager`, which checks that blocks suffice before it
lets any of them take one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from treadle.runtime.kv_specs import KVCacheSpec, SlidingWindowSpec
from treadle.runtime.scheduler.block_hash import index_key
from treadle.runtime.scheduler.block_pool import Block, BlockPool


class GroupManager(ABC):
    """What every kind shares. `group` is the position of the group, which keeps its blocks apart in the index."""

    def __init__(self, spec: KVCacheSpec, pool: BlockPool, group: int):
        self.block_size = spec.block_size
        self.pool = pool
        self.group = group
        self.tables: dict[str, list[Block]] = {}
        self._num_known: dict[str, int] = {}  # leading blocks of a table that were offered to the index

    @abstractmethod
    def longest_hit(self, hashes: Sequence[bytes], max_tokens: int, alignment: int) -> list[Block]:
        """Returns the blocks of the longest prefix that the index can serve, null where none is needed.

        `hashes` are of blocks of this group's size. The prefix has at most `max_tokens` tokens, and a multiple
        of `alignment`.
        """

    @abstractmethod
    def peak_blocks(self, num_tokens: int, max_new_tokens: int) -> int:
        """Returns the most blocks a request holds at once while it grows to `num_tokens`.

        It computes at most `max_new_tokens` in one step.
        """

    @abstractmethod
    def take_out_unneeded(self, req_id: str, num_computed: int) -> list[Block]:
        """Replaces blocks that no later token attends to by the null block; returns them, the last one first."""

    def has_slots(self, req_id: str, num_slots: int) -> bool:
        """Whether the table of a request has room for `num_slots` slots already."""
        return len(self.tables[req_id]) * self.block_size >= num_slots

    def blocks_to_take(self, req_id: str, num_slots: int, hit: Sequence[Block]) -> int:
        """Returns by how much the free blocks shrink when the request gets `num_slots` slots, its hit included."""
        held = len(self.tables.get(req_id, ())) + len(hit)
        revived = sum(not block.is_null and block.ref_cnt == 0 for block in hit)
        return max(math.ceil(num_slots / self.block_size) - held, 0) + revived

    def attach(self, req_id: str, hit: Sequence[Block]) -> None:
        """Starts the table of a request with the blocks of a hit."""
        assert req_id not in self.tables
        self.pool.touch(hit)
        self.tables[req_id] = list(hit)
        self._num_known[req_id] = len(hit)

    def take(self, req_id: str, num_slots: int) -> list[Block]:
        """Grows the table to `num_slots` slots; returns the new blocks."""
        table = self.tables[req_id]
        new = self.pool.take(max(math.ceil(num_slots / self.block_size) - len(table), 0))
        table.extend(new)
        return new

    def remember(self, req_id: str, hashes: Sequence[bytes], num_tokens: int) -> None:
        """Enters the blocks that became full with `num_tokens` computed tokens into the index."""
        known, full = self._num_known[req_id], min(num_tokens // self.block_size, len(hashes))
        if full <= known:
            return
        table = self.tables[req_id]
        for i in range(known, full):
            if not table[i].is_null:
                self.pool.remember(table[i], index_key(hashes[i], self.group))
        self._num_known[req_id] = full

    def detach(self, req_id: str) -> list[Block]:
        """Forgets the request; returns its blocks in the order to release them: ends of sequences are evicted first."""
        self._num_known.pop(req_id, None)
        return self.tables.pop(req_id, [])[::-1]

    def _find(self, block_hash: bytes) -> Block | None:
        return self.pool.find(index_key(block_hash, self.group))


class FullAttentionManager(GroupManager):
    """Keeps every block until the request ends."""

    def longest_hit(self, hashes: Sequence[bytes], max_tokens: int, alignment: int) -> list[Block]:
        hit: list[Block] = []
        for i in range(min(max_tokens // self.block_size, len(hashes))):
            if (block := self._find(hashes[i])) is None:
                break
            hit.append(block)
        step = alignment // self.block_size
        return hit[: len(hit) // step * step]

    def peak_blocks(self, num_tokens: int, max_new_tokens: int) -> int:
        return math.ceil(num_tokens / self.block_size)

    def take_out_unneeded(self, req_id: str, num_computed: int) -> list[Block]:
        return []


class SlidingWindowManager(GroupManager):
    """Gives blocks back once the window has slid past them.

        table   [null null  b   b   b  ...]       window 5, block 2, 8 tokens computed: token 8 sees 4 .. 8
        tokens   0 1  2 3  4 5 6 7 8 9
    """

    def __init__(self, spec: SlidingWindowSpec, pool: BlockPool, group: int):
        super().__init__(spec, pool, group)
        self.window = spec.sliding_window
        self._num_cleared: dict[str, int] = {}

    def longest_hit(self, hashes: Sequence[bytes], max_tokens: int, alignment: int) -> list[Block]:
        """Only blocks that the next token's window reaches have to be there; from the right, the first such run."""
        needed = max(math.ceil((self.window - 1) / self.block_size), 1)
        step = alignment // self.block_size
        length = min(max_tokens // self.block_size, len(hashes)) // step * step
        run: list[Block] = []  # reversed; ends right before block `length`
        i = length - 1
        while i >= 0 and len(run) < needed:
            block = self._find(hashes[i])
            if block is not None:
                run.append(block)
            else:
                length, run = i // step * step, []
                i = length
            i -= 1
        return [self.pool.null_block] * (length - len(run)) + run[::-1]

    def peak_blocks(self, num_tokens: int, max_new_tokens: int) -> int:
        span = self.window - 1 + max_new_tokens
        return min(math.ceil(num_tokens / self.block_size), math.ceil((span - 1) / self.block_size) + 1)

    def take_out_unneeded(self, req_id: str, num_computed: int) -> list[Block]:
        table, done = self.tables[req_id], self._num_cleared.get(req_id, 0)
        unneeded = max(num_computed - self.window + 1, 0) // self.block_size
        out = [block for block in table[done:unneeded] if not block.is_null]
        table[done:unneeded] = [self.pool.null_block] * len(table[done:unneeded])
        self._num_cleared[req_id] = max(done, unneeded)
        return out[::-1]

    def detach(self, req_id: str) -> list[Block]:
        self._num_cleared.pop(req_id, None)
        return super().detach(req_id)
