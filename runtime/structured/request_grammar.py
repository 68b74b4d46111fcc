"""The grammar of one live request: when it starts to count, what it has accepted, what is wrong with it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treadle.runtime.structured.interface import Grammar
from treadle.runtime.structured.reasoner import PromptReasoner, Reasoner, constraint_start

PADDING = -1
"""Fills up lists of draft tokens."""


class RequestGrammar:
    """Follows the tokens that a request has got; `known` is their live list, prompt first.

    With a reasoner nothing is constrained before the reasoning has ended; a prompt may have ended it already, or, for a
    `PromptReasoner`, have begun none.
    """

    def __init__(self, grammar: Grammar, known: Sequence[int], reasoner: Reasoner | None = None):
        self._grammar = grammar
        self._known = known
        self._reasoner = reasoner
        self._started = reasoner is None or _begins_after(reasoner, known)
        self.fault: str | None = None
        """What went wrong; the request ends with it."""

    @property
    def started(self) -> bool:
        """Whether the next token is constrained."""
        return self._started

    @property
    def terminated(self) -> bool:
        """Whether the constrained text is complete."""
        return self._grammar.terminated

    def accept(self, token_id: int) -> bool:
        """Advances by a token that was just appended to the known ones. False, with `fault` set, if it is not allowed."""
        if self.fault is not None:
            return False
        if not self._started:
            self._started = self._reasoner is not None and self._reasoner.reasoning_ended(self._known)
            return True
        try:
            if self._grammar.accept_tokens([token_id]):
                return True
            self.fault = f"the grammar does not allow token {token_id}, which was sampled"
        except RuntimeError as error:  # what backends raise when they fail
            self.fault = f"the grammar failed: {error}"
        return False

    def validate_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """The longest prefix of drafts that may follow: padding is cut, tokens of the reasoning always may."""
        drafts = list(token_ids)
        if PADDING in drafts:
            drafts = drafts[: drafts.index(PADDING)]
        start = 0 if self._started else constraint_start(self._reasoner, self._known, drafts)
        if start is None:
            return drafts
        return drafts[:start] + self._grammar.validate_tokens(drafts[start:])

    def fill_rows(self, mask: np.ndarray, first: int, drafts: Sequence[int]) -> None:
        """Writes 1 + len(drafts) rows from `first` on: row i is what may follow the first i drafts.

        After the first draft that the grammar rejects all rows repeat the mask that rejected it. The grammar is
        where it was afterwards: tokens count only once the sampler has accepted them.
        """
        start = 0 if self._started else constraint_start(self._reasoner, self._known, drafts)
        if start is None:
            return  # every row stays all ones
        advanced = 0
        try:
            for index in range(len(drafts) + 1):
                if index < start:
                    continue
                self._grammar.fill_bitmask(mask, first + index)
                if index == len(drafts):
                    return
                if self._grammar.terminated or not self._grammar.accept_tokens([drafts[index]]):
                    mask[first + index + 1 : first + len(drafts) + 1] = mask[first + index]
                    return
                advanced += 1
        finally:
            self._grammar.rollback(advanced)


def _begins_after(reasoner: Reasoner, prompt: Sequence[int]) -> bool:
    """Whether the first token of the answer is constrained already."""
    if isinstance(reasoner, PromptReasoner):
        return not reasoner.opened_by(prompt)
    return reasoner.reasoning_ended(prompt)
