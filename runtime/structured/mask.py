"""The token mask of one step on its way from the grammars to the sampler. Crosses the border between processes."""

from __future__ import annotations

import msgspec
import numpy as np


class GrammarMask(msgspec.Struct):
    """Rows of allowed tokens of the constrained requests of a step: request i owns `counts[i]` rows, one after another.

    The first row is for the token after the known ones, each further one for the token after one more draft.
    `words` are int32 [sum of counts, num_words].
    """

    req_ids: list[str]
    counts: list[int]
    num_words: int
    words: bytes

    def rows(self) -> np.ndarray:
        """All rows, int32 [sum of counts, num_words]; not writable."""
        return np.frombuffer(self.words, dtype=np.int32).reshape(-1, self.num_words)

    def first_rows(self) -> dict[str, int]:
        """Request id -> its first row."""
        starts = np.cumsum([0, *self.counts[:-1]])
        return dict(zip(self.req_ids, starts.tolist(), strict=True))
