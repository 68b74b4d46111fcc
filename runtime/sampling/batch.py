"""The persistent batch: what each slot's request asks of the sampler, turned into metadata for one step.

Metadata is rebuilt only when a slot or the choice of rows changed, except what depends on generated tokens
(penalties, bad words, min-tokens, seeds), which costs time only for the requests that use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from treadle.runtime.sampling.metadata import LogprobPlan, SamplingMetadata, TopKTopP
from treadle.runtime.sampling.penalties import Penalties
from treadle.runtime.sampling.processors import AllowedTokens, BannedTokens, LogitBias, MinP
from treadle.runtime.sampling.random_pick import draw_keys
from treadle.runtime.sampling.slots import Rows, SlotProcessor, SlotRequest
from treadle.runtime.sampling.topk_topp import MAX_WINDOW, P_WINDOW
from treadle.runtime.sampling_params import SamplingParams

_NO_LOGPROBS = -2


class SamplingBatch:
    """Sampling state of up to `capacity` requests, one a slot. `seed` starts the stream of unseeded requests.

    `processors` are the caller's own, run after the built-in ones of their class.
    """

    def __init__(
        self,
        capacity: int,
        vocab_size: int,
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
        processors: Sequence[SlotProcessor] = (),
    ):
        self.capacity = capacity
        self.vocab_size = vocab_size
        self._device = torch.device(device)
        self._req_ids: list[str | None] = [None] * capacity
        self._requests: list[SlotRequest | None] = [None] * capacity
        self._temperature = np.zeros(capacity, dtype=np.float32)
        self._top_k = np.full(capacity, vocab_size, dtype=np.int64)
        self._top_p = np.ones(capacity, dtype=np.float64)
        self._num_logprobs = np.full(capacity, _NO_LOGPROBS, dtype=np.int64)
        self._seed = np.zeros(capacity, dtype=np.uint64)
        self._seeded = np.zeros(capacity, dtype=bool)
        self._plain = np.zeros(capacity, dtype=bool)
        self._columns = (
            *(self._temperature, self._top_k, self._top_p, self._num_logprobs),
            *(self._seed, self._seeded, self._plain),
        )
        self._stream = np.random.Generator(np.random.PCG64(seed % 2**64))
        self._allowed, self._banned, self._penalties = AllowedTokens(), BannedTokens(), Penalties()
        self._bias, self._min_p = LogitBias(), MinP()
        self._custom = tuple(processors)
        built_in = (self._allowed, self._banned, self._bias, self._penalties, self._min_p)
        self._processors: tuple[SlotProcessor, ...] = (*built_in, *self._custom)
        self._cached: tuple[bytes, Rows, Rows, SamplingMetadata] | None = None

    def add(
        self,
        slot: int,
        req_id: str,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
    ) -> None:
        """Puts a request into a free slot. `output_token_ids` is kept as a live reference and read each step.

        A request that was preempted comes back with the same call; its random stream goes on where it was.
        """
        assert self._requests[slot] is None, f"slot {slot} belongs to {self._req_ids[slot]}"
        request = SlotRequest(params, prompt_token_ids, output_token_ids, self.vocab_size)
        self._req_ids[slot], self._requests[slot] = req_id, request
        # With top_k 1 the best token is the only one, and argmax breaks ties as greedy does.
        self._temperature[slot] = 0 if params.greedy or params.top_k == 1 else params.temperature
        self._top_k[slot] = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        self._top_p[slot] = params.top_p
        self._num_logprobs[slot] = _num_logprobs(params)
        self._seed[slot] = (params.seed or 0) % 2**64
        self._seeded[slot] = params.seed is not None
        for processor in self._processors:
            processor.add(slot, request)
        self._plain[slot] = self._wants_argmax_only(slot)
        self._cached = None

    def remove(self, slot: int) -> None:
        """Frees a slot. Removing from a free slot is allowed and does nothing."""
        self._req_ids[slot] = self._requests[slot] = None
        for processor in self._processors:
            processor.remove(slot)
        self._cached = None

    def move(self, source: int, target: int) -> None:
        """Moves a request to a free slot; the source becomes free."""
        assert self._requests[target] is None, f"slot {target} belongs to {self._req_ids[target]}"
        for column in self._columns:
            column[target] = column[source]
        self._req_ids[target], self._requests[target] = self._req_ids[source], self._requests[source]
        self._req_ids[source] = self._requests[source] = None
        for processor in self._processors:
            processor.move(source, target)
        self._cached = None

    def argmax_only(self, rows: int | Sequence[int] | np.ndarray) -> np.ndarray:
        """For each row whether its request wants nothing but the argmax of the raw logits, bool [R]."""
        return self._plain[np.arange(rows) if isinstance(rows, int) else rows]

    def metadata(self, rows: int | Sequence[int] | np.ndarray) -> SamplingMetadata:
        """Metadata for one step. `rows` is the number of slots, from 0, or the slot of each row of the logits.

        Leave out slots that do not sample in this step (an unfinished prompt). A seeded row's draw depends on
        its seed and the length of its output list at this moment.
        """
        slots = np.arange(rows) if isinstance(rows, int) else np.asarray(rows, dtype=np.int64)
        key = slots.tobytes()
        if self._cached is None or self._cached[0] != key:
            self._cached = (key, *self._build(slots))
        _, all_rows, random_rows, fixed = self._cached
        return self._with_tokens(fixed, all_rows, random_rows)

    def _wants_argmax_only(self, slot: int) -> bool:
        if self._temperature[slot] > 0 or self._num_logprobs[slot] != _NO_LOGPROBS:
            return False
        built_in = (self._allowed, self._banned, self._bias, self._penalties)
        return not any(slot in processor.entries for processor in built_in) and all(
            processor.argmax_invariant for processor in self._custom
        )

    def _build(self, slots: np.ndarray) -> tuple[Rows, Rows, SamplingMetadata]:
        """All rows, the random ones, and the metadata that does not depend on generated tokens."""
        assert all(self._requests[slot] is not None for slot in slots), "a row belongs to a free slot"
        rows = Rows(slots, self.capacity, self._device)
        is_random = self._temperature[slots] > 0
        drawn = Rows(slots[is_random], self.capacity, self._device)
        bias, min_p = self._bias.stage(rows), self._min_p.stage(drawn)
        fixed = SamplingMetadata(
            num_rows=len(slots),
            all_greedy=not len(drawn),
            random_rows=None if is_random.all() else rows.tensor(is_random.nonzero()[0]),
            temperature_S=drawn.tensor(self._temperature[drawn.slots]),
            top_k_top_p=self._filters(drawn),
            allowed=self._allowed.stage(rows),
            changing=(bias,) if bias else (),
            invariant=(min_p,) if min_p else (),
            logprobs=self._logprob_plan(rows),
        )
        return rows, drawn, fixed

    def _with_tokens(self, fixed: SamplingMetadata, rows: Rows, drawn: Rows) -> SamplingMetadata:
        if fixed.all_greedy and not (self._banned or self._penalties or self._custom):
            return fixed
        changing = [p.stage(rows) for p in self._custom if not p.argmax_invariant]
        invariant = [p.stage(drawn) for p in self._custom if p.argmax_invariant]
        return replace(
            fixed,
            uniforms_S=drawn.tensor(self._uniforms(drawn.slots)),
            races=self._races(drawn.slots),
            banned=self._banned.stage(rows),
            penalties=self._penalties.stage(rows),
            changing=(*fixed.changing, *(stage for stage in changing if stage)),
            invariant=(*fixed.invariant, *(stage for stage in invariant if stage)),
        )

    def _uniforms(self, slots: np.ndarray) -> np.ndarray:
        uniforms = np.zeros(len(slots), dtype=np.float64)
        unseeded = ~self._seeded[slots]
        uniforms[unseeded] = self._stream.random(int(unseeded.sum()))
        return uniforms

    def _races(self, slots: np.ndarray) -> tuple[tuple[int, np.uint64], ...]:
        rows = np.flatnonzero(self._seeded[slots])
        if not len(rows):
            return ()
        own = slots[rows]
        lengths = [len(self._requests[slot].output_token_ids) for slot in own]  # type: ignore[union-attr]
        keys = draw_keys(self._seed[own], np.array(lengths, dtype=np.uint64))
        return tuple(zip(rows.tolist(), keys, strict=True))

    def _filters(self, drawn: Rows) -> TopKTopP | None:
        k, p = self._top_k[drawn.slots], self._top_p[drawn.slots]
        has_k, has_p = k < self.vocab_size, p < 1
        if not (has_k.any() or has_p.any()):
            return None
        wanted = np.where(has_k, k + 1, np.where(has_p, P_WINDOW, 1))
        window = int(wanted[wanted <= MAX_WINDOW].max(initial=0)) or self.vocab_size
        return TopKTopP(k_S=drawn.tensor(k), p_S=drawn.tensor(p), window=window)

    def _logprob_plan(self, rows: Rows) -> LogprobPlan | None:
        counts = self._num_logprobs[rows.slots]
        asking = (counts != _NO_LOGPROBS).nonzero()[0]
        if not len(asking):
            return None
        requests = [self._requests[slot] for slot in rows.slots[asking]]
        return LogprobPlan(
            rows=rows.tensor(asking),
            counts=counts[asking].tolist(),
            token_ids=[list(request.params.logprob_token_ids or ()) for request in requests if request],
        )


def _num_logprobs(params: SamplingParams) -> int:
    if params.logprobs is not None:
        return params.logprobs
    return 0 if params.logprob_token_ids else _NO_LOGPROBS
