import pytest

from tests.runtime.fake_runner import (
    EOS,
    Loop,
    expected_tokens,
    full_spec,
    make_request,
    make_scheduler,
    window_spec,
)
from treadle.ir.errors import ConfigError, TreadleError, UserError
from treadle.runtime.kv_specs import group_layers
from treadle.runtime.request import RequestStatus
from treadle.runtime.runner_output import RunnerOutput
from treadle.runtime.scheduler.config import SchedulerConfig
from treadle.runtime.scheduler.request_queue import RequestQueue, arrival_order, priority_order


def add(scheduler, *args, **options):
    request = make_request(*args, **options)
    scheduler.add_request(request)
    return request


def scheduled(step) -> dict[str, int]:
    return step.num_scheduled_tokens


# Progress, budgets, thresholds


def test_chunks_and_decodes_share_a_step():
    """C03-01: running requests are served before admission; a prompt is cut to what budget is left."""
    loop = Loop(make_scheduler(max_num_batched_tokens=10))
    add(loop.scheduler, "a", range(1, 9), ignore_eos=True)
    add(loop.scheduler, "b", range(11, 31), ignore_eos=True)
    assert scheduled(loop.step()) == {"a": 8, "b": 2}
    assert scheduled(loop.step()) == {"a": 1, "b": 9}
    add(loop.scheduler, "c", [5])
    assert scheduled(loop.step()) == {"a": 1, "b": 9}, "the newcomer waits: the budget went to those that run"
    assert scheduled(loop.step()) == {"a": 1, "b": 1, "c": 1}


def test_nothing_is_scheduled_past_the_end():
    """C03-01: a finished request takes no further step."""
    loop = Loop(make_scheduler())
    add(loop.scheduler, "a", [1, 2], max_tokens=3, ignore_eos=True)
    loop.run()
    assert [scheduled(step) for step in loop.steps] == [{"a": 2}, {"a": 1}, {"a": 1}, {}]


def test_async_does_not_overshoot():
    """C03-01: placeholders that already reach max_tokens are not followed by a wasted step."""
    loop = Loop(make_scheduler(async_scheduling=True), depth=2)
    add(loop.scheduler, "a", [1, 2], max_tokens=3, ignore_eos=True)
    loop.run()
    assert [scheduled(step) for step in loop.steps if scheduled(step)] == [{"a": 2}, {"a": 1}, {"a": 1}]


def test_a_second_plan_before_the_output_is_empty():
    """C03-01: without asynchronous scheduling a request that has caught up has nothing to do."""
    scheduler = make_scheduler()
    add(scheduler, "a", [1, 2])
    assert scheduled(scheduler.schedule()) == {"a": 2}
    assert scheduled(scheduler.schedule()) == {}


def test_clamps():
    """C03-03: threshold, then token budget, then input budget less draft slots."""
    scheduler = make_scheduler(
        max_num_batched_tokens=20, max_num_seqs=2, num_draft_slots=3, long_prefill_token_threshold=9
    )
    assert scheduler.config.max_num_scheduled_tokens == 14
    for req_id in "abc":
        add(scheduler, req_id, range(1, 31))
    step = scheduler.schedule()
    assert scheduled(step) == {"a": 9, "b": 5}, "threshold for a; 14 - 9 for b; no slot for c"


def test_room_to_the_end_limits_drafts():
    """C03-03, C03-11: no position at or past the request's end is computed."""
    loop = Loop(make_scheduler(num_lookahead_tokens=5))
    request = add(loop.scheduler, "a", [1, 2], max_tokens=4, ignore_eos=True)
    loop.step()
    loop.scheduler.set_draft_tokens({"a": [1, 2, 3, 4, 5]})
    step = loop.scheduler.schedule()
    assert scheduled(step) == {"a": 3} and step.spec_token_ids == {"a": [1, 2]}
    assert request.num_computed_tokens == 5


@pytest.mark.parametrize(("others", "first"), [(0, 30), (2, 8)])
def test_long_prefill_threshold(others, first):
    """C03-04: a long prompt is cut when others wait, and not when it is alone."""
    scheduler = make_scheduler(max_num_batched_tokens=32, long_prefill_token_threshold=8)
    for i in range(1 + others):
        add(scheduler, f"r{i}", range(1, 31))
    assert scheduled(scheduler.schedule())["r0"] == first


def test_threshold_counts_only_who_can_run():
    """C03-04: waiting requests that no slot or a pause keeps out do not make a prompt share."""
    for options, pause in (({"max_num_seqs": 1}, False), ({}, True)):
        loop = Loop(make_scheduler(max_num_batched_tokens=16, long_prefill_token_threshold=8, **options))
        add(loop.scheduler, "a", range(1, 31))
        loop.step()
        add(loop.scheduler, "b", range(1, 31))
        if pause:
            loop.scheduler.pause()
        assert scheduled(loop.step()) == {"a": 14}


def test_adaptive_threshold_is_the_fair_share():
    """C03-05: the threshold never falls below the share of those that are eligible."""
    for count, share in ((2, 16), (4, 8)):
        scheduler = make_scheduler(
            max_num_batched_tokens=32, long_prefill_token_threshold=3, adaptive_prefill_threshold=True
        )
        for i in range(count):
            add(scheduler, f"r{i}", [i] * 30)
        assert set(scheduled(scheduler.schedule()).values()) == {share}


def test_decode_pacing():
    """C03-06: asynchronous decodes of one request keep the interval."""
    loop = Loop(make_scheduler(async_scheduling=True, decode_interval=3), depth=4)
    add(loop.scheduler, "a", [1, 2], max_tokens=3, ignore_eos=True)
    for _ in range(7):
        loop.step()
    assert [step.step for step in loop.steps if scheduled(step)] == [0, 3, 6]


# Containers and admission


def test_active_cap_is_not_the_slot_cap():
    """C03-02: the lower cap limits RUNNING only; each request is in one container."""
    loop = Loop(make_scheduler(max_num_seqs=4, max_num_active_seqs=2))
    for req_id in "abc":
        add(loop.scheduler, req_id, [1, 2], max_tokens=2, ignore_eos=True)
    loop.step()
    assert [r.request_id for r in loop.scheduler.running] == ["a", "b"] and len(loop.scheduler.waiting) == 1
    loop.scheduler.check_integrity()
    loop.run()
    assert loop.finish_reason("c") == "length"


def test_integrity_check_sees_a_doubled_request():
    """C03-02: the idle check names what is in two containers or none."""
    scheduler = make_scheduler()
    request = add(scheduler, "a", [1, 2])
    scheduler.running.append(request)
    with pytest.raises(TreadleError, match="1 requests are live"):
        scheduler.check_integrity()
    scheduler.running.clear()
    scheduler.waiting.remove(request)
    with pytest.raises(TreadleError, match="1 requests are live"):
        scheduler.check_integrity()


def test_admission_failure_stops_the_loop_and_preempts_nobody():
    """C03-12: what does not fit waits; it does not let later ones pass, nor push out running ones."""
    scheduler = make_scheduler(num_blocks=8, enable_prefix_caching=False)
    add(scheduler, "a", range(20), max_tokens=1)
    add(scheduler, "b", range(12), max_tokens=1)
    add(scheduler, "c", range(4), max_tokens=1)
    step = scheduler.schedule()
    assert scheduled(step) == {"a": 20} and not step.preempted_req_ids
    assert [r.request_id for r in scheduler.waiting] == ["b", "c"]


def test_without_chunks_a_prompt_waits_for_a_whole_step():
    """C03-12: with chunked prefill off a prompt runs whole or not at all."""
    loop = Loop(make_scheduler(enable_chunked_prefill=False, max_num_batched_tokens=64))
    add(loop.scheduler, "a", [1] * 40, max_tokens=1)
    add(loop.scheduler, "b", [2] * 30, max_tokens=1)
    assert [scheduled(loop.step()), scheduled(loop.step())] == [{"a": 40}, {"b": 30}]


def test_blocked_request_keeps_its_place():
    """C03-13: it does not block others, and goes first among the waiting once it is ready."""
    ready = set()
    promoters = {RequestStatus.WAITING_FOR_GRAMMAR: lambda request: request.request_id in ready}
    loop = Loop(make_scheduler(max_num_active_seqs=1, promoters=promoters))
    blocked = make_request("a", [1], max_tokens=2, ignore_eos=True)
    blocked.status = RequestStatus.WAITING_FOR_GRAMMAR
    loop.scheduler.add_request(blocked)
    for req_id in "bc":
        add(loop.scheduler, req_id, [1, 2], max_tokens=2, ignore_eos=True)
    assert scheduled(loop.step()) == {"b": 2} and blocked in loop.scheduler.skipped_waiting
    assert loop.scheduler.stats().num_waiting == 2
    ready.add("a")
    loop.step()
    assert scheduled(loop.step()) == {"a": 1}, "before c, which came later"
    loop.run()
    assert loop.finish_reason("c") == "length"


def test_queue_orders():
    """C03-13: first come first served by arrival at the scheduler; priority by value, then time, then arrival."""
    requests = [
        make_request(name, [1], priority=p, arrival_time=t) for name, p, t in (("a", 1, 0.0), ("b", 0, 2.0), ("c", 0, 1.0))
    ]
    for order, expected in ((arrival_order, "abc"), (priority_order, "cba")):
        queue = RequestQueue(order)
        for number, request in enumerate(requests):
            request.queue_number = number
            queue.push(request)
        assert requests[0] in queue and len(queue) == 3
        assert "".join(queue.pop().request_id for _ in range(3)) == expected
        queue.push(requests[0])
        queue.remove(requests[0])
        assert not queue and requests[0] not in queue


def test_full_sequence_gate():
    """C03-17: a long prompt whose first chunk would fit is not admitted if the whole does not; off, it is."""
    for gate, expected in ((True, {"a": 1}), (False, {"a": 1, "b": 7})):
        loop = Loop(make_scheduler(num_blocks=10, max_num_batched_tokens=8, full_sequence_must_fit=gate))
        add(loop.scheduler, "a", [1] * 6, max_tokens=3, ignore_eos=True)
        loop.step()
        add(loop.scheduler, "b", [2] * 30, max_tokens=2)
        assert scheduled(loop.step()) == expected


def test_watermark_gate():
    """C03-17: an admission leaves the fraction free, unless nothing else is scheduled."""
    for watermark, expected in ((0.0, {"a": 1, "b": 12}), (0.3, {"a": 1})):
        loop = Loop(make_scheduler(num_blocks=11, watermark=watermark))
        add(loop.scheduler, "a", [1] * 20, max_tokens=4, ignore_eos=True)
        assert scheduled(loop.step()) == {"a": 20}, "alone it may take all it needs"
        add(loop.scheduler, "b", [2] * 12, max_tokens=4)
        assert scheduled(loop.step()) == expected


def test_reserved_blocks():
    """C03-18: what a running prefill still needs is not given to newcomers."""
    for reserve, expected in ((False, {"a": 10, "b": 6}), (True, {"a": 10})):
        loop = Loop(make_scheduler(num_blocks=13, max_num_batched_tokens=16, reserve_prefill_blocks=reserve,
                                   long_prefill_token_threshold=10))  # fmt: skip
        add(loop.scheduler, "a", [1] * 40, max_tokens=1)
        add(loop.scheduler, "b", [2] * 11, max_tokens=1)
        assert scheduled(loop.step()) == expected


# Step output


def test_new_resumed_and_continuing_are_distinct():
    """C03-15: each kind carries what the worker needs and no more."""
    loop = Loop(make_scheduler(enable_prefix_caching=False))
    add(loop.scheduler, "a", [1, 2, 3], ignore_eos=True, lora_name="l")
    step = loop.step()
    (new,) = step.new
    assert (new.req_id, new.prompt_token_ids, new.block_ids, new.num_computed_tokens) == ("a", [1, 2, 3], ([1],), 0)
    assert new.lora_name == "l" and not step.cached.req_ids
    assert loop.step().cached.new_block_ids == [None]
    step = loop.step()
    assert step.cached.new_block_ids == [([2],)] and step.cached.num_computed_tokens == [4]
    assert not step.new and not step.cached.new_token_ids
    loop.scheduler.reset_prefix_cache(force=True)
    step = loop.step()
    assert step.preempted_req_ids == step.cached.resumed_req_ids == {"a"} and not step.new
    assert step.cached.new_token_ids == {"a": loop.tokens("a")[:3]} and step.cached.num_computed_tokens == [0]
    assert scheduled(step) == {"a": 6} and len(step.cached.new_block_ids[0][0]) == 2


def test_id_reused_after_an_abort():
    """C03-15, TRAP-16: the worker hears of the end before the new request with the same id."""
    loop = Loop(make_scheduler())
    add(loop.scheduler, "a", [1, 2, 3])
    loop.step()
    loop.scheduler.finish_requests("a")
    second = add(loop.scheduler, "a", [4, 5], max_tokens=3)
    step = loop.step()
    assert step.finished_req_ids == {"a"} and step.new[0].prompt_token_ids == [4, 5]
    loop.run()
    assert loop.tokens("a")[1:] == expected_tokens(second.core, 64)


def test_output_in_flight_is_not_given_to_a_namesake():
    """TRAP-16: a step planned for an aborted request settles nothing of the new one with its id."""
    scheduler = make_scheduler()
    add(scheduler, "a", [1, 2, 3])
    step = scheduler.schedule()
    scheduler.finish_requests("a")
    second = add(scheduler, "a", [4, 5])
    assert scheduler.update_from_output(step, RunnerOutput(["a"], [[7]])) == []
    assert second.num_output_tokens == 0


# Preemption


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("caching", [True, False])
def test_tiny_pool(policy, caching):
    """C03-09, TRAP-13: with room for about 2.5 sequences all finish with the tokens of a large pool."""
    results = []
    for num_blocks in (200, 21):
        loop = Loop(make_scheduler(num_blocks=num_blocks, policy=policy, enable_prefix_caching=caching))
        for i in range(8):
            add(loop.scheduler, f"r{i}", [1, 2, i], max_tokens=28, ignore_eos=True, priority=-i, logprobs=1)
        loop.run()
        results.append([(loop.tokens(f"r{i}"), [o.logprobs for o in loop.outputs[f"r{i}"]]) for i in range(8)])
        preemptions = loop.scheduler.stats().num_preemptions
    assert preemptions > 0 and results[0] == results[1]
    assert all(len(tokens) == 28 for tokens, _ in results[1])


def test_fcfs_victim_is_the_last():
    """C03-10: b goes, a gets its block; b keeps its token and comes back."""
    loop = Loop(make_scheduler(num_blocks=5, enable_prefix_caching=False))
    for req_id in "ab":
        add(loop.scheduler, req_id, [1] * 8, max_tokens=8, ignore_eos=True)
    loop.step()
    step = loop.step()
    assert scheduled(step) == {"a": 1} and step.preempted_req_ids == {"b"}
    assert loop.scheduler.requests["b"].status is RequestStatus.PREEMPTED
    loop.run()
    for req_id in "ab":
        assert loop.tokens(req_id) == expected_tokens(make_request(req_id, [1] * 8, ignore_eos=True).core, 64)


def test_self_victim_leaves_the_loop():
    """C03-10: under PRIORITY the head of the list may be the least important: it goes back to waiting itself."""
    loop = Loop(make_scheduler(num_blocks=7, policy="priority", enable_prefix_caching=False))
    add(loop.scheduler, "a", [1] * 7, max_tokens=8, ignore_eos=True, priority=1)
    loop.step()
    add(loop.scheduler, "b", [1] * 16, max_tokens=8, ignore_eos=True, priority=0)
    assert scheduled(loop.step()) == {"a": 1, "b": 16}
    step = loop.step()
    assert scheduled(step) == {} and step.preempted_req_ids == {"a"}
    assert scheduled(loop.step()) == {"b": 1}
    loop.run()
    assert loop.finish_reason("a") == loop.finish_reason("b") == "length"


def test_victim_of_the_same_step_is_refunded():
    """C03-10: tokens, blocks and drafts of a victim that was scheduled already go back; others get its budget."""
    loop = Loop(make_scheduler(num_blocks=6, policy="priority", max_num_batched_tokens=5, enable_prefix_caching=False,
                               num_draft_slots=1, max_num_seqs=2, num_lookahead_tokens=2))  # fmt: skip
    add(loop.scheduler, "a", [1], max_tokens=8, ignore_eos=True, priority=5)
    add(loop.scheduler, "b", [2] * 10, max_tokens=6, ignore_eos=True, priority=0)
    while loop.scheduler.requests["b"].num_computed_tokens < 10:
        loop.step()
    loop.scheduler.set_draft_tokens({"a": [3], "b": [4, 4]})
    a, b = loop.scheduler.requests["a"], loop.scheduler.requests["b"]
    while True:
        step = loop.step()
        if step.preempted_req_ids:
            break
    assert step.preempted_req_ids == {"a"} and list(scheduled(step)) == ["b"], "a was scheduled first, then taken out"
    assert "a" not in step.cached.req_ids and "a" not in step.spec_token_ids
    assert step.total_num_scheduled_tokens == scheduled(step)["b"] and a.num_computed_tokens == 0
    assert b.status is RequestStatus.RUNNING
    loop.scheduler.check_integrity()
    loop.run()
    assert len(loop.tokens("a")) == 8 and len(loop.tokens("b")) == 6


def test_content_of_a_refunded_victim_is_not_known():
    """C03-10, C03-26: a block that would have become full in a step that never ran must not be a cache hit."""
    scheduler = make_scheduler(num_blocks=7, policy="priority")
    a = add(scheduler, "a", [1] * 7, max_tokens=8, ignore_eos=True, priority=5)
    b = add(scheduler, "b", [2] * 12, max_tokens=8, ignore_eos=True, priority=0)
    step = scheduler.schedule()
    scheduler.update_from_output(step, RunnerOutput(["a", "b"], [[3], [3]]))
    assert a.num_tokens == 8 and scheduler.kv.num_free == 1
    scheduler.kv.pool.take(1)  # another holder: now b needs the blocks of a, which fills its second block in this step
    step = scheduler.schedule()
    assert step.preempted_req_ids == {"a"} and scheduled(step) == {"b": 1}
    assert len(a.block_hashes) == 2 and scheduler.kv.longest_hit(a).num_tokens == 4
    assert b.status is RequestStatus.RUNNING


def test_only_victims_that_free_blocks_now():
    """C03-10: with deferred frees a victim whose step is in flight is useless; the loop ends without one."""
    scheduler = make_scheduler(num_blocks=5, defer_block_frees=True, async_scheduling=True, enable_prefix_caching=False)
    for req_id in "ab":
        add(scheduler, req_id, [1] * 8, ignore_eos=True)
    first = scheduler.schedule()
    step = scheduler.schedule()
    assert scheduled(step) == {} and not step.preempted_req_ids and len(scheduler.running) == 2
    scheduler.update_from_output(first, RunnerOutput(["a", "b"], [[3], [3]]))
    step = scheduler.schedule()
    assert scheduled(step) == {"a": 1} and step.preempted_req_ids == {"b"}


def test_deferred_blocks_return_with_their_step():
    """C03-20, C03-27: an abort while the step is in flight frees the blocks when its output is processed."""
    scheduler = make_scheduler(defer_block_frees=True)
    add(scheduler, "a", [1] * 8)
    step, free = scheduler.schedule(), scheduler.kv.pool.num_usable
    scheduler.finish_requests(["a"])
    assert scheduler.kv.num_free == free - 2
    scheduler.update_from_output(step, RunnerOutput(["a"], [[3]]))
    assert scheduler.kv.num_free == free


# Drafts


def test_drafts_beyond_the_budget_are_cut():
    """C03-11: what is scheduled has slots; the rest of the proposal is gone."""
    loop = Loop(make_scheduler(num_lookahead_tokens=4, max_num_batched_tokens=3))
    request = add(loop.scheduler, "a", [1, 2, 3], max_tokens=30, ignore_eos=True)
    loop.step()
    loop.scheduler.set_draft_tokens({"a": [5, 6, 7, 8, 9], "unknown": [1]})
    assert request.spec_token_ids == [5, 6, 7, 8], "no more than there are lookahead slots"
    step = loop.scheduler.schedule()
    assert step.spec_token_ids == {"a": [5, 6]} and scheduled(step) == {"a": 3}
    assert len(loop.scheduler.kv.block_ids(request)[0]) * 4 >= 6 + 4


def test_rejected_drafts_roll_back():
    """C03-27: computed tokens are one short of the known ones again, whatever was accepted."""
    for tokens, computed in (([8], 4), ([5, 8], 5), ([5, 6, 8], 6)):
        scheduler = make_scheduler(num_lookahead_tokens=2)
        request = add(scheduler, "a", [1, 2, 3], ignore_eos=True)
        scheduler.update_from_output(scheduler.schedule(), RunnerOutput(["a"], [[4]]))
        scheduler.set_draft_tokens({"a": [5, 6]})
        scheduler.update_from_output(scheduler.schedule(), RunnerOutput(["a"], [tokens]))
        assert request.num_computed_tokens == computed == request.num_tokens - 1
        assert list(request.output_token_ids) == [4, *tokens]


def test_draft_padding_is_stripped():
    """C03-11: -1 ends a proposal and reaches no one."""
    scheduler = make_scheduler(num_lookahead_tokens=4)
    request = add(scheduler, "a", [1, 2, 3], ignore_eos=True)
    scheduler.update_from_output(scheduler.schedule(), RunnerOutput(["a"], [[4]]))
    scheduler.set_draft_tokens({"a": [5, -1, -1]})
    assert request.spec_token_ids == [5]


# Stale outputs


@pytest.mark.parametrize("force", [False, True])
def test_stale_outputs(force):
    """C03-19: tokens that return after a preemption are delivered, or dropped after a forced one; counters stay."""
    scheduler = make_scheduler(async_scheduling=True)
    request = add(scheduler, "a", [1, 2, 3], ignore_eos=True)
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler._preempt(request, drop_stale_output=force)
    assert request.num_stale_output_tokens == 2 and request.num_output_placeholders == 0
    third = scheduler.schedule()
    assert scheduled(third) == ({"a": 3} if force else {}), "resumes at once only if nothing is to be delivered"
    computed = request.num_computed_tokens
    delivered = []
    for step, token in ((first, 4), (second, 5)):
        delivered += scheduler.update_from_output(step, RunnerOutput(["a"], [[token]]))
        assert request.num_computed_tokens == computed
    assert list(request.output_token_ids) == ([] if force else [4, 5]) and len(delivered) == (0 if force else 2)
    assert request.num_stale_output_tokens == 0 and not request.drop_stale_output
    if force:
        (output,) = scheduler.update_from_output(third, RunnerOutput(["a"], [[4]]))
        assert output.new_token_ids == [4]
    else:
        assert scheduled(scheduler.schedule()) == {"a": 5}, "all of it: token 4 was not known when it was computed"


# Prefix cache


def test_second_request_hits():
    """C12-05: cached prompt tokens are not computed again; output and finish are the same."""
    loop = Loop(make_scheduler())
    for req_id in "ab":
        add(loop.scheduler, req_id, range(1, 14), max_tokens=6, ignore_eos=True)
        loop.run()
    assert loop.steps[0].new[0].num_computed_tokens == 0 and loop.outputs["a"][0].num_cached_tokens == 0
    (second,) = [step for step in loop.steps if step.new and step.new[0].req_id == "b"]
    assert second.new[0].num_computed_tokens == 12 and scheduled(second) == {"b": 1}
    assert all(output.num_cached_tokens == 12 for output in loop.outputs["b"])
    assert loop.tokens("a") == loop.tokens("b")
    stats = loop.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.prompt_tokens, stats.generation_tokens) == (26, 12, 26, 12)


def test_equal_prompts_of_one_step_share():
    """C12-05: the first of several completions computes the prompt, the others of the same step attend to it."""
    loop = Loop(make_scheduler())
    for req_id in "abc":
        add(loop.scheduler, req_id, range(1, 14), max_tokens=2)
    assert scheduled(loop.step()) == {"a": 13, "b": 1, "c": 1}


def test_cached_tokens_are_those_of_the_first_scheduling():
    """C03-25: what a resumed request finds again is no cache hit of the user's."""
    loop = Loop(make_scheduler())
    add(loop.scheduler, "a", range(1, 14), max_tokens=6, ignore_eos=True)
    loop.step()
    loop.scheduler._preempt(loop.scheduler.running[0])
    assert scheduled(loop.step()) == {"a": 2}
    loop.run()
    assert {output.num_cached_tokens for output in loop.outputs["a"]} == {0}
    assert loop.scheduler.stats().prefix_queries == 13


def test_reset_prefix_cache():
    """C03-28: refused while blocks are held; forced, running requests start over and end right."""
    loop = Loop(make_scheduler())
    request = add(loop.scheduler, "a", range(1, 14), max_tokens=6)
    loop.step()
    loop.step()
    assert not loop.scheduler.reset_prefix_cache()
    assert loop.scheduler.reset_prefix_cache(force=True)
    assert len(loop.scheduler.kv.pool.index) == 0
    assert scheduled(loop.step()) == {"a": request.num_tokens - 1}, "all of it again, less the token of this step"
    loop.run()
    assert loop.tokens("a") == expected_tokens(request.core, 64)
    assert loop.scheduler.reset_prefix_cache()


# Ends


def test_eos_and_stop_ids():
    """C03-27: EOS ends with no stop reason, a stop id with itself; ignore_eos leaves only the stop ids."""
    cases = [
        ({}, [3, EOS], "stop", None),
        ({"stop_token_ids": [3]}, [3], "stop", 3),
        ({"ignore_eos": True, "max_tokens": 3}, [3, EOS, 4], "length", None),
        ({"ignore_eos": True, "stop_token_ids": [EOS]}, [3, EOS], "stop", EOS),
        ({"min_tokens": 3, "stop_token_ids": [3]}, [3, EOS, 3], "stop", 3),
        ({"max_tokens": 1}, [3], "length", None),
        ({"max_tokens": None}, [3] * 61, "length", None),
    ]
    for options, tokens, reason, stop_reason in cases:
        scheduler = make_scheduler()
        request = add(scheduler, "a", [1, 2, 3], **options)
        outputs = []
        for token in [*tokens, 9, 9]:
            if scheduler.has_unfinished_requests():
                outputs += scheduler.update_from_output(scheduler.schedule(), RunnerOutput(["a"], [[token]]))
        assert list(request.output_token_ids) == tokens, options
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (reason, stop_reason), options
        assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(tokens) - 1)
        assert scheduler.kv.num_free == scheduler.kv.pool.num_usable


def test_secondary_eos():
    """TRAP-19: each id of the model's list ends the request; none does with ignore_eos or before min_tokens."""
    for options, expected in (({}, [9]), ({"ignore_eos": True}, [9, 9, 9, 9]), ({"min_tokens": 2}, [9, 9])):
        scheduler = make_scheduler()
        request = make_request("a", [1, 2], max_tokens=4, **options)
        request.sampling_params.fill_eos([2, 9])
        scheduler.add_request(request)
        while scheduler.has_unfinished_requests():
            scheduler.update_from_output(scheduler.schedule(), RunnerOutput(["a"], [[9]]))
        assert list(request.output_token_ids) == expected


def test_tokens_after_a_stop_are_cut():
    """C03-27: accepted drafts behind a stop token do not come out, nor do their logprobs."""
    from treadle.runtime.protocol import LogprobRow

    scheduler = make_scheduler(num_lookahead_tokens=3)
    add(scheduler, "a", [1, 2, 3], logprobs=1)
    scheduler.update_from_output(scheduler.schedule(), RunnerOutput(["a"], [[4]]))
    scheduler.set_draft_tokens({"a": [5, EOS, 6]})
    rows = [LogprobRow([token], [-1.0], [1]) for token in (5, EOS, 6, 7)]
    result = RunnerOutput(["a"], [[5, EOS, 6, 7]], logprobs={"a": rows})
    (output,) = scheduler.update_from_output(scheduler.schedule(), result)
    assert output.new_token_ids == [5, EOS] and output.logprobs == rows[:2] and output.finish_reason == "stop"


@pytest.mark.parametrize("status", ["waiting", "skipped", "running", "preempted"])
def test_abort_in_any_status(status):
    """C01-01, TRAP-14: nothing is left behind; the counter grows by one, once."""
    loop = Loop(make_scheduler(promoters={RequestStatus.WAITING_FOR_GRAMMAR: lambda request: False}))
    request = make_request("a", range(9))
    if status == "skipped":
        request.status = RequestStatus.WAITING_FOR_GRAMMAR
    loop.scheduler.add_request(request)
    if status in ("running", "preempted"):
        loop.step()
    if status == "preempted":
        loop.scheduler._preempt(request)
    (output,) = loop.scheduler.finish_requests(["a", "a", "unknown"])
    assert (output.request_id, output.finish_reason, output.new_token_ids) == ("a", "abort", [])
    assert loop.scheduler.finish_requests("a") == []
    loop.run()
    stats = loop.scheduler.stats()
    assert (stats.num_aborted, stats.num_running, stats.num_waiting, stats.kv_usage) == (1, 0, 0, 0.0)
    assert stats.num_free_blocks == stats.num_blocks and not loop.runner.requests
    loop.scheduler.check_integrity()


def test_other_reasons_are_no_aborts():
    """TRAP-14: a front end that ends a request at a stop string says so."""
    scheduler = make_scheduler()
    add(scheduler, "a", [1])
    assert scheduler.finish_requests("a", "stop")[0].finish_reason == "stop"
    assert scheduler.stats().num_aborted == 0


def test_pause():
    """C03-29: running requests go on, nobody is admitted until the scheduler resumes."""
    loop = Loop(make_scheduler())
    add(loop.scheduler, "a", [1, 2], max_tokens=3, ignore_eos=True)
    loop.step()
    loop.scheduler.pause()
    add(loop.scheduler, "b", [1, 2], max_tokens=3, ignore_eos=True)
    loop.run(until=lambda: "a" not in loop.scheduler.requests)
    assert scheduled(loop.step()) == {} and loop.scheduler.has_unfinished_requests()
    loop.scheduler.resume()
    loop.run()
    assert len(loop.tokens("b")) == 3


# Bad input


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "empty prompt"),
        (range(64), {}, "prompt of 64 tokens; the model's limit is 64 .* at most 63"),
        (range(20), {"max_tokens": 30}, "may grow to 50 tokens .20 of prompt., which takes 13 .* there are 10"),
        (range(20), {"max_tokens": None}, "may grow to 64 tokens"),
    ],
)
def test_unservable_requests_are_refused(prompt, options, message):
    """C03-17, TRAP-07, TRAP-08: refused when they come, with the true numbers; the next request works."""
    loop = Loop(make_scheduler(num_blocks=11))
    with pytest.raises(UserError, match=message):
        add(loop.scheduler, "bad", prompt, **options)
    assert not loop.scheduler.has_requests()
    add(loop.scheduler, "good", range(20), max_tokens=21, ignore_eos=True)
    loop.run()
    assert len(loop.tokens("good")) == 21


def test_duplicate_id_is_refused():
    """TRAP-16: the second live request with an id is refused; the first is not touched."""
    loop = Loop(make_scheduler())
    first = add(loop.scheduler, "a", [1, 2])
    with pytest.raises(UserError, match="'a' is in use"):
        add(loop.scheduler, "a", [3])
    loop.run()
    assert loop.tokens("a") == expected_tokens(first.core, 64)


def test_window_request_fits_by_its_window():
    """C03-17: a long request of a window model needs blocks for its window only."""
    specs = [window_spec(6)]
    loop = Loop(make_scheduler(num_blocks=6, specs=specs, max_num_batched_tokens=8), group_layers(dict(enumerate(specs))))
    request = add(loop.scheduler, "a", range(1, 40), max_tokens=20, ignore_eos=True)
    loop.run()
    assert loop.tokens("a") == expected_tokens(request.core, 64)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "lifo"}, "fcfs, priority"),
        ({"prefix_hash": "md5"}, "sha256, xxhash"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"max_num_active_seqs": 9}, r"1\.\.max_num_seqs=8"),
        ({"watermark": 1.0}, "watermark"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 63}, "too small for max_model_len=64"),
        ({"enable_chunked_prefill": False, "long_prefill_token_threshold": 4}, "cuts prompts into chunks"),
        ({"num_draft_slots": 8}, "no room beside 8 draft"),
        ({"num_lookahead_tokens": -1}, "num_lookahead_tokens must be at least 0"),
    ],
)
def test_contradicting_configuration(options, message):
    """C03-03: each error names the fields and what to change."""
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64, **options})


def test_idle_worker_is_told_of_the_last_end():
    """C03-15: after the last finish one more, empty, step carries the finished id."""
    loop = Loop(make_scheduler(specs=[full_spec()]))
    add(loop.scheduler, "a", [1], max_tokens=1)
    loop.step()
    assert not loop.scheduler.has_unfinished_requests() and loop.scheduler.has_requests()
    step = loop.step()
    assert step.finished_req_ids == {"a"} and step.total_num_scheduled_tokens == 0
    assert not loop.scheduler.has_requests() and loop.scheduler.stats().num_steps == 1
