"""Applies a scheduled step to the worker's state. The order of the stages is binding; each says what breaks without it."""

from __future__ import annotations

from collections.abc import Callable

from treadle.runtime.runner.input_batch import InputBatch
from treadle.runtime.runner.request_state import RequestState
from treadle.runtime.scheduler.output import CachedRequestData, SchedulerOutput


def update_batch(
    step: SchedulerOutput,
    requests: dict[str, RequestState],
    batch: InputBatch,
    zero_blocks: Callable[[list[int]], None],
) -> None:
    """Brings `requests` and `batch` to where `step` starts; afterwards the batch is exactly the scheduled requests."""
    _forget_finished(step, requests, batch)  # first: a finished id may come back in this step as a new request
    if step.block_ids_to_zero:
        zero_blocks(step.block_ids_to_zero)
    _drop_unscheduled(step, batch)
    _add_new(step, requests, batch)
    _advance_known(step.cached, requests, batch)
    batch.condense()


def _forget_finished(step: SchedulerOutput, requests: dict[str, RequestState], batch: InputBatch) -> None:
    for req_id in step.finished_req_ids:
        requests.pop(req_id, None)
        batch.remove(req_id)


def _drop_unscheduled(step: SchedulerOutput, batch: InputBatch) -> None:
    """Resumed requests leave too, even if they still stand in the batch: a forced preemption replaced their blocks."""
    resumed = step.cached.resumed_req_ids
    scheduled = step.num_scheduled_tokens
    for req_id in [i for i in batch.slot_of if i not in scheduled or i in resumed]:
        batch.remove(req_id)


def _add_new(step: SchedulerOutput, requests: dict[str, RequestState], batch: InputBatch) -> None:
    for new in step.new:
        assert new.req_id not in requests, f"{new.req_id} is live already"
        requests[new.req_id] = RequestState.from_new(new)
        batch.add(requests[new.req_id])


def _advance_known(cached: CachedRequestData, requests: dict[str, RequestState], batch: InputBatch) -> None:
    for req_id, computed, blocks in zip(
        cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
    ):
        state = requests[req_id]
        state.num_computed_tokens = computed
        if req_id in cached.resumed_req_ids:
            assert blocks is not None, f"{req_id} resumes without blocks"
            state.resume(blocks, cached.new_token_ids.get(req_id, ()))
        elif blocks is not None:
            state.append_blocks(blocks)
        slot = batch.slot_of.get(req_id)
        if slot is None:
            batch.add(state)
            continue
        batch.num_computed[slot] = computed
        if blocks is not None:
            for table, ids in zip(batch.block_tables, blocks, strict=True):
                table.append(slot, ids)
