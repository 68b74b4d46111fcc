"""What a grammar backend offers: it compiles constraints, and its grammars follow the tokens of one request.

Masks are int32 [rows, ceil(vocabulary / 32)]; bit i of word w is token 32 w + i, 1 means allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from treadle.runtime.structured.constraint import Constraint


class Grammar(Protocol):
    """The state of one request in its grammar. End-of-sequence tokens are part of it: allowed where the text may end."""

    def fill_bitmask(self, mask: np.ndarray, row: int) -> None:
        """Writes the tokens that may come next into `mask[row]`; the state stays."""
        ...

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        """Advances by all tokens; False, and no advance, if the grammar does not allow them in this order."""
        ...

    def validate_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """The longest prefix that would be accepted; the state stays."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Takes the last accepted tokens back."""
        ...

    @property
    def terminated(self) -> bool:
        """Whether an end-of-sequence token was accepted: nothing may follow."""
        ...


class CompiledGrammar(Protocol):
    """A compiled constraint, shared by all requests with the same one."""

    num_bytes: int

    def start(self) -> Grammar:
        """The state before the first token."""
        ...


@dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """What every backend is made with. Times in seconds; `max_whitespace` characters may stand between JSON's parts."""

    timeout: float
    jobs: int
    max_whitespace: int


class Backend(Protocol):
    """Compiles constraints for one vocabulary; made once, in a thread of the pool, with a `Vocabulary` and `BackendOptions`.

    Its module may be imported without the library behind it, which is imported when the backend is made.
    """

    package: ClassVar[str]

    def unsupported_reason(self, constraint: Constraint) -> str | None:
        """Why this backend cannot hold a constraint exactly, naming the keyword; None if nothing speaks against it."""
        ...

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """Called from several threads, returns within the time limit. Raises GrammarError with the compiler's message."""
        ...

    def close(self) -> None:
        """Ends what the backend has started."""
        ...
