"""What a compile tells whoever watches: stages with their times, pieces as they begin, and notes. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from treadle.codegen.manifest import StageTime


class Progress:
    """Silent; override what you want to show. `piece` and `note` may be called from other threads."""

    def begin(self, stage: str) -> None:
        """`stage` begins."""

    def end(self, stage: str, seconds: float) -> None:
        """`stage` has ended well."""

    def piece(self, number: int, total: int, label: str) -> None:
        """Artifact `number` of `total` is looked up or compiled."""

    def note(self, text: str) -> None:
        """Something worth knowing, such as a damaged object that is built again."""


class StageClock:
    """Times stages and passes them on."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self.times: list[StageTime] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._progress.begin(name)
        start = time.perf_counter()
        yield
        self.note_time(name, time.perf_counter() - start)

    def note_time(self, name: str, seconds: float) -> None:
        self.times.append(StageTime(stage=name, seconds=round(seconds, 3)))
        self._progress.end(name, seconds)
