"""What the worker remembers of each live request, in the batch or not. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from treadle.runtime.sampling_params import SamplingParams
from treadle.runtime.scheduler.output import GroupBlockIds, NewRequestData


@dataclass(slots=True, kw_only=True)
class RequestState:
    """One request on the worker. `output` is shared with the sampler's batch, which reads it and never writes."""

    req_id: str
    prompt: np.ndarray
    sampling_params: SamplingParams
    block_ids: GroupBlockIds
    num_computed_tokens: int
    output: list[int] = field(default_factory=list)

    @classmethod
    def from_new(cls, new: NewRequestData) -> RequestState:
        """The state of a request that is seen for the first time."""
        return cls(
            req_id=new.req_id,
            prompt=np.asarray(new.prompt_token_ids, dtype=np.int32),
            sampling_params=new.sampling_params,
            block_ids=tuple(list(ids) for ids in new.block_ids),
            num_computed_tokens=new.num_computed_tokens,
        )

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens that are known."""
        return len(self.prompt) + len(self.output)

    def append_blocks(self, block_ids: GroupBlockIds) -> None:
        """Appends newly allocated blocks, group by group."""
        for mine, new in zip(self.block_ids, block_ids, strict=True):
            mine.extend(new)

    def resume(self, block_ids: GroupBlockIds, output: Sequence[int]) -> None:
        """Starts over after a preemption: blocks and outputs are replaced, not appended to."""
        self.block_ids = tuple(list(ids) for ids in block_ids)
        self.output[:] = output
