"""Decides, step by step, which requests advance and by how many tokens. Imports no torch.

There is no prefill phase and no decode phase: each step lets the computed tokens of a request catch up with its known
ones. Running requests go first, then waiting ones with what budget is left; preemption comes last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from treadle.ir.errors import TreadleError, UserError
from treadle.runtime.kv_specs import KVCacheGroup
from treadle.runtime.protocol import CoreOutput, SchedulerStats
from treadle.runtime.request import BLOCKED, FinishReason, Request, RequestStatus
from treadle.runtime.runner_output import RunnerOutput
from treadle.runtime.scheduler.config import SchedulerConfig
from treadle.runtime.scheduler.kv_manager import KVCacheBlocks, KVManager
from treadle.runtime.scheduler.output import SchedulerOutput
from treadle.runtime.scheduler.request_limits import check_end, check_servable
from treadle.runtime.scheduler.request_queue import ORDERS, RequestQueue, priority_order
from treadle.runtime.scheduler.step_plan import Scheduled, StepPlan, new_data

Promoter = Callable[[Request], bool]


class Scheduler:
    """Owns every live request. A request is in exactly one of `waiting`, `skipped_waiting` and `running`.

    Use: `add_request`, then in a loop `schedule()`, run the step, `update_from_output()`; while a step that has
    nothing to run comes out, requests may still be unfinished. With `async_scheduling`, `schedule()` may be called
    again before the last output is back; outputs come back in the order of their steps.

    `promoters` maps a blocked status to the test that says whether a request in it may be scheduled now.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        groups: Sequence[KVCacheGroup],
        num_blocks: int,
        promoters: Mapping[RequestStatus, Promoter] | None = None,
    ):
        self.config = config
        self.kv = KVManager(config, groups, num_blocks)
        self.paused = False
        self._order = ORDERS[config.policy]
        self._promoters = dict(promoters or {})
        self.requests: dict[str, Request] = {}
        self.waiting = RequestQueue(self._order)
        self.skipped_waiting = RequestQueue(self._order)
        self.running: list[Request] = []
        self._in_flight: dict[int, dict[str, Scheduled]] = {}  # step -> what its output has to settle
        self._finished: set[str] = set()  # what the worker has to be told with the next step
        self._preempted: set[str] = set()
        self._num_arrivals = 0
        self._next_step = 0
        self._totals = SchedulerStats()

    # Requests in and out

    def add_request(self, request: Request) -> None:
        """Queues a request. Raises UserError if its id is live, or if it could never be served to its end."""
        if request.request_id in self.requests:
            raise UserError(f"request id {request.request_id!r} is in use by a live request; choose another one")
        check_servable(request, self.kv)
        request.queue_number = self._num_arrivals
        self._num_arrivals += 1
        if self.kv.hasher is not None:
            request.attach_hasher(self.kv.hasher)
        self.requests[request.request_id] = request
        (self.skipped_waiting if request.is_blocked else self.waiting).push(request)

    def finish_requests(
        self, request_ids: str | Iterable[str], reason: FinishReason | str = FinishReason.ABORT
    ) -> list[CoreOutput]:
        """Ends requests in any status; ids that are not live are ignored. Returns the last output of each."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        ended = [self.requests[req_id] for req_id in dict.fromkeys(ids) if req_id in self.requests]
        for request in ended:
            self._finish(request, FinishReason(reason))
        return [self._output(request, []) for request in ended]

    def _finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        self._leave_container(request)
        request.finish(reason, stop_reason)
        self.kv.free(request)
        del self.requests[request.request_id]
        if request.last_scheduled_step >= 0:
            self._finished.add(request.request_id)
        self._totals.num_aborted += reason is FinishReason.ABORT

    def _leave_container(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            self.skipped_waiting.remove(request)

    def set_draft_tokens(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Proposes tokens for the next step of running requests; padding (-1) ends a proposal."""
        for req_id, tokens in drafts.items():
            request = self.requests.get(req_id)
            if request is not None and request.status is RequestStatus.RUNNING:
                end = list(tokens).index(-1) if -1 in tokens else len(tokens)
                request.spec_token_ids = list(tokens[: min(end, self.config.num_lookahead_tokens)])

    # One step

    def schedule(self) -> SchedulerOutput:
        """Plans the next step and counts its tokens as computed."""
        plan = StepPlan(
            index=self._next_step,
            token_budget=self.config.max_num_scheduled_tokens,
            input_budget=self.config.max_num_batched_tokens,
            draft_slots=self.config.num_draft_slots,
            threshold=self._prefill_threshold(),
        )
        self._next_step += 1
        self._schedule_running(plan)
        if not plan.preempted and not self.paused:
            self._schedule_waiting(plan)
        return self._commit(plan)

    def _prefill_threshold(self) -> int:
        """Returns the most tokens that one request may get in this step; 0 for no such limit."""
        num_waiting = 0 if self.paused else len(self.waiting) + sum(not r.is_blocked for r in self.skipped_waiting)
        num_eligible = len(self.running) + min(num_waiting, self.config.max_active - len(self.running))
        if num_eligible <= 1:
            return 0
        threshold = self.config.long_prefill_token_threshold
        if self.config.adaptive_prefill_threshold:
            threshold = max(threshold, self.config.max_num_batched_tokens // num_eligible)
        return threshold

    def _num_missing(self, request: Request, num_hit: int = 0) -> int:
        """Returns how many tokens separate the request from catching up; those past its last token do not count."""
        computed = request.num_computed_tokens + num_hit
        known = request.num_tokens_with_spec + request.num_output_placeholders
        return min(known, request.max_total_tokens(self.config.max_model_len) - 1) - computed

    def _schedule_running(self, plan: StepPlan) -> None:
        for request in list(self.running):
            if plan.token_budget <= 0:
                return
            if request.status is not RequestStatus.RUNNING or plan.index < request.next_decode_eligible_step:
                continue
            num_new = plan.clamp(self._num_missing(request))
            if num_new <= 0:
                continue
            blocks = self._allocate_or_preempt(request, num_new, plan)
            if blocks is None:
                return
            plan.add(request, num_new, blocks)

    def _allocate_or_preempt(self, request: Request, num_new: int, plan: StepPlan) -> KVCacheBlocks | None:
        """Returns the new blocks; None if nothing else could be preempted, perhaps after preempting `request` itself."""
        while (blocks := self.kv.allocate(request, num_new)) is None:
            victim = self._pick_victim()
            if victim is None:
                return None
            plan.refund(victim)
            plan.preempted.append(victim)
            self._preempt(victim)
            if victim is request:
                return None
        return blocks

    def _pick_victim(self) -> Request | None:
        """Returns the least important running request among those whose blocks can be free at once."""
        useful = [request for request in self.running if self.kv.can_free_now(request)]
        if not useful:
            return None
        return max(useful, key=priority_order) if self.config.policy == "priority" else useful[-1]

    def _preempt(self, request: Request, drop_stale_output: bool = False) -> None:
        self.running.remove(request)
        self.kv.free(request)
        request.preempt(drop_stale_output)
        self.waiting.push(request)
        self._preempted.add(request.request_id)
        self._totals.num_preemptions += 1

    def _schedule_waiting(self, plan: StepPlan) -> None:
        passed_over: list[Request] = []
        while plan.token_budget > 0 and (queue := self._next_queue()) is not None:
            if len(self.running) >= self.config.max_active or plan.input_budget <= plan.draft_slots:
                break
            request = queue.peek()
            if not self._promote(request):
                passed_over.append(queue.pop())
            elif self._admit(request, plan):
                queue.pop()
            else:
                break
        for request in passed_over:
            self.skipped_waiting.push(request)

    def _next_queue(self) -> RequestQueue | None:
        """Returns the queue whose head is next in policy order."""
        queues = [queue for queue in (self.waiting, self.skipped_waiting) if queue]
        return min(queues, key=lambda queue: self._order(queue.peek()), default=None)

    def _promote(self, request: Request) -> bool:
        """Returns whether a request may be scheduled now; a blocked one whose wait is over becomes schedulable."""
        if request.status in BLOCKED and self._promoters[request.status](request):
            request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
        return not request.is_blocked

    def _admit(self, request: Request, plan: StepPlan) -> bool:
        """Lets a waiting request run, if budget and blocks suffice; never at the expense of a running one."""
        hit = self.kv.longest_hit(request) if request.num_computed_tokens == 0 else self.kv.nothing
        missing = self._num_missing(request, hit.num_tokens)
        num_new = plan.clamp(missing)
        if num_new <= 0 or (num_new < missing and not self.config.enable_chunked_prefill):
            return False
        whole = self.config.full_sequence_must_fit
        blocks = self.kv.allocate(request, num_new, hit, keep_free=self._blocks_to_keep(plan), whole=whole)
        if blocks is None:
            return False
        (plan.resumed if request.status is RequestStatus.PREEMPTED else plan.admitted).append(request)
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        request.num_computed_tokens += hit.num_tokens
        self._count_hit(request, hit.num_tokens)
        plan.add(request, num_new, blocks)
        # Nothing is preempted after this point, so these tokens will be computed: later admissions may hit them.
        self.kv.remember(request, request.num_computed_tokens + num_new)
        return True

    def _blocks_to_keep(self, plan: StepPlan) -> int:
        """Returns how many free blocks an admission has to leave to those that run already."""
        watermark = math.ceil(self.config.watermark * self.kv.pool.num_usable) if plan.scheduled else 0
        if not self.config.reserve_prefill_blocks:
            return watermark
        return watermark + sum(self.kv.missing_blocks(r) for r in self.running if plan.is_prefilling(r))

    def _count_hit(self, request: Request, num_hit: int) -> None:
        if request.num_cached_tokens is not None:
            return
        request.num_cached_tokens = num_hit
        if self.config.enable_prefix_caching and request.reads_prefix_cache:
            self._totals.prefix_queries += request.num_prompt_tokens
            self._totals.prefix_hits += num_hit

    def _commit(self, plan: StepPlan) -> SchedulerOutput:
        output = SchedulerOutput(
            step=plan.index,
            new=[new_data(request, self.kv.block_ids(request)) for request in plan.admitted],
            cached=plan.cached_data({request.request_id: self.kv.block_ids(request) for request in plan.resumed}),
            num_scheduled_tokens={req_id: entry.num_tokens for req_id, entry in plan.scheduled.items()},
            total_num_scheduled_tokens=sum(entry.num_tokens for entry in plan.scheduled.values()),
            spec_token_ids={req_id: entry.drafts for req_id, entry in plan.scheduled.items() if entry.drafts},
            finished_req_ids=self._finished,
            preempted_req_ids=self._preempted,
            block_ids_to_zero=self.kv.pop_new_block_ids(),
        )
        self._finished, self._preempted = set(), set()
        for entry in plan.scheduled.values():
            entry.charge(plan.index, self.config)
            self.kv.remember(entry.request, entry.request.num_computed_tokens)
        if plan.scheduled:
            self._in_flight[plan.index] = plan.scheduled
            self._totals.num_steps += 1
        return output

    # What came back

    def update_from_output(self, scheduled: SchedulerOutput, result: RunnerOutput) -> list[CoreOutput]:
        """Settles one step: appends tokens, corrects for rejected drafts, ends requests, releases fenced blocks.

        Returns one output for each request that got a token. A request that ended since the step was scheduled,
        by an abort or by an earlier step's stop token, is passed over.
        """
        entries = self._in_flight.pop(scheduled.step, {})
        sampled = dict(zip(result.req_ids, result.sampled_token_ids, strict=True))
        assert sampled.keys() >= entries.keys(), f"no output for {sorted(entries.keys() - sampled.keys())}"
        outputs = []
        for req_id, entry in entries.items():
            if entry.request.is_finished:
                continue
            tokens = self._append(entry.request, entry.settle(sampled[req_id], result, self.config))
            if tokens:
                outputs.append(self._output(entry.request, tokens, result))
        self.kv.step_processed(scheduled.step)
        return outputs

    def _append(self, request: Request, tokens: list[int]) -> list[int]:
        """Appends tokens up to the first that ends the request; returns those appended."""
        for i, token in enumerate(tokens):
            request.append_output(token)
            if (end := check_end(request, token, self.config.max_model_len)) is not None:
                self._finish(request, *end)
                return tokens[: i + 1]
        return tokens

    def _output(self, request: Request, tokens: list[int], result: RunnerOutput | None = None) -> CoreOutput:
        self._totals.generation_tokens += len(tokens)
        if tokens and request.num_output_tokens == len(tokens):
            self._totals.prompt_tokens += request.num_prompt_tokens
        rows = result.logprobs.get(request.request_id) if result else None
        return CoreOutput(
            request_id=request.request_id,
            new_token_ids=tokens,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            error=request.error,
            fault=request.error is not None,
            logprobs=rows[: len(tokens)] if rows is not None else None,
            prompt_logprobs=request.take_prompt_logprobs() if tokens else None,
            num_cached_tokens=request.num_cached_tokens or 0,
        )

    # Operations

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    @property
    def all_wait_for_grammars(self) -> bool:
        """Whether nothing can run before a grammar is compiled."""
        waits = RequestStatus.WAITING_FOR_GRAMMAR
        return not self.running and not self.waiting and any(r.status is waits for r in self.skipped_waiting)

    def has_requests(self) -> bool:
        """Also true while the worker has to be told of finished requests."""
        return bool(self.requests or self._finished)

    def pause(self) -> None:
        """Admits nobody from now on; running requests go on."""
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def reset_prefix_cache(self, force: bool = False) -> bool:
        """Forgets all cached content. Returns False, and does nothing, while blocks are in use.

        With `force` running requests are preempted first and start over; their outputs in flight are dropped.
        """
        if force:
            for request in list(self.running):
                self._preempt(request, drop_stale_output=True)
        return self.kv.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        """Returns gauges of this moment, and totals since the start."""
        totals = self._totals
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting) + len(self.skipped_waiting),
            num_blocks=self.kv.pool.num_usable,
            num_free_blocks=self.kv.num_free,
            kv_usage=self.kv.usage,
            prefix_queries=totals.prefix_queries,
            prefix_hits=totals.prefix_hits,
            num_preemptions=totals.num_preemptions,
            num_steps=totals.num_steps,
            num_aborted=totals.num_aborted,
            prompt_tokens=totals.prompt_tokens,
            generation_tokens=totals.generation_tokens,
        )

    def check_integrity(self) -> None:
        """Raises TreadleError if a request or a block is lost or doubled. Meant for idle moments: O(blocks)."""
        listed = [*self.waiting, *self.skipped_waiting, *self.running]
        if len(listed) != len(self.requests) or {id(r) for r in listed} != {id(r) for r in self.requests.values()}:
            raise TreadleError(f"{len(self.requests)} requests are live, but the queues and the running list hold {listed}")
        for request in self.running:
            if request.status is not RequestStatus.RUNNING:
                raise TreadleError(f"{request} is in the running list")
        self.kv.check_integrity({request.request_id for request in self.running})
