"""Random lives of many requests over tiny pools, with a runner that remembers every slot (see `fake_runner`)."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import ceil

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.runtime.fake_runner import (
    VOCAB,
    Loop,
    expected_tokens,
    full_spec,
    make_request,
    next_token,
    window_spec,
)
from treadle.runtime.kv_specs import group_layers
from treadle.runtime.scheduler.config import SchedulerConfig
from treadle.runtime.scheduler.output import SchedulerOutput
from treadle.runtime.scheduler.scheduler import Scheduler

MAX_MODEL_LEN = 40
STEMS = [[1] * 30, [2, 3] * 15, [1] * 8 + [4] * 22]
SPECS = {
    "full": [full_spec(4)],
    "window": [window_spec(6, 4)],
    "hybrid": [full_spec(4), window_spec(5, 4), window_spec(9, 4)],
    "sizes": [full_spec(4), window_spec(7, 2)],
}


@dataclass
class Life:
    """One request: when it comes, and when it is aborted, if ever."""

    request: dict
    arrival: int
    abort: int | None


@st.composite
def lives(draw) -> list[Life]:
    result = []
    for i in range(draw(st.integers(1, 9))):
        stem = draw(st.sampled_from(STEMS))
        prompt = stem[: draw(st.integers(1, 30))] + draw(st.lists(st.integers(1, VOCAB - 1), max_size=2))
        options = {
            "req_id": f"r{i}",
            "prompt": prompt,
            "max_tokens": draw(st.none() | st.integers(1, 12)),
            "priority": draw(st.integers(0, 2)),
            "ignore_eos": draw(st.booleans()),
            "stop_token_ids": draw(st.sampled_from([None, [5], [7, 9]])),
            "cache_salt": draw(st.sampled_from([None, None, None, "salt"])),
            "lora_name": draw(st.sampled_from([None, None, None, "salt"])),
            "skip_prefix_cache_read": draw(st.sampled_from([False, False, True])),
            "logprobs": draw(st.sampled_from([None, 1])),
            "prompt_logprobs": draw(st.sampled_from([None, None, 1])),
        }
        abort = draw(st.none() | st.none() | st.integers(0, 25))
        result.append(Life(options, draw(st.integers(0, 12)), abort))
    return result


@st.composite
def set_ups(draw) -> tuple[dict, str, int]:
    """Scheduler options, kind of specs, and how many blocks beyond the least there are."""
    budget = draw(st.integers(1, 40))
    chunked = draw(st.sampled_from([True, True, True, False]))
    options = {
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_num_batched_tokens": budget if chunked else MAX_MODEL_LEN + budget,
        "enable_chunked_prefill": chunked,
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 3, 7])) if chunked else 0,
        "adaptive_prefill_threshold": chunked and draw(st.booleans()),
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "watermark": draw(st.sampled_from([0.0, 0.01, 0.2])),
        "full_sequence_must_fit": draw(st.booleans()),
        "reserve_prefill_blocks": draw(st.booleans()),
        "enable_prefix_caching": draw(st.sampled_from([True, True, True, False])),
        "defer_block_frees": draw(st.booleans()),
    }
    return options, draw(st.sampled_from(list(SPECS))), draw(st.integers(0, 30))


def start(options: dict, kind: str, extra_blocks: int, depth: int = 1) -> Loop:
    groups = group_layers(dict(enumerate(SPECS[kind])))
    config = SchedulerConfig(max_model_len=MAX_MODEL_LEN, **options)
    least = Scheduler(config, groups, 500).kv.peak_blocks(MAX_MODEL_LEN) + 1
    return Loop(Scheduler(config, groups, least + extra_blocks), groups, depth)


def check_step(loop: Loop, step: SchedulerOutput, disturbed: bool) -> None:
    config = loop.scheduler.config
    assert step.total_num_scheduled_tokens <= config.max_num_scheduled_tokens
    draft_room = config.num_draft_slots * len(step.num_scheduled_tokens)
    assert step.total_num_scheduled_tokens + draft_room <= config.max_num_batched_tokens
    assert len(loop.scheduler.running) <= config.max_active
    admitted = {new.req_id for new in step.new} | step.cached.resumed_req_ids
    assert disturbed or not (admitted and step.preempted_req_ids), "admission beside preemption"
    if admitted and len(admitted) < len(step.num_scheduled_tokens):
        assert loop.scheduler.kv.num_free >= ceil(config.watermark * loop.scheduler.kv.pool.num_usable)
    loop.scheduler.check_integrity()


def live(loop: Loop, plan: list[Life], dice: random.Random, disturb: bool) -> None:
    """Runs all lives to their end. `disturb` adds drafts, forced resets and pauses."""
    scheduler = loop.scheduler
    for now in range(3000):
        for one in plan:
            if one.arrival == now:
                scheduler.add_request(make_request(**one.request))
            if one.abort == now:
                scheduler.finish_requests(one.request["req_id"])
        if disturb and dice.random() < 0.05:
            scheduler.reset_prefix_cache(force=True)
        if disturb and dice.random() < 0.1:
            scheduler.pause() if dice.random() < 0.3 else scheduler.resume()
        if disturb and scheduler.config.num_lookahead_tokens:
            scheduler.set_draft_tokens({r.request_id: drafts_for(r, dice) for r in scheduler.running})
        check_step(loop, loop.step(), disturb)
        if now > 30:
            scheduler.resume()
            if not (scheduler.has_requests() or loop.pending):
                return
    raise AssertionError(f"endless: {list(scheduler.requests.values())}")


def drafts_for(request, dice: random.Random) -> list[int]:
    """Right guesses up to some point, wrong ones or padding after it."""
    tokens, drafts = list(request.all_token_ids), []
    for _ in range(dice.randrange(4)):
        right = next_token([*tokens, *drafts], request.lora_name)
        drafts.append(dice.choice([right, right, right, (right + 1) % VOCAB, -1]))
    return drafts


def check_end(loop: Loop, plan: list[Life]) -> None:
    """Every request gave what it must, and nothing is left behind."""
    for one in plan:
        request = make_request(**one.request)
        expected = expected_tokens(request.core, MAX_MODEL_LEN)
        got, outputs = loop.tokens(request.request_id), loop.outputs.get(request.request_id, [])
        if one.abort is None:
            assert got == expected, request.request_id
            stopped = len(expected) < request.max_total_tokens(MAX_MODEL_LEN) - request.num_prompt_tokens
            assert not stopped or outputs[-1].finish_reason == "stop"
            assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
        assert got == expected[: len(got)]
        check_logprobs(request, got, outputs)
    stats, scheduler = loop.scheduler.stats(), loop.scheduler
    assert stats.num_free_blocks == stats.num_blocks and stats.kv_usage == 0
    assert stats.num_running == stats.num_waiting == 0 and not scheduler.requests
    assert stats.generation_tokens == sum(len(loop.tokens(one.request["req_id"])) for one in plan)
    assert not loop.runner.requests, "the worker was not told of every end"
    assert all(not manager.tables and not manager._num_known for manager in scheduler.kv.managers)
    assert not scheduler._in_flight


def check_logprobs(request, got: list[int], outputs: list) -> None:
    rows = [row for output in outputs for row in output.logprobs or []]
    wanted = request.sampling_params.logprobs is not None
    assert [row.token_ids[0] for row in rows] == (got if wanted else [])
    assert [-row.logprobs[0] for row in rows] == [request.num_prompt_tokens + i for i in range(len(rows))]
    chunks = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    if got and request.sampling_params.prompt_logprobs is not None:
        (prompt_rows,) = chunks
        assert outputs[0].prompt_logprobs is prompt_rows and prompt_rows[0] is None
        assert [row.token_ids[0] for row in prompt_rows[1:]] == list(request.prompt_token_ids)[1:]
    else:
        assert not chunks


PROFILE = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@PROFILE
@given(set_ups(), lives())
def test_every_request_ends_right(set_up, plan):
    """C03-09, C03-16, C12-05, TRAP-13, TRAP-14: tokens, logprobs, budgets and blocks are right in any mixture."""
    loop = start(*set_up)
    live(loop, plan, random.Random(0), disturb=False)
    check_end(loop, plan)
    if all(one.abort is None for one in plan):
        assert loop.scheduler.stats().num_aborted == 0


@PROFILE
@given(set_ups(), lives(), st.integers(0, 2**16))
def test_disturbed(set_up, plan, seed):
    """C03-11, C03-27, C03-28, C03-29: drafts right and wrong, forced cache resets and pauses change no token."""
    options, kind, extra = set_up
    options = {**options, "num_lookahead_tokens": 3}
    if not options["enable_chunked_prefill"]:
        options["num_draft_slots"] = 0
    loop = start(options, kind, extra)
    live(loop, plan, random.Random(seed), disturb=True)
    check_end(loop, plan)


@PROFILE
@given(set_ups(), lives(), st.booleans(), st.integers(2, 3), st.integers(0, 2**16))
def test_asynchronous(set_up, plan, disturb, depth, seed):
    """C01-03, C03-19, C03-20: with steps in flight the same tokens come, and all counters return to 0."""
    options, kind, extra = set_up
    loop = start({**options, "async_scheduling": True}, kind, extra, depth)
    seen = []
    add = loop.scheduler.add_request
    loop.scheduler.add_request = lambda request: (seen.append(request), add(request))  # type: ignore[method-assign]
    live(loop, plan, random.Random(seed), disturb=disturb)
    check_end(loop, plan)
    for request in seen:
        if request.finish_reason == "length":
            assert request.num_output_placeholders == request.num_in_flight_tokens == 0
            assert request.num_stale_output_tokens == 0 and not request.drop_stale_output
