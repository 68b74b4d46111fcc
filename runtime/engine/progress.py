"""A progress line on the terminal for offline generation."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from treadle.runtime.outputs import RequestOutput

REFRESH_SECONDS = 0.2


class Progress:
    """Writes "3/8 prompts, 41.2 output tokens/s" over itself; silent unless stderr is a terminal."""

    def __init__(self, total: int, shown: bool):
        self._total = total
        self._shown = shown and sys.stderr.isatty()
        self._done = self._tokens = 0
        self._start = self._last = time.monotonic()

    @classmethod
    def make(cls, use_tqdm: bool | Callable[..., Any], total: int) -> Progress:
        """For vLLM's argument; a callable counts as true: the display is ours."""
        return cls(total, bool(use_tqdm))

    def advance(self, output: RequestOutput) -> None:
        """Counts one finished request."""
        self._done += 1
        self._tokens += sum(len(completion.token_ids) for completion in output.outputs)
        now = time.monotonic()
        if self._shown and (now - self._last > REFRESH_SECONDS or self._done == self._total):
            self._last = now
            speed = self._tokens / max(now - self._start, 1e-9)
            sys.stderr.write(f"\r{self._done}/{self._total} prompts, {speed:.1f} output tokens/s ")
            sys.stderr.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown and self._done:
            sys.stderr.write("\n")
