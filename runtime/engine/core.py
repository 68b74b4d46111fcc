"""The engine core: scheduler and executor, one step at a time. Both front ends drive this and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from treadle.codegen.counters import COUNTERS
from treadle.ir.errors import EngineDeadError, UserError
from treadle.runtime.config import EngineConfig
from treadle.runtime.engine.compile_watch import watch
from treadle.runtime.engine.model_info import ModelInfo
from treadle.runtime.executor.interface import WorkerInfo
from treadle.runtime.executor.names import executor_name
from treadle.runtime.executor.selection import chosen_executor, select_executor
from treadle.runtime.protocol import CoreOutput, CoreOutputs, CoreRequest, SchedulerStats
from treadle.runtime.request import FinishReason, Request
from treadle.runtime.scheduler.config import SchedulerConfig
from treadle.runtime.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

UTILITIES = ("stats", "reset_prefix_cache", "pause", "resume", "supported_tasks", "check_integrity", "is_sleeping")
"""The methods a front end may call by name."""


class EngineCore:
    """Ready once constructed. A request that cannot be served ends with an error; an error in a step ends the core."""

    def __init__(self, config: EngineConfig):
        self.config = config = replace(config, executor=chosen_executor(config))
        self.executor = select_executor(config.executor)(config)
        worker = self.executor.start()
        self.scheduler = Scheduler(_scheduler_config(config, worker), worker.plan.groups, worker.plan.num_blocks)
        self.info = _model_info(config, worker, self.executor.supported_tasks)
        self.dead_reason: str | None = None
        self._rejected: list[CoreOutput] = []
        self._compiled_before = COUNTERS.compilations
        watch.arm()
        _log_start(self.info)

    def add_request(self, request: CoreRequest) -> None:
        """Queues a request. One that the scheduler refuses ends with the next step's outputs, as an error."""
        try:
            self.scheduler.add_request(Request(request))
        except UserError as error:
            self.reject(request.request_id, str(error))

    def reject(self, request_id: str, error: str) -> None:
        """Ends a request that never got into the scheduler."""
        self._rejected.append(
            CoreOutput(request_id=request_id, new_token_ids=[], finish_reason=FinishReason.ERROR.value, error=error)
        )

    def abort(self, request_ids: Iterable[str]) -> list[CoreOutput]:
        """Ends requests; unknown ids are ignored. Returns the last output of each."""
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
        return self.scheduler.update_from_output(step, self.executor.sample_tokens())

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
        """Ends the executor. May be called twice."""
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
