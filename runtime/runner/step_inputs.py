"""The tensors of one step, made from the persistent batch with whole-array arithmetic and no loop over tokens.

Buffers are allocated once at their largest size and never move: a captured graph holds their addresses. What a step
does not use is cleared: padding tokens are token 0 at position 0 with slot -1, so nothing of them reaches the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from treadle.kernels.attention.interface import CommonMetadata
from treadle.runtime.dispatch import BatchDescriptor
from treadle.runtime.runner.input_batch import InputBatch

NO_SLOT = -1


@dataclass(frozen=True, slots=True)
class StepShape:
    """One step in numbers: tokens of each slot, where they end, and who samples.

    `sampling_slots` are the slots whose known tokens are all computed after this step; `logit_rows` the row of the
    last token of each of them.
    """

    counts: np.ndarray
    ends: np.ndarray
    seq_lens: np.ndarray
    sampling_slots: np.ndarray
    logit_rows: np.ndarray

    @property
    def num_reqs(self) -> int:
        return len(self.counts)

    @property
    def num_tokens(self) -> int:
        return int(self.ends[-1])

    def descriptor(self) -> BatchDescriptor:
        """The key of this step for the dispatcher."""
        uniform = bool((self.counts == self.counts[0]).all())
        return BatchDescriptor(num_tokens=self.num_tokens, num_reqs=self.num_reqs, uniform=uniform)


def step_shape(batch: InputBatch, num_scheduled: Mapping[str, int]) -> StepShape:
    """The shape of a step that computes `num_scheduled[id]` tokens of every request of the batch."""
    num_reqs = batch.num_reqs
    counts = np.fromiter(map(num_scheduled.__getitem__, batch.req_ids), dtype=np.int64, count=num_reqs)
    ends = counts.cumsum()
    seq_lens = batch.num_computed[:num_reqs] + counts
    sampling = (seq_lens >= batch.num_tokens[:num_reqs]).nonzero()[0]
    return StepShape(counts, ends, seq_lens, sampling, ends[sampling] - 1)


class StepInputs:
    """Owns the input buffers. Each is a torch tensor with a numpy view over the same memory."""

    def __init__(self, *, max_num_tokens: int, max_num_seqs: int, num_groups: int):
        self.input_ids = torch.zeros(max_num_tokens, dtype=torch.int64)
        self.positions = torch.zeros(max_num_tokens, dtype=torch.int64)
        self.query_start_loc = torch.zeros(max_num_seqs + 1, dtype=torch.int32)
        self.seq_lens = torch.zeros(max_num_seqs, dtype=torch.int32)
        self.slot_mappings = [torch.full((max_num_tokens,), NO_SLOT) for _ in range(num_groups)]
        self._input_ids, self._positions = self.input_ids.numpy(), self.positions.numpy()
        self._query_start_loc, self._seq_lens = self.query_start_loc.numpy(), self.seq_lens.numpy()
        self._slots = [mapping.numpy() for mapping in self.slot_mappings]
        self._arange = np.arange(max(max_num_tokens, max_num_seqs), dtype=np.int64)

    def fill(self, batch: InputBatch, shape: StepShape, num_padded: int) -> None:
        """Writes a step's tokens, positions, lengths and cache slots, and clears up to `num_padded` tokens."""
        total, num_reqs = shape.num_tokens, shape.num_reqs
        slots = self._arange[:num_reqs].repeat(shape.counts)
        # position = index in the step - first index of the request + tokens it has computed before
        shift = batch.num_computed[:num_reqs] - (shape.ends - shape.counts)
        positions = self._arange[:total] + shift[slots]
        self._positions[:total] = positions
        self._input_ids[:total] = batch.token_ids[slots, positions]
        self._query_start_loc[1 : num_reqs + 1] = shape.ends
        self._seq_lens[:num_reqs] = shape.seq_lens
        for mapping, table in zip(self._slots, batch.block_tables, strict=True):
            mapping[:total] = table.slot_mapping(slots, positions)
            mapping[total:num_padded] = NO_SLOT
        self._clear_tail(total, num_reqs, num_padded)

    def _clear_tail(self, total: int, num_reqs: int, num_padded: int) -> None:
        self._positions[total:num_padded] = 0
        self._input_ids[total:num_padded] = 0
        self._query_start_loc[num_reqs + 1 :] = total
        self._seq_lens[num_reqs:] = 0

    def metadata(self, batch: InputBatch, shape: StepShape, num_padded: int, num_reqs: int) -> Sequence[CommonMetadata]:
        """The batch as attention sees it, one for each KV-cache group; rows beyond the batch are empty requests."""
        longest = int(shape.seq_lens.max())
        longest_query = int(shape.counts.max())
        return [
            CommonMetadata(
                query_start_loc=self.query_start_loc[: num_reqs + 1],
                seq_lens=self.seq_lens[:num_reqs],
                num_actual_tokens=shape.num_tokens,
                max_query_len=longest_query,
                max_seq_len=longest,
                block_table=torch.from_numpy(table.rows[:num_reqs, : -(-longest // table.block_size)]),
                slot_mapping=mapping[:num_padded],
            )
            for table, mapping in zip(batch.block_tables, self.slot_mappings, strict=True)
        ]
