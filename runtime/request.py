"""One live generation inside the engine: its tokens, how far it has got, and its status. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, NamedTuple, overload

from treadle.runtime.protocol import CoreRequest, LogprobRow

if TYPE_CHECKING:
    from treadle.runtime.structured.request_grammar import RequestGrammar


class RequestStatus(Enum):
    WAITING = "waiting"
    WAITING_FOR_GRAMMAR = "waiting_for_grammar"
    WAITING_FOR_REMOTE_KV = "waiting_for_remote_kv"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


_S = RequestStatus
BLOCKED = frozenset({_S.WAITING_FOR_GRAMMAR, _S.WAITING_FOR_REMOTE_KV})
_NEXT_STATUSES = {
    _S.WAITING: {_S.WAITING_FOR_GRAMMAR, _S.WAITING_FOR_REMOTE_KV, _S.RUNNING, _S.FINISHED},
    _S.WAITING_FOR_GRAMMAR: {_S.WAITING, _S.FINISHED},
    _S.WAITING_FOR_REMOTE_KV: {_S.WAITING, _S.PREEMPTED, _S.FINISHED},
    _S.RUNNING: {_S.PREEMPTED, _S.FINISHED},
    _S.PREEMPTED: {_S.WAITING_FOR_REMOTE_KV, _S.RUNNING, _S.FINISHED},
    _S.FINISHED: set(),
}


class MediaFeature(NamedTuple):
    """A media item: its placeholder tokens stand at `offset` .. `offset + num_tokens` and carry no content."""

    identifier: str
    offset: int
    num_tokens: int


class TokenView(Sequence[int]):
    """A read-only view of a growing token list."""

    __slots__ = ("_tokens",)

    def __init__(self, tokens: list[int]):
        self._tokens = tokens

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._tokens[index]

    def __len__(self) -> int:
        return len(self._tokens)


class Request:
    """Built from one accepted `CoreRequest`; the scheduler is the only one that changes it.

    Progress is `num_computed_tokens` against `num_tokens_with_spec`, nothing else. `num_computed_tokens` counts
    tokens whose KV exists or is scheduled to exist. The counters of asynchronous scheduling stay 0 without it:

        known tokens                       | placeholders        outputs that are scheduled but not back yet
        prompt .......... | output ....... | ? ? |
        computed ........................... . |                 may run ahead of the known tokens
    """

    def __init__(self, core: CoreRequest):
        self.core = core
        self.request_id = core.request_id
        self.sampling_params = core.sampling_params
        self.priority = core.priority
        self.arrival_time = core.arrival_time
        self.lora_name = core.lora_name
        self.cache_salt = core.cache_salt
        self.media: Sequence[MediaFeature] = ()
        self.prompt_embeds: Sequence[bytes] = ()  # one row of values a prompt token, instead of ids
        self.prompt_token_ids: Sequence[int] = TokenView(list(core.prompt_token_ids))
        self.num_prompt_tokens = len(core.prompt_token_ids)
        self._output_token_ids: list[int] = []
        self._all_token_ids = list(core.prompt_token_ids)
        self.output_token_ids: Sequence[int] = TokenView(self._output_token_ids)
        self.all_token_ids: Sequence[int] = TokenView(self._all_token_ids)
        self.spec_token_ids: list[int] = []

        self._status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None  # prompt tokens found in the prefix cache at first admission
        self.num_preemptions = 0
        self.queue_number = 0  # order of arrival at the scheduler
        self.last_scheduled_step = -1

        self.num_output_placeholders = 0
        self.num_in_flight_tokens = 0
        self.num_stale_output_tokens = 0
        self.drop_stale_output = False
        self.next_decode_eligible_step = 0

        self.grammar: RequestGrammar | None = None  # what constrains the output; set once it is compiled
        self.error: str | None = None  # what went wrong inside the engine, if the request ends by that

        self.block_hashes: list[bytes] = []
        self._hasher: Callable[[Request], list[bytes]] | None = None

        self.prompt_logprobs: list[LogprobRow | None] = []
        self.awaits_prompt_logprobs = core.sampling_params.prompt_logprobs is not None

    # Tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self._output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens that are known."""
        return len(self._all_token_ids)

    @property
    def num_tokens_with_spec(self) -> int:
        return len(self._all_token_ids) + len(self.spec_token_ids)

    def append_output(self, token_id: int) -> None:
        """Appends one token to both token lists, and the hash of the block it fills, if it fills one."""
        self._output_token_ids.append(token_id)
        self._all_token_ids.append(token_id)
        self._extend_hashes()

    def attach_hasher(self, hasher: Callable[[Request], list[bytes]]) -> None:
        """From now on `block_hashes` follows the tokens; `hasher` returns the hashes of newly full blocks."""
        self._hasher = hasher
        self._extend_hashes()

    def _extend_hashes(self) -> None:
        if self._hasher is not None:
            self.block_hashes.extend(self._hasher(self))

    # Status

    @property
    def status(self) -> RequestStatus:
        return self._status

    @status.setter
    def status(self, status: RequestStatus) -> None:
        assert status in _NEXT_STATUSES[self._status], f"{self.request_id}: {self._status} -> {status}"
        self._status = status

    @property
    def is_finished(self) -> bool:
        return self._status is RequestStatus.FINISHED

    @property
    def is_blocked(self) -> bool:
        """Waits on something outside the scheduler, or on outputs from before its preemption."""
        return self._status in BLOCKED or (self.num_stale_output_tokens > 0 and not self.drop_stale_output)

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        self.status = RequestStatus.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.grammar = None

    def preempt(self, drop_stale_output: bool = False) -> None:
        """Forgets all progress but the tokens. Outputs in flight become stale: still delivered unless dropped."""
        self.status = RequestStatus.PREEMPTED
        self.num_preemptions += 1
        self.num_computed_tokens = 0
        self.spec_token_ids = []
        self.next_decode_eligible_step = 0
        self.num_stale_output_tokens += self.num_in_flight_tokens
        self.num_in_flight_tokens = self.num_output_placeholders = 0
        drop = drop_stale_output or self.drop_stale_output
        self.drop_stale_output = drop and self.num_stale_output_tokens > 0
        if self.awaits_prompt_logprobs:
            self.prompt_logprobs = []

    # Limits and options

    def max_total_tokens(self, max_model_len: int) -> int:
        """The longest this request may become, prompt included."""
        max_tokens = self.sampling_params.max_tokens
        return max_model_len if max_tokens is None else min(self.num_prompt_tokens + max_tokens, max_model_len)

    @property
    def reads_prefix_cache(self) -> bool:
        """False on request, and while prompt logprobs are due, which need the logits of every prompt token."""
        return not (self.core.skip_prefix_cache_read or self.awaits_prompt_logprobs)

    def add_prompt_logprobs(self, rows: list[LogprobRow | None]) -> None:
        """Keeps the rows of one more chunk; rows of a recomputed prompt that was reported already are ignored."""
        if self.awaits_prompt_logprobs:
            self.prompt_logprobs.extend(rows)

    def take_prompt_logprobs(self) -> list[LogprobRow | None] | None:
        """Returns one entry a prompt token, once, when the prompt is done; None at any other time."""
        if not self.awaits_prompt_logprobs:
            return None
        rows, self.prompt_logprobs = self.prompt_logprobs, []
        self.awaits_prompt_logprobs = False
        assert len(rows) == self.num_prompt_tokens, f"{len(rows)} prompt logprobs, {self.num_prompt_tokens} tokens"
        return rows

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self._status.value}, {self.num_computed_tokens}/{self.num_tokens})"
