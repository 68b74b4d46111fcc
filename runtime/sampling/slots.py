"""State of a request that lives in a batch slot, and the view of slots as the rows of one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from treadle.runtime.sampling.metadata import Stage
from treadle.runtime.sampling_params import SamplingParams

E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class SlotRequest:
    """What a processor may know of a request. `output_token_ids` is the live list: it grows as tokens come."""

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    vocab_size: int


class Rows:
    """The slots of one step in row order: row r of the logits belongs to slot `slots[r]`."""

    def __init__(self, slots: np.ndarray, capacity: int, device: torch.device):
        self.slots = slots
        self.device = device
        self._row_of = np.full(capacity, -1, dtype=np.int64)
        self._row_of[slots] = np.arange(len(slots))

    def __len__(self) -> int:
        return len(self.slots)

    def row_of(self, slot: int) -> int:
        """The row of a slot, or -1 if it has none in this step."""
        return int(self._row_of[slot])

    def tensor(self, values: np.ndarray) -> Tensor:
        """A copy of `values` on the batch's device."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device, copy=True)


class SlotProcessor(Protocol):
    """A logits processor with its per-request state. Custom ones are given to `SamplingBatch`.

    `argmax_invariant` declares the class: True means that it can never change which token is the most likely
    (it then runs after temperature and only on rows drawn at random).
    """

    argmax_invariant: ClassVar[bool]

    def add(self, slot: int, request: SlotRequest) -> None: ...

    def remove(self, slot: int) -> None: ...

    def move(self, source: int, target: int) -> None: ...

    def stage(self, rows: Rows) -> Stage | None:
        """This step's work for these rows, or None if there is nothing to do."""
        ...


class SlotEntries(Generic[E]):
    """A processor's entries, only for the slots that use it."""

    def __init__(self) -> None:
        self.entries: dict[int, E] = {}

    def __bool__(self) -> bool:
        return bool(self.entries)

    def remove(self, slot: int) -> None:
        self.entries.pop(slot, None)

    def move(self, source: int, target: int) -> None:
        self.entries.pop(target, None)
        if source in self.entries:
            self.entries[target] = self.entries.pop(source)

    def in_rows(self, rows: Rows) -> Iterator[tuple[int, E]]:
        """Yields (row, entry) of the slots that take part in this step."""
        for slot, entry in self.entries.items():
            row = rows.row_of(slot)
            if row >= 0:
                yield row, entry


@dataclass(frozen=True, slots=True)
class Cells:
    """Single logits: parallel int64 row and column numbers."""

    rows: Tensor
    cols: Tensor

    @staticmethod
    def gather(rows: Rows, parts: Sequence[tuple[int, np.ndarray]]) -> Cells:
        """Joins (row, columns) pairs."""
        lengths = [len(cols) for _, cols in parts]
        row_numbers = np.repeat(np.array([row for row, _ in parts], dtype=np.int64), lengths)
        columns = np.concatenate([cols for _, cols in parts]).astype(np.int64, copy=False)
        return Cells(rows.tensor(row_numbers), rows.tensor(columns))
