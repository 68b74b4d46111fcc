"""The scheduler's decision for one step: all that a worker needs, immutable once made. Imports no torch.

Order on the worker: forget `finished_req_ids`, zero `block_ids_to_zero`, take `preempted_req_ids` and
`cached.resumed_req_ids` out of the batch, then add `new` and apply `cached`. An id may stand both in
`finished_req_ids` and in `new`: those are two different requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from treadle.runtime.sampling_params import SamplingParams

GroupBlockIds = tuple[list[int], ...]
"""Block ids of one request: outer by KV-cache group, inner in token order; 0 is the null block."""


@dataclass(frozen=True, slots=True)
class NewRequestData:
    """A request that the worker sees for the first time."""

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    block_ids: GroupBlockIds
    num_computed_tokens: int
    lora_name: str | None = None


@dataclass(frozen=True, slots=True)
class CachedRequestData:
    """Requests that the worker knows already; the lists are parallel to `req_ids`.

    `num_computed_tokens` counts before this step. `new_block_ids` are appended to what the worker has (None: no
    new block in any group), except for a resumed request, where they replace everything. `new_token_ids` exists
    for resumed requests only: every output token so far, replacing what the worker holds.
    """

    req_ids: list[str] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    new_block_ids: list[GroupBlockIds | None] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_token_ids: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. `num_scheduled_tokens[id]` tokens of each request are computed, from `num_computed_tokens` on.

    A request samples in this step exactly if its computed plus its scheduled tokens reach its known tokens.
    `total_num_scheduled_tokens` is 0 when there is nothing to run; the sets still have to be applied.
    """

    step: int
    new: list[NewRequestData] = field(default_factory=list)
    cached: CachedRequestData = field(default_factory=CachedRequestData)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    total_num_scheduled_tokens: int = 0
    spec_token_ids: dict[str, list[int]] = field(default_factory=dict)
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] = field(default_factory=set)
    block_ids_to_zero: list[int] = field(default_factory=list)
