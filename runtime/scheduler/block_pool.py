"""All KV-cache blocks of a device: who holds them, in which order free ones are taken, which hold known content.

    taken (ref_cnt > 0) --release--> free queue --take--> taken         a free block that has a key stays a valid
                        <--touch----  (ref_cnt 0)                       cache hit until it is taken for other content
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from treadle.ir.errors import TreadleError


class Block:
    """One block id of the pool. `key` names its content in the prefix index; None: not in the index."""

    __slots__ = ("block_id", "is_null", "key", "ref_cnt")

    def __init__(self, block_id: int):
        self.block_id = block_id
        self.ref_cnt = 0
        self.key: bytes | None = None
        self.is_null = False

    def __repr__(self) -> str:
        return f"Block({self.block_id}, refs={self.ref_cnt}{', null' if self.is_null else ''})"


class FreeQueue:
    """Free blocks in the order they are taken. Every operation is O(1): an OrderedDict is a linked list with an index."""

    def __init__(self, blocks: Iterable[Block]):
        self._blocks = OrderedDict((block.block_id, block) for block in blocks)

    def pop_head(self) -> Block:
        return self._blocks.popitem(last=False)[1]

    def push_tail(self, block: Block) -> None:
        self._blocks[block.block_id] = block

    def push_head(self, block: Block) -> None:
        self._blocks[block.block_id] = block
        self._blocks.move_to_end(block.block_id, last=False)

    def unlink(self, block: Block) -> None:
        del self._blocks[block.block_id]

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: Block) -> bool:
        return block.block_id in self._blocks


class PrefixIndex:
    """Key -> block. Only a key that several blocks share costs a dict: most never do, and dicts cost the collector."""

    def __init__(self) -> None:
        self._entries: dict[bytes, Block | dict[int, Block]] = {}

    def get(self, key: bytes) -> Block | None:
        """Returns one block with this content."""
        entry = self._entries.get(key)
        return next(iter(entry.values())) if isinstance(entry, dict) else entry

    def add(self, key: bytes, block: Block) -> None:
        entry = self._entries.get(key)
        if entry is None:
            self._entries[key] = block
        elif isinstance(entry, dict):
            entry[block.block_id] = block
        else:
            self._entries[key] = {entry.block_id: entry, block.block_id: block}

    def remove(self, key: bytes, block: Block) -> None:
        entry = self._entries[key]
        if isinstance(entry, dict):
            del entry[block.block_id]
            if entry:
                return
        del self._entries[key]

    def clear(self) -> None:
        self._entries.clear()

    def __len__(self) -> int:
        """How many keys there are."""
        return len(self._entries)


class BlockPool:
    """`num_blocks` blocks, of which the first is the null block: a placeholder that nobody owns or frees."""

    def __init__(self, num_blocks: int, enable_caching: bool):
        self.enable_caching = enable_caching
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.free_queue = FreeQueue(self.blocks)
        self.index = PrefixIndex()
        self.null_block = self.free_queue.pop_head()
        self.null_block.is_null = True

    @property
    def num_usable(self) -> int:
        return len(self.blocks) - 1

    @property
    def num_free(self) -> int:
        return len(self.free_queue)

    def take(self, count: int) -> list[Block]:
        """Returns `count` blocks for new content. Whoever calls has checked `num_free`."""
        assert count <= self.num_free, f"{count} blocks asked, {self.num_free} free"
        taken = [self.free_queue.pop_head() for _ in range(count)]
        for block in taken:
            self.forget(block)
            block.ref_cnt = 1
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        """Adds a holder to blocks found in the index, so that they cannot be taken for other content."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                self.free_queue.unlink(block)
            block.ref_cnt += 1

    def release(self, blocks: Iterable[Block]) -> None:
        """Removes one holder from each block. What has known content is taken again last, the rest first.

        Known blocks of one call are taken again in the given order: pass the end of a sequence before its start.
        """
        for block in blocks:
            if block.is_null:
                continue
            assert block.ref_cnt > 0, f"{block} is free already"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                if block.key is None:
                    self.free_queue.push_head(block)
                else:
                    self.free_queue.push_tail(block)

    def find(self, key: bytes) -> Block | None:
        """Returns a block that holds this content, free or taken."""
        return self.index.get(key)

    def remember(self, block: Block, key: bytes) -> None:
        """Enters a block into the index, in place of what it was known as before."""
        assert not block.is_null
        if self.enable_caching and block.key != key:
            self.forget(block)
            block.key = key
            self.index.add(key, block)

    def forget(self, block: Block) -> None:
        """Removes a block from the index, if it is there."""
        if block.key is not None:
            self.index.remove(block.key, block)
            block.key = None

    def reset_index(self) -> bool:
        """Forgets all content. Returns False, and does nothing, while any block is taken."""
        if self.num_free != self.num_usable:
            return False
        self.index.clear()
        for block in self.blocks:
            block.key = None
        return True

    def check_integrity(self, held: Sequence[Block]) -> None:
        """Raises TreadleError unless the pool agrees with `held`, every block that anyone holds, once a holder."""
        holders = Counter(block.block_id for block in held if not block.is_null)
        for block in self.blocks[1:]:
            if block.ref_cnt != holders[block.block_id]:
                raise TreadleError(f"{block} has {holders[block.block_id]} holders")
            if (block in self.free_queue) != (block.ref_cnt == 0):
                raise TreadleError(f"{block} is {'' if block in self.free_queue else 'not '}in the free queue")
            if block.key is not None and self.find(block.key) is None:
                raise TreadleError(f"{block} has a key that the prefix index does not know")
        if self.null_block in self.free_queue or self.null_block.ref_cnt:
            raise TreadleError("the null block was freed")
