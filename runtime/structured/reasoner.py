"""Where the reasoning of a model ends: a grammar constrains only what comes after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


class Reasoner(Protocol):
    """What a reasoning parser offers to the engine. `token_ids` are those of the prompt and the answer so far."""

    def reasoning_ended(self, token_ids: Sequence[int]) -> bool:
        """Whether the reasoning section has ended within `token_ids`, the token that ends it included."""
        ...


@runtime_checkable
class LocatingReasoner(Reasoner, Protocol):
    """A reasoner that can say where the section ends, which saves stepping back to find it."""

    def end_offset(self, token_ids: Sequence[int]) -> int | None:
        """Number of tokens up to and with the last of the reasoning; None while it goes on."""
        ...


@runtime_checkable
class PromptReasoner(Reasoner, Protocol):
    """A reasoner that counts only where the prompt leaves the section open."""

    def opened_by(self, prompt: Sequence[int]) -> bool:
        """Whether the answer to a prompt begins within the section."""
        ...


def constraint_start(reasoner: Reasoner | None, known: Sequence[int], new: Sequence[int]) -> int | None:
    """How many of the `new` tokens after the `known` ones belong to the reasoning; the rest is constrained.

    0 without a reasoner; None if the reasoning goes on after all of them.
    """
    if reasoner is None:
        return 0
    both = [*known, *new]
    if isinstance(reasoner, LocatingReasoner):
        offset = reasoner.end_offset(both)
        return None if offset is None or offset > len(both) else max(offset - len(known), 0)
    if not reasoner.reasoning_ended(both):
        return None
    start = len(new)
    while start and reasoner.reasoning_ended(both[: len(known) + start - 1]):
        start -= 1
    return start
