"""The step under construction: budgets, who is scheduled, and what the worker has to be told."""

from __future__ import annotations

from dataclasses import dataclass, field

from treadle.runtime.request import Request
from treadle.runtime.runner_output import RunnerOutput
from treadle.runtime.scheduler.config import SchedulerConfig
from treadle.runtime.scheduler.kv_manager import KVCacheBlocks
from treadle.runtime.scheduler.output import CachedRequestData, GroupBlockIds, NewRequestData


@dataclass(slots=True)
class Scheduled:
    """One request's share of a step, kept until its output is back.

    `num_expected` is the most tokens that can come back: 0 while the prompt is unfinished, else 1 and the drafts.
    `num_preemptions` tells outputs from before a preemption, which are stale, from those after it.
    """

    request: Request
    num_tokens: int
    num_expected: int
    drafts: list[int]
    new_blocks: KVCacheBlocks
    num_preemptions: int

    def charge(self, step: int, config: SchedulerConfig) -> None:
        """Counts the tokens as computed, and with asynchronous scheduling the outputs as on their way."""
        request = self.request
        request.num_computed_tokens += self.num_tokens
        request.last_scheduled_step = step
        request.spec_token_ids = []
        if config.async_scheduling and self.num_expected:
            request.num_output_placeholders += self.num_expected
            request.num_in_flight_tokens += self.num_expected
            request.next_decode_eligible_step = step + config.decode_interval

    def settle(self, tokens: list[int], result: RunnerOutput, config: SchedulerConfig) -> list[int]:
        """Brings the counters up to date with what came back; returns the tokens that count."""
        request = self.request
        assert bool(self.num_expected) == bool(tokens) and len(tokens) <= self.num_expected, (
            f"{request}: {len(tokens)} tokens came back, {self.num_expected} were expected"
        )
        num_in_flight = self.num_expected if config.async_scheduling else 0
        if self.num_preemptions != request.num_preemptions:  # stale: the counters have started anew since
            dropped = request.drop_stale_output or request.awaits_prompt_logprobs
            request.num_stale_output_tokens -= num_in_flight
            request.drop_stale_output = request.drop_stale_output and request.num_stale_output_tokens > 0
            return [] if dropped else tokens
        request.num_output_placeholders -= num_in_flight
        request.num_in_flight_tokens -= num_in_flight
        request.num_computed_tokens -= self.num_expected - len(tokens)  # rejected drafts
        request.add_prompt_logprobs(result.prompt_logprobs.get(request.request_id, []))
        return tokens


@dataclass(slots=True)
class StepPlan:
    """Two budgets: tokens that may be handed out, and tokens that the runner will compute (draft slots included)."""

    index: int
    token_budget: int
    input_budget: int
    draft_slots: int
    threshold: int
    scheduled: dict[str, Scheduled] = field(default_factory=dict)
    admitted: list[Request] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    def clamp(self, num_new: int) -> int:
        """Returns how many of `num_new` tokens one request may get now; 0 or less if none."""
        if self.threshold:
            num_new = min(num_new, self.threshold)
        return min(num_new, self.token_budget, self.input_budget - self.draft_slots)

    def add(self, request: Request, num_new: int, blocks: KVCacheBlocks) -> None:
        """Schedules a request and charges both budgets. Drafts beyond what is scheduled are cut."""
        reached = request.num_computed_tokens + num_new
        known = request.num_tokens + request.num_output_placeholders
        drafts = request.spec_token_ids[: max(reached - known, 0)]
        num_expected = 1 + len(drafts) if reached >= known else 0
        entry = Scheduled(request, num_new, num_expected, drafts, blocks, request.num_preemptions)
        self.scheduled[request.request_id] = entry
        self.token_budget -= num_new
        self.input_budget -= num_new + self.draft_slots

    def refund(self, request: Request) -> None:
        """Takes a request out of the step again, if it is in it, and gives back what it was charged."""
        entry = self.scheduled.pop(request.request_id, None)
        if entry is not None:
            self.token_budget += entry.num_tokens
            self.input_budget += entry.num_tokens + self.draft_slots

    def is_prefilling(self, request: Request) -> bool:
        """Whether some of the request's known tokens are still not computed after this step."""
        entry = self.scheduled.get(request.request_id)
        return request.num_computed_tokens + (entry.num_tokens if entry else 0) < request.num_tokens

    def cached_data(self, resumed_block_ids: dict[str, GroupBlockIds]) -> CachedRequestData:
        """Returns the requests that the worker knows; `resumed_block_ids` has the whole tables of those resumed."""
        data = CachedRequestData(resumed_req_ids=set(resumed_block_ids))
        new = {request.request_id for request in self.admitted}
        for req_id, entry in self.scheduled.items():
            if req_id in new:
                continue
            data.req_ids.append(req_id)
            data.num_computed_tokens.append(entry.request.num_computed_tokens)
            if req_id in resumed_block_ids:
                data.new_block_ids.append(resumed_block_ids[req_id])
                data.new_token_ids[req_id] = list(entry.request.output_token_ids)
            else:
                data.new_block_ids.append(entry.new_blocks.block_ids() if entry.new_blocks else None)
        return data


def new_data(request: Request, block_ids: GroupBlockIds) -> NewRequestData:
    """Returns all that the worker has to know of a request it has not seen."""
    return NewRequestData(
        req_id=request.request_id,
        prompt_token_ids=list(request.prompt_token_ids),
        sampling_params=request.sampling_params,
        block_ids=block_ids,
        num_computed_tokens=request.num_computed_tokens,
        lora_name=request.lora_name,
    )
