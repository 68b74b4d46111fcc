"""The persistent batch: after any sequence of deltas it equals one built from nothing; inputs by whole-array arithmetic."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.runtime.runner.input_batch import InputBatch
from treadle.runtime.runner.request_state import RequestState
from treadle.runtime.runner.step_inputs import StepInputs, step_shape
from treadle.runtime.runner.update_batch import update_batch
from treadle.runtime.sampling.batch import SamplingBatch
from treadle.runtime.sampling_params import SamplingParams
from treadle.runtime.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput

MAX_SEQS, MAX_LEN, BLOCK = 5, 64, 4


class RecordingListener:
    """Keeps request ids by slot, as the sampler's batch does."""

    def __init__(self):
        self.slots = [None] * (MAX_SEQS + 1)

    def add(self, slot, req_id, params, prompt, output):
        assert self.slots[slot] is None
        self.slots[slot] = req_id

    def remove(self, slot):
        self.slots[slot] = None

    def move(self, source, target):
        assert self.slots[target] is None
        self.slots[target], self.slots[source] = self.slots[source], None


def make_batch(listener=None) -> InputBatch:
    return InputBatch(
        max_num_seqs=MAX_SEQS,
        max_model_len=MAX_LEN,
        block_sizes=[BLOCK, 2 * BLOCK],
        listener=listener or RecordingListener(),
    )


def contents(batch: InputBatch) -> dict:
    found = {}
    for req_id, slot in batch.slot_of.items():
        tables = [table.rows[slot, : table.counts[slot]].tolist() for table in batch.block_tables]
        tokens = batch.token_ids[slot, : batch.num_tokens[slot]].tolist()
        found[req_id] = (tokens, int(batch.num_computed[slot]), int(batch.num_prompt_tokens[slot]), tables)
    return found


def new(req_id: str, prompt: list[int], blocks=((1,), (2,)), computed=0) -> NewRequestData:
    return NewRequestData(req_id, prompt, SamplingParams(), tuple(map(list, blocks)), computed)


def step(scheduled: dict[str, int], **parts) -> SchedulerOutput:
    return SchedulerOutput(
        step=0, num_scheduled_tokens=scheduled, total_num_scheduled_tokens=sum(scheduled.values()), **parts
    )


def apply(output: SchedulerOutput, requests, batch) -> None:
    update_batch(output, requests, batch, lambda ids: None)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_deltas_equal_a_rebuild(seed):
    """C04-10: random adds, removals, preemptions, resumes and same-id resubmissions."""
    rng = random.Random(seed)
    listener = RecordingListener()
    batch, requests, numbers = make_batch(listener), {}, iter(range(10**6))
    live: dict[str, bool] = {}  # id -> seen by the worker and not preempted
    for _ in range(25):
        finished = {i for i in live if rng.random() < 0.2}
        for i in finished:
            del live[i]
        preempted = {i for i in live if rng.random() < 0.15}
        fresh = []
        for i in (set("abcdefgh") - set(live)) if rng.random() < 0.6 else ():
            if len(live) + len(fresh) < 7 and rng.random() < 0.4:
                fresh.append(new(i, [rng.randrange(9) for _ in range(rng.randrange(1, 9))], ([next(numbers)], [next(numbers)])))
        candidates = [i for i in live if i not in preempted]
        room = MAX_SEQS - len(fresh)
        chosen = rng.sample(candidates, rng.randint(0, min(len(candidates), max(room, 0))))
        fresh = fresh[:MAX_SEQS]
        resumed = {i for i in chosen if not live[i] or rng.random() < 0.1}
        cached = CachedRequestData(
            req_ids=chosen,
            num_computed_tokens=[rng.randrange(9) for _ in chosen],
            new_block_ids=[
                ([next(numbers)], [next(numbers)]) if i in resumed or rng.random() < 0.3 else None for i in chosen
            ],
            resumed_req_ids=resumed,
            new_token_ids={i: list(requests[i].output) for i in resumed},
        )
        output = step(
            {**{n.req_id: 1 for n in fresh}, **dict.fromkeys(chosen, 1)},
            new=fresh,
            cached=cached,
            finished_req_ids=finished,
            preempted_req_ids=preempted,
        )
        apply(output, requests, batch)
        for i in preempted:
            live[i] = False
        for i in [*chosen, *(n.req_id for n in fresh)]:
            live[i] = True
        rebuilt = make_batch()
        for i in batch.req_ids:
            rebuilt.add(requests[i])
        assert contents(batch) == contents(rebuilt)
        assert set(batch.slot_of) == set(output.num_scheduled_tokens)
        assert [i for i in listener.slots if i] == batch.req_ids
        batch.check_integrity()
        for i in batch.req_ids:  # one sampled token each
            token = rng.randrange(9)
            requests[i].output.append(token)
            batch.append_sampled(np.array([batch.slot_of[i]]), np.array([token]))


def test_finished_and_new_under_one_id_are_two_requests():
    """C04-10, R-4.12: clear first, then add; nothing of the first one is left."""
    batch, requests = make_batch(), {}
    apply(step({"a": 6}, new=[new("a", [1] * 6, ((1, 2), (3,)))]), requests, batch)
    apply(step({"a": 1}, new=[new("a", [5], ((7,), (8,)))], finished_req_ids={"a"}), requests, batch)
    assert contents(batch) == {"a": ([5], 0, 1, [[7], [8]])}


def test_a_resumed_request_is_replaced_even_if_it_never_left():
    """C04-10, R-4.14: forced preemption makes scheduled and resumed overlap; blocks and outputs are new."""
    batch, requests = make_batch(), {}
    apply(step({"a": 2}, new=[new("a", [1, 2])]), requests, batch)
    resumed = CachedRequestData(["a"], [0], [([9], [8])], {"a"}, {"a": [4]})
    apply(step({"a": 3}, cached=resumed), requests, batch)
    assert contents(batch) == {"a": ([1, 2, 4], 0, 2, [[9], [8]])}
    assert requests["a"].output == [4]


def test_blocks_are_zeroed_after_removals_and_before_additions():
    """R-4.13: the stages run in the binding order."""
    batch, requests, seen = make_batch(), {}, []
    apply(step({"a": 1}, new=[new("a", [1])]), requests, batch)
    update_batch(
        step({"b": 1}, new=[new("b", [2])], finished_req_ids={"a"}, block_ids_to_zero=[3]),
        requests,
        batch,
        lambda ids: seen.append((ids, dict(batch.slot_of))),
    )
    assert seen == [([3], {})]


def test_swap_exchanges_everything():
    """R-4.17: attention backends reorder the batch with swaps; the sampler's slots follow."""
    sampling = SamplingBatch(MAX_SEQS + 1, 50)
    batch = make_batch(sampling)
    states = [RequestState.from_new(new(i, [n] * (n + 1), ((n,), (n, n)))) for n, i in enumerate("abc", start=1)]
    for state in states:
        batch.add(state)
    before = contents(batch)
    batch.swap(0, 2)
    assert batch.req_ids == ["c", "b", "a"] and contents(batch) == before
    batch.check_integrity()


def test_inputs_of_a_mixed_step():
    """C04-14: positions, ids, lengths and slots of two requests; the tail is -1 and padded rows are the null block."""
    batch = make_batch()
    batch.add(RequestState.from_new(new("a", [10, 11, 12, 13, 14], ((5, 6), (7,)), computed=3)))
    batch.add(RequestState.from_new(new("b", [20, 21, 22], ((8,), (9,)))))
    inputs = StepInputs(max_num_tokens=8, max_num_seqs=MAX_SEQS, num_groups=2)
    inputs.input_ids.fill_(99)
    shape = step_shape(batch, {"a": 2, "b": 2})
    inputs.fill(batch, shape, num_padded=6)
    assert inputs.input_ids[:6].tolist() == [13, 14, 20, 21, 0, 0]
    assert inputs.positions[:6].tolist() == [3, 4, 0, 1, 0, 0]
    assert inputs.query_start_loc.tolist() == [0, 2, 4, 4, 4, 4]
    assert inputs.seq_lens.tolist() == [5, 2, 0, 0, 0]
    assert inputs.slot_mappings[0][:6].tolist() == [5 * 4 + 3, 6 * 4, 8 * 4, 8 * 4 + 1, -1, -1]
    assert inputs.slot_mappings[1][:6].tolist() == [7 * 8 + 3, 7 * 8 + 4, 9 * 8, 9 * 8 + 1, -1, -1]
    assert shape.sampling_slots.tolist() == [0] and shape.logit_rows.tolist() == [1]  # b's prompt is unfinished
    common = inputs.metadata(batch, shape, num_padded=6, num_reqs=4)[0]
    assert common.block_table.tolist() == [[5, 6], [8, 0], [0, 0], [0, 0]]
    assert (common.max_query_len, common.max_seq_len, common.num_actual_tokens) == (2, 5, 4)


def test_a_shrinking_batch_leaves_no_stale_lengths():
    """C04-14: what the last step wrote beyond this one is cleared."""
    batch, inputs = make_batch(), StepInputs(max_num_tokens=8, max_num_seqs=MAX_SEQS, num_groups=2)
    for i in "abc":
        batch.add(RequestState.from_new(new(i, [1, 2])))
    inputs.fill(batch, step_shape(batch, dict.fromkeys("abc", 2)), 6)
    for i in "bc":
        batch.remove(i)
    batch.condense()
    inputs.fill(batch, step_shape(batch, {"a": 2}), 4)
    assert inputs.seq_lens.tolist() == [2, 0, 0, 0, 0]
    assert inputs.query_start_loc.tolist() == [0, 2, 2, 2, 2, 2]
    assert inputs.slot_mappings[0][2:4].tolist() == [-1, -1]


def test_more_requests_than_slots_is_our_bug():
    batch = make_batch()
    for i in "abcde":
        batch.add(RequestState.from_new(new(i, [1])))
    with pytest.raises(AssertionError, match="more requests"):
        batch.add(RequestState.from_new(new("f", [1])))
