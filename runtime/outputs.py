"""What `LLM.generate` and `AsyncEngine.generate` return, with vLLM's attribute names. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from treadle.runtime.protocol import LogprobRow

STOP, LENGTH, ABORT, ERROR = "stop", "length", "abort", "error"
"""The reasons for which a completion ends."""


@dataclass
class Logprob:
    """Log probability of one token at one position; the most likely token has rank 1."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


SampleLogprobs = list[dict[int, Logprob]]
"""One mapping a generated token: the sampled id first, then the most likely ones."""

PromptLogprobs = list[dict[int, Logprob] | None]
"""One mapping a prompt token; the first token has none."""


def logprob_entries(row: LogprobRow, token_text: Callable[[int], str] | None = None) -> dict[int, Logprob]:
    """One position as users see it, in the row's order: the sampled (or prompt) token first."""
    entries: dict[int, Logprob] = {}
    for token_id, logprob, rank in zip(row.token_ids, row.logprobs, row.ranks, strict=True):
        if token_id not in entries:
            entries[token_id] = Logprob(logprob, rank, token_text(token_id) if token_text else None)
    return entries


@dataclass
class CompletionOutput:
    """One completion of a request. `stop_reason` is the stop string or stop id that ended it, if one did."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None

    def finished(self) -> bool:
        """Whether this completion has ended."""
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Times of one request in seconds: `arrival_time` since the epoch, the others on the monotonic clock."""

    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    num_generation_tokens: int = 0


@dataclass
class RequestOutput:
    """Everything about one request so far. `outputs` holds one completion for each of `n`, or those that moved."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None

    def add(self, later: RequestOutput, *, aggregate: bool) -> None:
        """Merges a later output of the same request into this one, in place.

        With `aggregate` the later texts, ids and logprobs are deltas that are appended; without, they replace.
        Lets a consumer that fell behind read one output for many steps.
        """
        assert later.request_id == self.request_id
        self.finished |= later.finished
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.metrics = later.metrics or self.metrics
        if later.num_cached_tokens is not None:
            self.num_cached_tokens = later.num_cached_tokens
        places = {output.index: place for place, output in enumerate(self.outputs)}
        for output in later.outputs:
            if output.index not in places:
                self.outputs.append(output)
            elif aggregate:
                _append(self.outputs[places[output.index]], output)
            else:
                self.outputs[places[output.index]] = output


def _append(output: CompletionOutput, delta: CompletionOutput) -> None:
    output.text += delta.text
    output.token_ids = [*output.token_ids, *delta.token_ids]
    if delta.logprobs:
        output.logprobs = [*(output.logprobs or ()), *delta.logprobs]
    output.cumulative_logprob = delta.cumulative_logprob
    output.finish_reason = delta.finish_reason
    output.stop_reason = delta.stop_reason
