"""Repetition, frequency and presence penalties over the tokens a request has seen, not over the vocabulary.

Repetition counts prompt and output, as in CTRL (Keskar et al. 2019); the other two count output only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from treadle.runtime.sampling.metadata import Stage
from treadle.runtime.sampling.slots import Cells, Rows, SlotEntries, SlotRequest


@dataclass(frozen=True, slots=True)
class Penalize:
    """Penalties of the seen tokens; every tensor has one entry a cell, `counts` is of the output."""

    cells: Cells
    counts: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor

    def apply(self, logits: Tensor) -> Tensor:
        seen = logits[self.cells.rows, self.cells.cols]
        seen = torch.where(seen > 0, seen / self.repetition, seen * self.repetition)
        seen -= self.frequency * self.counts + self.presence * (self.counts > 0)
        logits[self.cells.rows, self.cells.cols] = seen
        return logits


class TokenHistory:
    """The distinct tokens of one request and how often each was generated; follows the live output list."""

    def __init__(self, request: SlotRequest):
        self._request = request
        prompt = np.unique(np.asarray(request.prompt_token_ids, dtype=np.int64))
        self._ids = prompt[(prompt >= 0) & (prompt < request.vocab_size)]
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._size = len(self._ids)
        self._place = {int(token): place for place, token in enumerate(self._ids)}
        self._num_counted = 0

    def catch_up(self) -> tuple[np.ndarray, np.ndarray]:
        """Counts what was generated since the last call; returns the ids (int64) and their output counts (f32)."""
        output = self._request.output_token_ids
        assert self._num_counted <= len(output), "tokens were taken back from a request with penalties"
        for token in output[self._num_counted :]:
            place = self._place.get(token)
            if place is None:
                place = self._append(token)
            self._counts[place] += 1
        self._num_counted = len(output)
        return self._ids[: self._size], self._counts[: self._size]

    def _append(self, token: int) -> int:
        if self._size == len(self._ids):
            room = max(64, self._size)
            self._ids = np.concatenate([self._ids, np.zeros(room, dtype=np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.float32)])
        place = self._place[token] = self._size
        self._ids[place] = token
        self._size += 1
        return place


class Penalties(SlotEntries[tuple[SlotRequest, TokenHistory]]):
    """Requests with any penalty."""

    argmax_invariant: ClassVar[bool] = False

    def add(self, slot: int, request: SlotRequest) -> None:
        params = request.params
        if params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty:
            self.entries[slot] = (request, TokenHistory(request))

    def stage(self, rows: Rows) -> Stage | None:
        parts, counts, strengths = [], [], []
        for row, (request, history) in self.in_rows(rows):
            ids, output_counts = history.catch_up()
            params = request.params
            parts.append((row, ids))
            counts.append(output_counts)
            strengths.append((params.repetition_penalty, params.frequency_penalty, params.presence_penalty))
        if not parts:
            return None
        lengths = [len(ids) for _, ids in parts]
        table = np.repeat(np.array(strengths, dtype=np.float32), lengths, axis=0)
        repetition, frequency, presence = (rows.tensor(table[:, column]) for column in range(3))
        return Penalize(
            Cells.gather(rows, parts), rows.tensor(np.concatenate(counts)), repetition, frequency, presence
        )
