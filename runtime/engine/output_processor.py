"""From core outputs to what callers see: text, stop strings, logprobs with decoded tokens, n completions in one.

Both front ends use it. It keeps one state for each live request and tells which core requests a stop string has ended
early, so that the front end aborts them. Imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from treadle.ir.errors import TreadleError, UserError
from treadle.runtime.detokenizer import Detokenizers, IncrementalDetokenizer
from treadle.runtime.engine.input_processor import ProcessedRequest
from treadle.runtime.outputs import (
    ABORT,
    ERROR,
    STOP,
    CompletionOutput,
    Logprob,
    PromptLogprobs,
    RequestMetrics,
    RequestOutput,
    SampleLogprobs,
)
from treadle.runtime.protocol import CoreOutput, LogprobRow
from treadle.runtime.renderer import Renderer
from treadle.runtime.sampling_params import RequestOutputKind


class Completion:
    """One of the n completions while it runs."""

    def __init__(self, index: int, detokenizer: IncrementalDetokenizer, wants_logprobs: bool):
        self.index = index
        self.detokenizer = detokenizer
        self.logprobs: SampleLogprobs | None = [] if wants_logprobs else None
        self.cumulative_logprob: float | None = 0.0 if wants_logprobs else None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.num_shown = 0

    def output(self, delta: bool) -> CompletionOutput:
        """Everything so far, or with `delta` what was not returned yet."""
        finished = self.finish_reason is not None
        start = self.num_shown if delta else 0
        self.num_shown = len(self.detokenizer.token_ids)
        return CompletionOutput(
            index=self.index,
            text=self.detokenizer.next_output_text(finished, delta),
            token_ids=self.detokenizer.token_ids[start:],
            cumulative_logprob=self.cumulative_logprob,
            logprobs=self.logprobs[start:] if self.logprobs is not None else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class RequestState:
    """One request of a caller, with its completions."""

    def __init__(self, request: ProcessedRequest, completions: list[Completion]):
        self.request = request
        self.kind = request.params.output_kind
        self.completions = completions
        self.prompt_logprobs: PromptLogprobs | None = None
        self.num_cached_tokens: int | None = None
        self.num_running = len(completions)
        self.error: str | None = None
        self.metrics = RequestMetrics(arrival_time=request.arrival_time, queued_ts=time.monotonic())

    @property
    def finished(self) -> bool:
        return self.num_running == 0

    def output(self, moved: Sequence[Completion]) -> RequestOutput | None:
        """What to show after some completions moved; None while a caller of FINAL_ONLY has to wait."""
        if self.kind is RequestOutputKind.FINAL_ONLY and not self.finished:
            return None
        delta = self.kind is RequestOutputKind.DELTA
        prompt_logprobs = self.prompt_logprobs
        if delta:
            self.prompt_logprobs = None  # reported once
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=[completion.output(delta) for completion in (moved if delta else self.completions)],
            finished=self.finished,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
        )


@dataclass
class Processed:
    """What one message of core outputs came to. `errors` maps a request to why the engine refused it."""

    outputs: list[RequestOutput] = field(default_factory=list)
    to_abort: list[str] = field(default_factory=list)
    errors: dict[str, TreadleError] = field(default_factory=dict)


class OutputProcessor:
    """Owns the states of all live requests of a front end."""

    def __init__(self, renderer: Renderer | None):
        self._detokenizers = Detokenizers(renderer.tokenizer if renderer is not None else None)
        self._texts: dict[int, str] = {}
        self._requests: dict[str, RequestState] = {}
        self._completions: dict[str, tuple[RequestState, Completion]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def request_ids(self) -> list[str]:
        """The ids of the requests that have not ended."""
        return list(self._requests)

    def add(self, request: ProcessedRequest) -> None:
        """Starts a request. Raises UserError if its id, or one of its children's, belongs to a live one."""
        taken = [child.request_id for child in request.children if child.request_id in self._completions]
        if request.request_id in self._requests or taken:
            raise UserError(
                f"request id {request.request_id!r} belongs to a request that has not ended; choose another one"
            )
        completions = [
            Completion(
                index,
                IncrementalDetokenizer(self._detokenizers, child.sampling_params, request.prompt_token_ids),
                child.sampling_params.wants_logprobs,
            )
            for index, child in enumerate(request.children)
        ]
        state = RequestState(request, completions)
        self._requests[request.request_id] = state
        for child, completion in zip(request.children, completions, strict=True):
            self._completions[child.request_id] = (state, completion)

    def drop(self, request_id: str) -> list[str]:
        """Forgets a request; later outputs of it are ignored. Returns its core requests that still run."""
        state = self._requests.pop(request_id, None)
        if state is None:
            return []
        running = []
        for child, completion in zip(state.request.children, state.completions, strict=True):
            self._completions.pop(child.request_id, None)
            if completion.finish_reason is None:
                running.append(child.request_id)
        return running

    def abort(self, request_id: str) -> tuple[RequestOutput | None, list[str]]:
        """Ends a request early: (its last output, its core requests that still run); nothing for an ended one."""
        state = self._requests.get(request_id)
        if state is None:
            return None, []
        running = self.drop(request_id)
        cut = [completion for completion in state.completions if completion.finish_reason is None]
        for completion in cut:
            completion.finish_reason = ABORT
        state.num_running = 0
        return state.output(cut), running

    def process(self, outputs: Sequence[CoreOutput]) -> Processed:
        """Takes in the outputs of a step; a request shows up once, whatever number of its completions moved."""
        done = Processed()
        moved: dict[str, tuple[RequestState, list[Completion]]] = {}
        for output in outputs:
            found = self._completions.get(output.request_id)
            if found is None:  # it ended or was dropped meanwhile
                continue
            state, completion = found
            request_id = state.request.request_id
            if output.finish_reason == ERROR:
                moved.pop(request_id, None)
                self._refuse(output, request_id, done)
                continue
            self._process_one(output, state, completion, done)
            _, completions = moved.setdefault(request_id, (state, []))
            if completion not in completions:
                completions.append(completion)
        for state, completions in moved.values():
            if (shown := state.output(completions)) is not None:
                done.outputs.append(shown)
        return done

    def _refuse(self, core: CoreOutput, request_id: str, done: Processed) -> None:
        kind = TreadleError if core.fault else UserError
        done.errors[request_id] = kind(core.error or "the engine could not serve this request")
        done.to_abort += [child for child in self.drop(request_id) if child != core.request_id]

    def _process_one(self, core: CoreOutput, state: RequestState, completion: Completion, done: Processed) -> None:
        self._take_tokens(core, state, completion)
        if completion.finish_reason is None:
            return
        state.num_running -= 1
        del self._completions[core.request_id]
        if core.finish_reason is None:  # a stop string: the core does not know yet
            done.to_abort.append(core.request_id)
        if state.finished:
            del self._requests[state.request.request_id]

    def _take_tokens(self, core: CoreOutput, state: RequestState, completion: Completion) -> None:
        _note_times(state.metrics, len(core.new_token_ids))
        state.num_cached_tokens = core.num_cached_tokens
        if core.prompt_logprobs is not None:
            state.prompt_logprobs = [self._logprobs(row) if row else None for row in core.prompt_logprobs]
        by_token = core.finish_reason == STOP
        before = len(completion.detokenizer.token_ids)
        stop = completion.detokenizer.update(
            core.new_token_ids, finished=core.finish_reason is not None, stop_terminated=by_token
        )
        if completion.logprobs is not None:
            kept = len(completion.detokenizer.token_ids) - before
            self._take_logprobs(completion, (core.logprobs or [])[:kept])
        # The core's reason is an enum when it runs in this process: callers get plain text either way.
        completion.finish_reason = str(core.finish_reason) if core.finish_reason is not None else None
        completion.stop_reason = core.stop_reason
        if stop is not None:
            completion.finish_reason, completion.stop_reason = STOP, stop

    def _take_logprobs(self, completion: Completion, rows: Sequence[LogprobRow]) -> None:
        assert completion.logprobs is not None and completion.cumulative_logprob is not None
        for row in rows:
            completion.logprobs.append(self._logprobs(row))
            completion.cumulative_logprob += row.logprobs[0]

    def _logprobs(self, row: LogprobRow) -> dict[int, Logprob]:
        """The chosen token first; it keeps its place when it is among the top ones too."""
        found: dict[int, Logprob] = {}
        for token, logprob, rank in zip(row.token_ids, row.logprobs, row.ranks, strict=True):
            if token not in found:
                found[token] = Logprob(logprob, rank, self._token_text(token))
        return found

    def _token_text(self, token: int) -> str:
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self._detokenizers.token_text(token)
        return text


def _note_times(metrics: RequestMetrics, num_tokens: int) -> None:
    if not num_tokens:
        return
    now = time.monotonic()
    if metrics.num_generation_tokens == 0:
        metrics.first_token_ts = now
        metrics.first_token_latency = now - metrics.queued_ts
    metrics.last_token_ts = now
    metrics.num_generation_tokens += num_tokens
