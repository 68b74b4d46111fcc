"""The persistent batch: dense arrays indexed by slot, changed by deltas from step to step and never rebuilt.

    slot            0     1     2     3                 slots 0 .. num_reqs-1 are taken, without holes between steps
    req_ids        [a,    b,    c,    d]
    token_ids      [[prompt and output tokens ..., free], ...]     numpy, R requests x L tokens
    block_tables   one [R, B] array for each KV-cache group; a free row is all null blocks (0)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from treadle.runtime.runner.request_state import RequestState
from treadle.runtime.sampling_params import SamplingParams

NULL_BLOCK = 0


class SlotListener(Protocol):
    """Who keeps more arrays by slot, such as the sampler's batch; told about every change of a slot.

    Has one slot more than the batch, through which two others are swapped.
    """

    def add(
        self,
        slot: int,
        req_id: str,
        params: SamplingParams,
        prompt_token_ids: Any,
        output_token_ids: Sequence[int],
    ) -> None: ...

    def remove(self, slot: int) -> None: ...

    def move(self, source: int, target: int) -> None: ...


class BlockTable:
    """Block ids of one KV-cache group by slot, i32 [R, B]; columns beyond a request's blocks are the null block."""

    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int):
        self.block_size = block_size
        self.rows = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self.counts = np.zeros(max_num_seqs, dtype=np.int32)

    def append(self, slot: int, block_ids: Sequence[int]) -> None:
        """Appends blocks to the row of `slot`."""
        if block_ids:
            count = int(self.counts[slot])
            self.rows[slot, count : count + len(block_ids)] = block_ids
            self.counts[slot] = count + len(block_ids)

    def clear(self, slot: int) -> None:
        """Gives every entry of the row back to the null block."""
        self.rows[slot, : self.counts[slot]] = NULL_BLOCK
        self.counts[slot] = 0

    def move(self, source: int, target: int) -> None:
        """Moves a row into a cleared one."""
        count = int(self.counts[source])
        self.rows[target, :count] = self.rows[source, :count]
        self.counts[target] = count
        self.clear(source)

    def swap(self, first: int, second: int) -> None:
        """Exchanges two rows."""
        pair, reverse = [first, second], [second, first]
        self.rows[pair] = self.rows[reverse]
        self.counts[pair] = self.counts[reverse]

    def slot_mapping(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """i64 [T]: where in the cache each token of (slot, position) goes, `block * block_size + offset`."""
        columns = positions // self.block_size
        return self.rows[slots, columns].astype(np.int64) * self.block_size + (positions - columns * self.block_size)


class InputBatch:
    """The requests that run in this step, one slot each, with their tokens and block tables."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_sizes: Sequence[int], listener: SlotListener):
        self.max_num_seqs = max_num_seqs
        self.req_ids: list[str] = []
        self.slot_of: dict[str, int] = {}
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        self.block_tables = [BlockTable(max_num_seqs, -(-max_model_len // size) + 1, size) for size in block_sizes]
        self._listener = listener
        self._holes: list[int] = []

    @property
    def num_reqs(self) -> int:
        """Requests in the batch."""
        return len(self.slot_of)

    def __contains__(self, req_id: str) -> bool:
        return req_id in self.slot_of

    def add(self, state: RequestState) -> int:
        """Puts a request into a hole, or behind the last slot. Returns its slot."""
        assert state.req_id not in self.slot_of, f"{state.req_id} is in the batch already"
        slot = self._holes.pop() if self._holes else len(self.req_ids)
        assert slot < self.max_num_seqs, "the scheduler put more requests into a step than there are slots"
        if slot == len(self.req_ids):
            self.req_ids.append(state.req_id)
        self.req_ids[slot] = state.req_id
        self.slot_of[state.req_id] = slot
        self._write_tokens(slot, state)
        for table, ids in zip(self.block_tables, state.block_ids, strict=True):
            table.append(slot, ids)
        self._listener.add(slot, state.req_id, state.sampling_params, state.prompt, state.output)
        return slot

    def _write_tokens(self, slot: int, state: RequestState) -> None:
        prompt_end, end = len(state.prompt), state.num_tokens
        self.token_ids[slot, :prompt_end] = state.prompt
        if end > prompt_end:
            self.token_ids[slot, prompt_end:end] = state.output
        self.num_prompt_tokens[slot] = prompt_end
        self.num_tokens[slot] = end
        self.num_computed[slot] = state.num_computed_tokens

    def remove(self, req_id: str) -> None:
        """Takes a request out, if it is in, and leaves a hole for `add` or `condense`."""
        slot = self.slot_of.pop(req_id, None)
        if slot is None:
            return
        for table in self.block_tables:
            table.clear(slot)
        self._listener.remove(slot)
        self._holes.append(slot)

    def condense(self) -> None:
        """Fills the remaining holes with the requests behind them, so that the taken slots are 0 .. num_reqs-1."""
        holes = sorted(self._holes, reverse=True)
        while holes:
            last = len(self.req_ids) - 1
            if holes[0] == last:
                holes.pop(0)
            else:
                self._move(last, holes.pop())
            self.req_ids.pop()
        self._holes = []

    def _move(self, source: int, target: int) -> None:
        end = self.num_tokens[source]
        self.token_ids[target, :end] = self.token_ids[source, :end]
        for array in (self.num_tokens, self.num_prompt_tokens, self.num_computed):
            array[target] = array[source]
        for table in self.block_tables:
            table.move(source, target)
        self._listener.move(source, target)
        self.req_ids[target] = self.req_ids[source]
        self.slot_of[self.req_ids[target]] = target

    def swap(self, first: int, second: int) -> None:
        """Exchanges two slots; attention backends reorder the batch with it."""
        pair, reverse = [first, second], [second, first]
        for array in (self.token_ids, self.num_tokens, self.num_prompt_tokens, self.num_computed):
            array[pair] = array[reverse]
        for table in self.block_tables:
            table.swap(first, second)
        spare = self.max_num_seqs
        self._listener.move(first, spare)
        self._listener.move(second, first)
        self._listener.move(spare, second)
        self.req_ids[first], self.req_ids[second] = self.req_ids[second], self.req_ids[first]
        self.slot_of[self.req_ids[first]], self.slot_of[self.req_ids[second]] = first, second

    def append_sampled(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Appends one sampled token to each of the slots."""
        self.token_ids[slots, self.num_tokens[slots]] = tokens
        self.num_tokens[slots] += 1

    def check_integrity(self) -> None:
        """Asserts that slots, ids and free rows agree; for tests and idle engines."""
        assert not self._holes and len(self.req_ids) == len(self.slot_of)
        assert all(self.slot_of[req_id] == slot for slot, req_id in enumerate(self.req_ids))
        for table in self.block_tables:
            assert not table.counts[self.num_reqs :].any() and not table.rows[self.num_reqs :].any()
