"""The engine core: scheduler and executor, one step at a time. Both front ends drive this and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from treadle.codegen.bundle import open_bundle
from treadle.codegen.counters import COUNTERS
from treadle.ir.errors import EngineDeadError, UserError
from treadle.runtime.config import EngineConfig
from treadle.runtime.engine.compile_watch import watch
from treadle.runtime.engine.model_info import ModelInfo
from treadle.runtime.engine.renderer_of import renderer_of
from treadle.runtime.executor.interface import WorkerInfo
from treadle.runtime.executor.names import executor_name
from treadle.runtime.executor.selection import chosen_executor, select_executor
from treadle.runtime.protocol import CoreOutput, CoreOutputs, CoreRequest, SchedulerStats
from treadle.runtime.request import FinishReason, Request, RequestStatus
from treadle.runtime.scheduler.config import SchedulerConfig
from treadle.runtime.scheduler.output import SchedulerOutput
from treadle.runtime.scheduler.scheduler import Scheduler
from treadle.runtime.start_phases import phase_ended
from treadle.runtime.structured.manager import StructuredOutputManager
from treadle.runtime.structured.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

UTILITIES = ("stats", "reset_prefix_cache", "pause", "resume", "supported_tasks", "check_integrity", "is_sleeping")
"""The methods a front end may call by name."""


GRAMMAR_WAIT_SECONDS = 0.02
"""Longest pause of a core that has nothing but requests whose grammars are being compiled."""


class EngineCore:
    """Ready once constructed. A request that cannot be served ends with an error; an error in a step ends the core."""

    def __init__(self, config: EngineConfig):
        self.config = config = replace(config, executor=chosen_executor(config))
        self.executor = select_executor(config.executor)(config)
        worker = self.executor.start()
        phase_ended("start workers")
        self.structured = StructuredOutputManager(
            config,
            lambda: _vocabulary(config, worker),
            synchronous=self.executor.externally_launched,
        )
        promoters = {RequestStatus.WAITING_FOR_GRAMMAR: self.structured.is_ready}
        self.scheduler = Scheduler(
            _scheduler_config(config, worker), worker.plan.groups, worker.plan.num_blocks, promoters
        )
        self.info = _model_info(config, worker, self.executor.supported_tasks)
        self.dead_reason: str | None = None
        self._rejected: list[CoreOutput] = []
        self._compiled_before = COUNTERS.compilations
        watch.arm()
        _log_start(self.info)
        phase_ended("build the scheduler")

    def add_request(self, request: CoreRequest) -> None:
        """Queues a request. One that the scheduler refuses ends with the next step's outputs, as an error."""
        live = Request(request)
        try:
            if live.request_id not in self.scheduler.requests:  # otherwise the scheduler refuses it
                self.structured.start(live)
            self.scheduler.add_request(live)
        except UserError as error:
            if live.request_id not in self.scheduler.requests:
                self.structured.forget(live.request_id)
            self.reject(request.request_id, str(error))

    def reject(self, request_id: str, error: str) -> None:
        """Ends a request that never got into the scheduler."""
        self._rejected.append(
            CoreOutput(request_id=request_id, new_token_ids=[], finish_reason=FinishReason.ERROR.value, error=error)
        )

    def abort(self, request_ids: Iterable[str]) -> list[CoreOutput]:
        """Ends requests; unknown ids are ignored. Returns the last output of each."""
        request_ids = list(request_ids)
        for request_id in request_ids:
            self.structured.forget(request_id)
        return self.scheduler.finish_requests(request_ids, FinishReason.ABORT)

    def abort_all(self) -> list[CoreOutput]:
        """Ends every live request."""
        return self.abort(list(self.scheduler.requests))

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._rejected) or self.scheduler.has_requests()

    @property
    def has_requests(self) -> bool:
        """Whether a request still waits for output."""
        return bool(self._rejected) or self.scheduler.has_unfinished_requests()

    def step(self) -> CoreOutputs:
        """Schedules, runs and settles one step. Raises EngineDeadError, now and from now on, if that fails."""
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)
        for failure in self.structured.collect():
            self.scheduler.finish_requests(failure.request_id, FinishReason.ERROR)
            self.reject(failure.request_id, failure.error)
        rejected, self._rejected = self._rejected, []
        try:
            outputs = self._run_step() if self.scheduler.has_requests() else []
        except Exception as error:
            self.dead_reason = f"a step failed: {type(error).__name__}: {error}"
            raise EngineDeadError(self.dead_reason) from error
        return CoreOutputs(outputs=[*rejected, *outputs])

    def check_health(self) -> None:
        """Raises EngineDeadError, now and from now on, if a worker is gone. For the time between steps."""
        try:
            self.executor.check_health()
        except EngineDeadError as error:
            self.dead_reason = str(error)
            raise

    def _run_step(self) -> list[CoreOutput]:
        step = self.scheduler.schedule()
        self.executor.execute_model(step)
        mask = self.structured.bitmask(self._sampling(step))
        outputs = self.scheduler.update_from_output(step, self.executor.sample_tokens(mask))
        if not step.num_scheduled_tokens and self.scheduler.all_wait_for_grammars:
            self.structured.wait(GRAMMAR_WAIT_SECONDS)
        return outputs

    def _sampling(self, step: SchedulerOutput) -> list[tuple[Request, Sequence[int]]]:
        """The requests that sample in a step, with their drafts."""
        live = [self.scheduler.requests[req_id] for req_id in step.num_scheduled_tokens]
        drafts = step.spec_token_ids
        return [(r, drafts.get(r.request_id, ())) for r in live if r.num_computed_tokens >= r.num_tokens]

    # Utilities

    def call(self, method: str, args: Iterable[Any] = ()) -> Any:
        """Calls one of UTILITIES. Raises UserError that lists them for another name."""
        if method not in UTILITIES:
            raise UserError(f"the engine core has no utility {method!r}; choose one of: {', '.join(UTILITIES)}")
        return getattr(self, method)(*args)

    def stats(self) -> SchedulerStats:
        """Gauges of this moment and totals since the start."""
        stats = self.scheduler.stats()
        stats.compilations_after_ready = max(watch.count, COUNTERS.compilations - self._compiled_before)
        stats.graph_modes = self.executor.collective_rpc("graph_modes")[0]
        return stats

    def reset_prefix_cache(self, force: bool = False) -> bool:
        """See Scheduler."""
        return self.scheduler.reset_prefix_cache(force)

    def pause(self) -> None:
        """Admits no request from now on; running ones go on."""
        self.scheduler.pause()

    def resume(self) -> None:
        """Ends a pause."""
        self.scheduler.resume()

    def supported_tasks(self) -> list[str]:
        """What the model can be asked for."""
        return self.executor.supported_tasks

    def is_sleeping(self) -> bool:
        """Whether any memory was given back by sleep mode."""
        return bool(self.executor.sleeping_tags)

    def check_integrity(self) -> None:
        """Asserts that no request, block or slot is lost."""
        self.scheduler.check_integrity()

    def shutdown(self) -> None:
        """Ends the executor and what compiles grammars. May be called twice."""
        self.structured.shutdown()
        self.executor.shutdown()


def _scheduler_config(config: EngineConfig, worker: WorkerInfo) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_active_seqs=config.max_num_active_seqs,
        max_num_batched_tokens=worker.max_num_batched_tokens,
        max_model_len=worker.plan.max_model_len,
        policy=config.scheduling_policy,
        enable_chunked_prefill=config.enable_chunked_prefill,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        adaptive_prefill_threshold=config.adaptive_prefill_threshold,
        full_sequence_must_fit=config.full_sequence_must_fit,
        watermark=config.watermark,
        enable_prefix_caching=config.enable_prefix_caching,
        prefix_hash=config.prefix_hash,
    )


def _vocabulary(config: EngineConfig, worker: WorkerInfo) -> Vocabulary:
    """The tokens of the bundle, read when the first constrained request comes. Raises UserError if it has none."""
    renderer = renderer_of(open_bundle(config.bundle, verify_key=config.verify_key, for_loading=False))
    return Vocabulary.of(renderer, worker.spec.vocab_size, config.reasoning_parser)


def _model_info(config: EngineConfig, worker: WorkerInfo, tasks: list[str]) -> ModelInfo:
    return ModelInfo(
        name=config.served_model_name or worker.spec.name,
        architecture=worker.spec.architecture,
        vocab_size=worker.spec.vocab_size,
        max_model_len=worker.plan.max_model_len,
        dtype=worker.spec.dtype,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=worker.max_num_batched_tokens,
        block_size=config.block_size,
        num_blocks=worker.plan.num_blocks,
        kv_cache_bytes=worker.plan.num_bytes,
        kv_cache_reason=worker.plan.reason,
        attention_backends=worker.attention_backends,
        capture_support=worker.capture_support,
        num_threads=worker.num_threads,
        executor=executor_name(config.executor),
        tasks=tasks,
        enable_prefix_caching=config.enable_prefix_caching,
        notes=worker.notes,
    )


def _log_start(info: ModelInfo) -> None:
    logger.info(
        "engine core ready: %s, %d threads, attention %s, %d KV blocks of %d tokens, %.1f MiB (%s)",
        info.name,
        info.num_threads,
        ", ".join(info.attention_backends) or "none",
        info.num_blocks,
        info.block_size,
        info.kv_cache_bytes / 2**20,
        info.kv_cache_reason,
    )
    for what, reason in info.notes.items():
        logger.info("%s: %s", what, reason)
