"""Closed ranges of token counts: which artifact serves a step of T tokens. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from treadle.ir.errors import ArtifactError, ConfigError

R = TypeVar("R")


@dataclass(frozen=True, order=True)
class TokenRange:
    """Every token count from `start` to `end`, both included; an exact size if they are equal."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 1 <= self.start <= self.end:
            raise ConfigError(f"a range of token counts needs 1 <= start <= end, not {self.start} and {self.end}")

    @property
    def exact(self) -> bool:
        return self.start == self.end

    def __contains__(self, tokens: int) -> bool:
        return self.start <= tokens <= self.end

    def __str__(self) -> str:
        return f"{self.start}" if self.exact else f"{self.start}-{self.end}"


def plan_ranges(max_tokens: int, exact_sizes: Iterable[int] = ()) -> list[TokenRange]:
    """Exact sizes first, then one interval that covers 1 to `max_tokens` (R-9.17).

    Raises NotImplementedError for a placeholder among the sizes: configuration must have replaced it (R-9.18).
    """
    exact = []
    for size in sorted(set(exact_sizes), key=str):
        if not isinstance(size, int):
            raise NotImplementedError(f"exact size {size!r} is a placeholder that configuration should have replaced")
        exact.append(TokenRange(size, size))
    return [*sorted(exact), TokenRange(1, max_tokens)]


class RangeTable(Generic[R]):
    """Range -> what serves it. Exact sizes win over intervals; among intervals the narrowest wins."""

    def __init__(self, name: str, entries: Mapping[TokenRange, R]):
        self.name = name
        self._exact = {key.start: value for key, value in entries.items() if key.exact}
        intervals = [(key, value) for key, value in entries.items() if not key.exact]
        self._intervals = sorted(intervals, key=lambda item: (item[0].end - item[0].start, item[0]))
        self.ranges = [*(TokenRange(size, size) for size in sorted(self._exact)), *(key for key, _ in self._intervals)]

    def items(self) -> list[tuple[TokenRange, R]]:
        """Every entry in the order of preference."""
        exact = [(TokenRange(size, size), self._exact[size]) for size in sorted(self._exact)]
        return [*exact, *self._intervals]

    def lookup(self, tokens: int) -> R:
        """What serves `tokens`. Raises ArtifactError naming the size and the ranges if nothing does."""
        if tokens in self._exact:
            return self._exact[tokens]
        for key, value in self._intervals:
            if tokens in key:
                return value
        raise ArtifactError(
            f"piece {self.name} has nothing for {tokens} tokens; its ranges are {', '.join(map(str, self.ranges)) or 'none'}; "
            "compile with a larger max_num_batched_tokens"
        )
