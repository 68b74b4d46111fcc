"""Token masks, logit bias and min-p: which request uses them, and what they do to the logits of a step.

All work on single cells or on the rows concerned; a request that uses none of them costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from treadle.runtime.sampling.metadata import Stage
from treadle.runtime.sampling.slots import Cells, Rows, SlotEntries, SlotRequest
from treadle.runtime.sampling.topk_topp import mask_below


@dataclass(frozen=True, slots=True)
class KeepOnly:
    """Sets every logit of the rows named in `cells` to -inf except those cells."""

    cells: Cells

    def apply(self, logits: Tensor) -> Tensor:
        kept = logits[self.cells.rows, self.cells.cols]
        logits[self.cells.rows.unique()] = -torch.inf
        logits[self.cells.rows, self.cells.cols] = kept
        return logits


@dataclass(frozen=True, slots=True)
class Forbid:
    """Sets single cells to -inf."""

    cells: Cells

    def apply(self, logits: Tensor) -> Tensor:
        logits[self.cells.rows, self.cells.cols] = -torch.inf
        return logits


@dataclass(frozen=True, slots=True)
class AddBias:
    """Adds a value to single cells."""

    cells: Cells
    values: Tensor

    def apply(self, logits: Tensor) -> Tensor:
        logits[self.cells.rows, self.cells.cols] += self.values
        return logits


@dataclass(frozen=True, slots=True)
class KeepAboveMinP:
    """Drops tokens less likely than min-p times the most likely one, in log space; off where log min-p is -inf."""

    log_min_p_S: Tensor

    def apply(self, logits: Tensor) -> Tensor:
        return mask_below(logits, logits.amax(-1) + self.log_min_p_S)


class AllowedTokens(SlotEntries[np.ndarray]):
    """`allowed_token_ids`."""

    argmax_invariant: ClassVar[bool] = False

    def add(self, slot: int, request: SlotRequest) -> None:
        if request.params.allowed_token_ids is not None:
            self.entries[slot] = np.array(request.params.allowed_token_ids, dtype=np.int64)

    def stage(self, rows: Rows) -> Stage | None:
        parts = list(self.in_rows(rows))
        return KeepOnly(Cells.gather(rows, parts)) if parts else None


@dataclass(frozen=True, slots=True)
class _Bans:
    request: SlotRequest
    words: list[list[int]]
    stop_ids: frozenset[int]
    allowed: frozenset[int] | None

    def now(self) -> set[int]:
        """Ids that must not come next. What `allowed_token_ids` leaves is never emptied: it outranks bans."""
        output = self.request.output_token_ids
        banned = set(self.stop_ids) if len(output) < self.request.params.min_tokens else set()
        for *prefix, last in self.words:
            if not prefix or list(output[-len(prefix) :]) == prefix:
                banned.add(last)
        if self.allowed is not None and self.allowed <= banned:
            return set()
        return banned


class BannedTokens(SlotEntries[_Bans]):
    """Bad words, and stop ids until `min_tokens` are there. Both write -inf, so their mutual order is no matter."""

    argmax_invariant: ClassVar[bool] = False

    def add(self, slot: int, request: SlotRequest) -> None:
        params = request.params
        stop_ids = frozenset(params.all_stop_token_ids if params.min_tokens else ())
        if params.bad_words_token_ids or stop_ids:
            allowed = params.allowed_token_ids
            self.entries[slot] = _Bans(
                request,
                params.bad_words_token_ids,
                stop_ids,
                frozenset(allowed) if allowed is not None else None,
            )

    def stage(self, rows: Rows) -> Stage | None:
        banned = [(row, bans.now()) for row, bans in self.in_rows(rows)]
        parts = [(row, np.array(sorted(ids), dtype=np.int64)) for row, ids in banned if ids]
        return Forbid(Cells.gather(rows, parts)) if parts else None


class LogitBias(SlotEntries[tuple[np.ndarray, np.ndarray]]):
    """`logit_bias`."""

    argmax_invariant: ClassVar[bool] = False

    def add(self, slot: int, request: SlotRequest) -> None:
        if bias := request.params.logit_bias:
            self.entries[slot] = (
                np.array(list(bias), dtype=np.int64),
                np.array(list(bias.values()), dtype=np.float32),
            )

    def stage(self, rows: Rows) -> Stage | None:
        found = list(self.in_rows(rows))
        if not found:
            return None
        cells = Cells.gather(rows, [(row, cols) for row, (cols, _) in found])
        return AddBias(cells, rows.tensor(np.concatenate([values for _, (_, values) in found])))


class MinP(SlotEntries[float]):
    """`min_p`."""

    argmax_invariant: ClassVar[bool] = True

    def add(self, slot: int, request: SlotRequest) -> None:
        if request.params.min_p > 0:
            self.entries[slot] = float(np.log(request.params.min_p))

    def stage(self, rows: Rows) -> Stage | None:
        log_min_p = np.full(len(rows), -np.inf, dtype=np.float32)
        for row, value in self.in_rows(rows):
            log_min_p[row] = value
        return KeepAboveMinP(rows.tensor(log_min_p)) if np.isfinite(log_min_p).any() else None
