import pytest

from tests.runtime.fake_runner import full_spec, make_request, window_spec
from treadle.ir.errors import ConfigError, TreadleError
from treadle.runtime.kv_specs import KVCacheGroup, SSMSpec
from treadle.runtime.request import RequestStatus
from treadle.runtime.scheduler.config import SchedulerConfig
from treadle.runtime.scheduler.kv_manager import KVManager


def make_manager(num_blocks: int = 12, specs=None, **options) -> KVManager:
    config = SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, **options})
    groups = [KVCacheGroup((i,), spec) for i, spec in enumerate(specs or [full_spec()])]
    return KVManager(config, groups, num_blocks)


def admit(kv: KVManager, req_id: str, prompt, num_new: int | None = None, **options):
    """Takes a request through lookup and allocation as the scheduler does; returns it and the hit."""
    request = make_request(req_id, prompt, **options)
    if kv.hasher:
        request.attach_hasher(kv.hasher)
    hit = kv.longest_hit(request)
    num_new = len(prompt) - hit.num_tokens if num_new is None else num_new
    if kv.allocate(request, num_new, hit) is None:
        return None, hit
    request.status = RequestStatus.RUNNING
    advance(kv, request, hit.num_tokens + num_new)
    return request, hit


def advance(kv: KVManager, request, num_computed: int) -> None:
    request.num_computed_tokens = num_computed
    kv.remember(request, num_computed)


def snapshot(kv: KVManager):
    return (
        list(kv.pool.free_queue._blocks),
        [(block.ref_cnt, block.key) for block in kv.pool.blocks],
        dict(kv.pool.index._entries),
        [{k: list(v) for k, v in manager.tables.items()} for manager in kv.managers],
    )


def test_segments_and_counts():
    """C03-16: hit blocks are touched, blocks for new and lookahead tokens taken, in token order."""
    kv = make_manager(num_lookahead_tokens=3)
    first, hit = admit(kv, "a", range(10))
    assert hit.num_tokens == 0 and kv.block_ids(first) == ([1, 2, 3, 4],), "10 tokens + 3 lookahead"
    second, hit = admit(kv, "b", range(10), num_new=1)
    assert hit.num_tokens == 8 and kv.block_ids(second) == ([1, 2, 5],)
    assert [block.ref_cnt for block in kv.pool.blocks[1:6]] == [2, 2, 1, 1, 1]
    blocks = kv.allocate(second, 4)
    assert blocks is not None and blocks.block_ids() == ([6],), "9 + 4 + 3 slots need one block more"


@pytest.mark.parametrize("case", ["blocks", "keep_free", "whole"])
def test_failure_changes_nothing(case):
    """C03-16: counts, queue, index and tables are as before."""
    kv = make_manager(num_blocks=8)
    done, _ = admit(kv, "a", range(8))
    kv.free(done)
    admit(kv, "b", [9] * 13)  # 4 of 7 blocks; the cached ones of a are still free
    request = make_request("c", [*range(8), *range(9)])
    request.attach_hasher(kv.hasher)
    hit = kv.longest_hit(request)
    assert hit.num_tokens == 8
    before = snapshot(kv)
    if case == "blocks":
        assert kv.allocate(request, 9, hit) is None
    elif case == "keep_free":
        assert kv.allocate(request, 4, hit, keep_free=1) is None
    else:
        assert kv.allocate(request, 4, hit, whole=True) is None
    assert snapshot(kv) == before
    assert kv.allocate(request, 4, hit) is not None, "the same chunk without the gate"


def test_hit_is_never_taken_for_the_same_request():
    """C03-25: blocks of the hit are free when found; allocating the rest must not reuse them."""
    kv = make_manager(num_blocks=4)
    done, _ = admit(kv, "a", range(8))
    kv.free(done)
    request, hit = admit(kv, "b", [*range(8), 9])
    assert hit.num_tokens == 8 and kv.block_ids(request) == ([1, 2, 3],)
    assert kv.num_free == 0


def test_hit_leaves_one_token():
    """C03-25: on a complete hit one token is computed, to obtain logits."""
    kv = make_manager()
    admit(kv, "a", range(8))
    _, hit = admit(kv, "b", range(8))
    assert hit.num_tokens == 4
    _, hit = admit(kv, "c", range(9))
    assert hit.num_tokens == 8


@pytest.mark.parametrize("options", [{"skip_prefix_cache_read": True}, {"prompt_logprobs": 0}])
def test_opting_out(options):
    """C03-25: a request may opt out, and one that needs all prompt logits does; its own blocks still are shared."""
    kv = make_manager()
    _, hit = admit(kv, "a", range(9), **options)
    _, hit = admit(kv, "b", range(9), **options)
    assert hit.num_tokens == 0
    _, hit = admit(kv, "c", range(9))
    assert hit.num_tokens == 8


def test_caching_off():
    """C03-25: no hashes, no hits."""
    kv = make_manager(enable_prefix_caching=False)
    request, _ = admit(kv, "a", range(9))
    _, hit = admit(kv, "b", range(9))
    assert hit.num_tokens == 0 and request.block_hashes == []


def test_adapter_and_salt_do_not_share():
    """TRAP-12, C12-03: an adapter named blue, a salt named blue and neither have three caches."""
    kv = make_manager(num_blocks=40)
    for req_id, options in (("a", {"lora_name": "blue"}), ("b", {"cache_salt": "blue"}), ("c", {})):
        assert admit(kv, req_id, range(16), **options)[1].num_tokens == 0
        assert admit(kv, req_id + "2", range(16), **options)[1].num_tokens == 12


def test_ends_of_sequences_are_evicted_first():
    """C03-21: a shorter prefix outlives a longer one."""
    kv = make_manager(num_blocks=4)
    done, _ = admit(kv, "a", range(12))
    kv.free(done)
    kv.pool.take(1)
    request = make_request("b", range(12))
    request.attach_hasher(kv.hasher)
    assert kv.longest_hit(request).num_tokens == 8


def test_window_slides_blocks_out():
    """C03-22, C03-26: blocks the window has left become null and free; they are no longer entered into the index."""
    kv = make_manager(specs=[window_spec(5, block_size=2)], max_num_batched_tokens=4)
    request, _ = admit(kv, "a", range(8), num_new=4)
    for computed in (8, 9, 10):
        assert kv.allocate(request, computed - request.num_computed_tokens) is not None
        advance(kv, request, computed)
        if computed > 8:
            request.append_output(1)
    assert kv.allocate(request, 1) is not None
    table = kv.block_ids(request)[0]
    assert table[:3] == [0, 0, 0] and all(table[3:]), "token 10 sees 6 .. 10"
    assert kv.num_free == kv.pool.num_usable - 3
    kv.free(request)
    assert kv.num_free == kv.pool.num_usable
    kv.check_integrity(set())


def test_window_hit_needs_only_the_window():
    """C12-05: a hit may start with null blocks; the blocks before the window may be gone."""
    kv = make_manager(specs=[window_spec(5, block_size=2)])
    done, _ = admit(kv, "a", range(10))
    kv.free(done)
    request = make_request("b", range(11))
    request.attach_hasher(kv.hasher)
    for lost, expected in ((0, [0, 0, 0, 4, 5]), (4, [0, 0, 3, 4]), (3, [0, 2, 3]), (2, [])):
        kv.pool.forget(kv.pool.find(request.block_hashes[lost] + bytes(4)))
        hit = kv.longest_hit(request)
        assert hit.blocks.block_ids() == (expected,) and hit.num_tokens == 2 * len(expected)


def test_window_hit_at_the_start_of_the_sequence():
    """C12-05: a prefix shorter than the window needs all of its blocks."""
    kv = make_manager(specs=[window_spec(20, block_size=2)])
    admit(kv, "a", range(6))
    _, hit = admit(kv, "b", range(7))
    assert hit.num_tokens == 6


def test_groups_serve_a_hit_together():
    """C12-05, C03-24: with several groups the hit is what all of them have."""
    kv = make_manager(num_blocks=40, specs=[full_spec(2), window_spec(5, block_size=2)])
    done, _ = admit(kv, "a", range(12))
    kv.free(done)
    request = make_request("b", range(13))
    request.attach_hasher(kv.hasher)
    assert kv.longest_hit(request).num_tokens == 12
    kv.pool.forget(kv.pool.find(request.block_hashes[5] + (1).to_bytes(4, "big")))
    assert kv.longest_hit(request).num_tokens == 10
    kv.pool.forget(kv.pool.find(request.block_hashes[3] + (0).to_bytes(4, "big")))
    hit = kv.longest_hit(request)
    assert hit.num_tokens == 6 and [len(blocks) for blocks in hit.blocks.groups] == [3, 3]


def test_groups_of_different_block_sizes():
    """C03-24, C12-04: one hash granularity serves blocks of 4 and 8; a hit is whole in both."""
    kv = make_manager(num_blocks=40, specs=[full_spec(4), full_spec(8)])
    request, _ = admit(kv, "a", range(30))
    assert [len(ids) for ids in kv.block_ids(request)] == [8, 4] and len(request.block_hashes) == 7
    _, hit = admit(kv, "b", range(30))
    assert hit.num_tokens == 24 and [len(blocks) for blocks in hit.blocks.groups] == [6, 3]
    _, hit = admit(kv, "c", range(16))
    assert hit.num_tokens == 8, "12 tokens are no whole number of the larger blocks"


def test_peak_blocks_bound_a_window():
    """C03-17: a window group holds no more than its window and one step, whatever the length."""
    kv = make_manager(specs=[full_spec(), window_spec(5)], max_num_batched_tokens=8)
    assert kv.peak_blocks(64) == 16 + 4
    assert kv.peak_blocks(6) == 2 + 2
    assert kv.max_request_slots(1000) == 28 and kv.peak_blocks(28) == 11 < kv.peak_blocks(29)


def test_deferred_frees_wait_for_their_fence():
    """C03-20: blocks come back when the last step that used them is processed, in order of their fences."""
    kv = make_manager(defer_block_frees=True, enable_prefix_caching=False)
    requests = [admit(kv, req_id, [1] * 8)[0] for req_id in "abc"]
    for request, step in zip(requests, (5, 3, -1), strict=True):
        request.last_scheduled_step = step
    assert [kv.can_free_now(request) for request in requests] == [False, False, True]
    for request in requests:
        kv.free(request)
    assert kv.num_free == 11 - 4, "only what was never scheduled is free at once"
    assert [fence for fence, _ in kv._deferred] == [5, 5], "fences never decrease"
    kv.check_integrity(set())
    kv.step_processed(4)
    assert kv.num_free == 11 - 4
    kv.step_processed(5)
    assert kv.num_free == 11


def test_frees_are_immediate_otherwise():
    """C03-20: without a connector nothing is deferred."""
    kv = make_manager()
    request, _ = admit(kv, "a", range(8))
    request.last_scheduled_step = 5
    kv.free(request)
    assert kv.num_free == 11


def test_new_blocks_to_zero_are_listed_once():
    """C03-15: taken blocks, not hit ones; nothing unless asked for."""
    kv = make_manager(zero_new_blocks=True)
    admit(kv, "a", range(9))
    assert kv.pop_new_block_ids() == [1, 2, 3] and kv.pop_new_block_ids() == []
    admit(kv, "b", range(9))
    assert kv.pop_new_block_ids() == [4]
    silent = make_manager()
    admit(silent, "a", range(9))
    assert silent.pop_new_block_ids() == []


def test_integrity_check_sees_strangers_and_losses():
    """C03-21: tables of requests that do not run, and blocks that nobody holds."""
    kv = make_manager()
    admit(kv, "a", range(9))
    kv.check_integrity({"a"})
    with pytest.raises(TreadleError, match=r"\['a'\]"):
        kv.check_integrity(set())
    kv.managers[0].tables["a"].pop()
    with pytest.raises(TreadleError, match="0 holders"):
        kv.check_integrity({"a"})


def test_start_up_checks():
    """C01-14: no manager for a spec, or a pool with the null block alone."""
    ssm = SSMSpec(block_size=4, shapes=((2,),), dtypes=("f32",))
    with pytest.raises(ConfigError, match="layer 0: no cache manager for KV spec SSMSpec"):
        make_manager(specs=[ssm])
    with pytest.raises(ConfigError, match="at least 2 blocks"):
        make_manager(num_blocks=1)
