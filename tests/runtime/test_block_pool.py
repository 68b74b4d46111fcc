import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.ir.errors import TreadleError
from treadle.runtime.scheduler.block_pool import BlockPool, PrefixIndex


def ids(blocks) -> list[int]:
    return [block.block_id for block in blocks]


def test_null_block_is_first_and_never_freed():
    """C03-22: block 0 is taken at creation; no count is kept for it and releasing it does nothing."""
    pool = BlockPool(4, enable_caching=True)
    assert pool.null_block.block_id == 0 and pool.num_free == pool.num_usable == 3
    pool.touch([pool.null_block])
    pool.release([pool.null_block, pool.null_block])
    assert pool.null_block.ref_cnt == 0 and ids(pool.take(3)) == [1, 2, 3]
    with pytest.raises(AssertionError, match="1 blocks asked, 0 free"):
        pool.take(1)


def test_unhashed_blocks_are_reused_first():
    """C03-21: blocks without content go to the head (last freed, first taken), known ones to the tail (oldest first)."""
    pool = BlockPool(7, enable_caching=True)
    blocks = pool.take(4)  # 5 and 6 stay free
    pool.remember(blocks[0], b"a")
    pool.remember(blocks[1], b"b")
    pool.release([blocks[1], blocks[2], blocks[0], blocks[3]])
    assert ids(pool.take(6)) == [4, 3, 5, 6, 2, 1]


def test_freed_block_stays_a_hit_until_taken():
    """C03-21: content is forgotten when the block is taken for something else, not before."""
    pool = BlockPool(3, enable_caching=True)
    block, other = pool.take(2)
    pool.remember(block, b"a")
    pool.release([block, other])
    assert pool.find(b"a") is block
    pool.take(1)
    assert pool.find(b"a") is block, "the block without content went first"
    pool.take(1)
    assert pool.find(b"a") is None and block.key is None


def test_touch_protects_from_eviction():
    """C03-25: a hit leaves the free queue at once; a second holder only adds to the count."""
    pool = BlockPool(3, enable_caching=True)
    (block,) = pool.take(1)
    pool.remember(block, b"a")
    pool.release([block])
    pool.touch([block])
    pool.touch([block])
    assert block.ref_cnt == 2 and ids(pool.take(pool.num_free)) == [2]
    pool.release([block])
    assert pool.num_free == 0
    pool.release([block])
    assert pool.num_free == 1
    with pytest.raises(AssertionError, match="free already"):
        pool.release([block])


def test_index_upgrades_to_a_dict_on_duplicates():
    """C03-23: one block a key is stored bare; a dict appears with the second and keeps the rest findable."""
    index, (a, b) = PrefixIndex(), BlockPool(3, enable_caching=True).take(2)
    index.add(b"k", a)
    assert index._entries[b"k"] is a
    index.add(b"k", b)
    assert index._entries[b"k"] == {1: a, 2: b} and len(index) == 1
    index.remove(b"k", a)
    assert index.get(b"k") is b
    index.remove(b"k", b)
    assert index.get(b"k") is None and len(index) == 0


def test_new_key_replaces_the_old_one():
    """C03-26: a partial block that became full is known by its new content only."""
    pool = BlockPool(3, enable_caching=True)
    (block,) = pool.take(1)
    pool.remember(block, b"partial")
    pool.remember(block, b"full")
    assert pool.find(b"partial") is None and pool.find(b"full") is block


def test_caching_off():
    """C03-25: nothing is remembered."""
    pool = BlockPool(3, enable_caching=False)
    (block,) = pool.take(1)
    pool.remember(block, b"a")
    assert pool.find(b"a") is None and block.key is None


def test_reset_needs_an_idle_pool():
    """C03-28: nothing is forgotten while a block is held; afterwards no content is left."""
    pool = BlockPool(3, enable_caching=True)
    (block,) = pool.take(1)
    pool.remember(block, b"a")
    assert not pool.reset_index() and pool.find(b"a") is block
    pool.release([block])
    assert pool.reset_index() and pool.find(b"a") is None and len(pool.index) == 0
    assert sorted(ids(pool.take(2))) == [1, 2]


def test_integrity_check_names_the_block():
    """C03-21: the production check sees lost, doubly freed and wrongly listed blocks."""
    pool = BlockPool(4, enable_caching=True)
    blocks = pool.take(2)
    pool.check_integrity(blocks)
    with pytest.raises(TreadleError, match=r"Block\(2, refs=1\) has 0 holders"):
        pool.check_integrity(blocks[:1])
    pool.free_queue.push_tail(blocks[0])
    with pytest.raises(TreadleError, match=r"Block\(1.*in the free queue"):
        pool.check_integrity(blocks)
    pool.free_queue.unlink(blocks[0])
    blocks[1].key = b"unknown"
    with pytest.raises(TreadleError, match="prefix index"):
        pool.check_integrity(blocks)
    blocks[1].key = None
    pool.free_queue.push_tail(pool.null_block)
    with pytest.raises(TreadleError, match="null block"):
        pool.check_integrity(blocks)


@given(st.lists(st.tuples(st.sampled_from(["take", "release", "touch", "remember"]), st.integers(0, 30)), max_size=80))
def test_any_use_keeps_the_pool_whole(operations):
    """C03-21: whatever is done, every block is either free or held, with the right count; content is found again."""
    pool = BlockPool(9, enable_caching=True)
    held: list = []
    content: dict[bytes, set[int]] = {}
    for operation, n in operations:
        if operation == "take":
            taken = pool.take(min(n % 4, pool.num_free))
            held += taken
            for blocks in content.values():
                blocks -= set(ids(taken))
        elif operation == "release" and held:
            pool.release([held.pop(n % len(held))])
        elif operation == "touch" and (block := pool.find(b"%d" % (n % 5))):
            pool.touch([block])
            held.append(block)
        elif operation == "remember" and held:
            block = held[n % len(held)]
            for blocks in content.values():
                blocks.discard(block.block_id)
            content.setdefault(b"%d" % (n % 5), set()).add(block.block_id)
            pool.remember(block, b"%d" % (n % 5))
        pool.check_integrity(held)
        for key, blocks in content.items():
            found = pool.find(key)
            assert (found is not None and found.block_id in blocks) if blocks else found is None
    pool.release(held)
    assert pool.num_free == pool.num_usable
