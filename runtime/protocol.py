"""What crosses the queue between a front end and the engine core: msgspec structs, encodable as msgpack.

Nothing of HTTP and no tensor appears here. This module imports neither torch nor the engine.
"""

from __future__ import annotations

from typing import Any

import msgspec

from treadle.runtime.sampling_params import SamplingParams


class LogprobRow(msgspec.Struct, array_like=True):
    """Logprobs at one position: the sampled (or prompt) token first, then the top ones; ranks start at 1."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class CoreRequest(msgspec.Struct, kw_only=True, tag="request"):
    """One accepted generation. `sampling_params.n` is 1 here: a front end fans out before it sends."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float
    priority: int = 0
    cache_salt: str | None = None
    lora_name: str | None = None
    skip_prefix_cache_read: bool = False


class AbortRequests(msgspec.Struct, tag="abort"):
    request_ids: list[str]


class UtilityCall(msgspec.Struct, tag="utility"):
    """Calls a named method of the engine core (`stats`, `reset_prefix_cache`, `pause`, ...)."""

    call_id: int
    method: str
    args: list[Any]


class Shutdown(msgspec.Struct, tag="shutdown"):
    """Ends the core; `drain` seconds are given to requests that are running."""

    drain: float = 0.0


CoreInput = CoreRequest | AbortRequests | UtilityCall | Shutdown


class CoreOutput(msgspec.Struct, kw_only=True):
    """What one step produced for one request. `finish_reason` is one of stop, length, abort, error, or None.

    `error` says what an error was; with `fault` it is the engine's own, otherwise the caller can fix it.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    fault: bool = False
    logprobs: list[LogprobRow] | None = None
    prompt_logprobs: list[LogprobRow | None] | None = None
    num_cached_tokens: int = 0


class SchedulerStats(msgspec.Struct, kw_only=True):
    """Gauges and running totals of the core. Totals only grow."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    kv_usage: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_aborted: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    compilations_after_ready: int = 0
    graph_modes: dict[str, int] = msgspec.field(default_factory=dict)


class CoreOutputs(msgspec.Struct, kw_only=True, tag="outputs"):
    outputs: list[CoreOutput]
    stats: SchedulerStats | None = None


class UtilityResult(msgspec.Struct, kw_only=True, tag="result"):
    call_id: int
    value: Any = None
    error: str | None = None


class EngineReady(msgspec.Struct, kw_only=True, tag="ready"):
    """Sent once, when nothing is left to load or compile. `info` is the model information for front ends."""

    info: dict[str, Any]


class EngineDied(msgspec.Struct, kw_only=True, tag="died", omit_defaults=True):
    """Sent last. `user_error` names the class of treadle.ir.errors if the caller can fix what stopped the start."""

    reason: str
    user_error: str | None = None


CoreMessage = CoreOutputs | UtilityResult | EngineReady | EngineDied
