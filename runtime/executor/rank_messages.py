"""What rank 0 and the other ranks tell each other: msgpack over a socket pair. Imports no torch."""

from __future__ import annotations

from typing import Any

import msgspec

from treadle.runtime.runner_output import RunnerOutput
from treadle.runtime.scheduler.output import SchedulerOutput
from treadle.runtime.structured.mask import GrammarMask


class RankStart(msgspec.Struct, kw_only=True, tag=True):
    """The first message. `meeting_file` is where the ranks of the group find each other."""

    config: dict[str, Any]
    rank: int
    world: int
    meeting_file: str


class RankCall(msgspec.Struct, kw_only=True, tag=True):
    """Calls a method of the rank's worker: `step` is for `execute_model`, `mask` for `sample_tokens`, the rest for `start`."""

    method: str
    step: SchedulerOutput | None = None
    mask: GrammarMask | None = None
    num_blocks: int | None = None
    max_model_len: int | None = None


class RankReply(msgspec.Struct, kw_only=True):
    """The answer to each message, and the first word of a rank. A rank that sends an error ends."""

    error: str | None = None
    user_error: str | None = None
    value: Any = None
    output: RunnerOutput | None = None


RankMessage = RankStart | RankCall
