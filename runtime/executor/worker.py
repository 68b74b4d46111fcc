"""One worker: loads the model, takes memory for the cache, runs steps. Executors differ in where it lives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from treadle.ir.errors import ConfigError
from treadle.runtime.config import EngineConfig
from treadle.runtime.executor.interface import WorkerInfo
from treadle.runtime.executor.threads import apply_threads
from treadle.runtime.kv_specs import group_layers
from treadle.runtime.runner.attention_layers import AttentionLayers
from treadle.runtime.runner.kv_cache import CachePlan, available_memory, layer_specs, plan_cache
from treadle.runtime.runner.model import LoadedModel
from treadle.runtime.runner.model_runner import ModelRunner, RunnerConfig
from treadle.runtime.runner_output import RunnerOutput
from treadle.runtime.scheduler.output import SchedulerOutput
from treadle.runtime.start_phases import phase_ended
from treadle.runtime.structured.mask import GrammarMask

LoadModel = Callable[[EngineConfig], LoadedModel]


class Worker:
    """Holds one model on one device."""

    def __init__(self, config: EngineConfig, load: LoadModel, num_ranks: int = 1):
        """`num_ranks` workers share the memory of this machine."""
        self._config = config
        self._num_ranks = num_ranks
        self._load = load
        self._runner: ModelRunner | None = None

    @property
    def runner(self) -> ModelRunner:
        """The model runner; `start` makes it."""
        assert self._runner is not None, "the worker has not started"
        return self._runner

    def start(self) -> WorkerInfo:
        """Loads, sizes the cache by what memory is left then, and builds the runner."""
        config = self._config
        num_threads = apply_threads(config.num_threads)
        model = self._load(config)
        max_tokens = _within(config.max_num_batched_tokens, model.spec.max_num_batched_tokens, "max_num_batched_tokens")
        attention = AttentionLayers(
            model.attention_shapes(),
            dtype=model.spec.dtype,
            native=model.native,
            backend=config.attention_backend,
            block_size=config.block_size,
        )
        plan = self._plan(model)
        phase_ended("plan the cache")
        self._runner = ModelRunner(
            model,
            attention,
            RunnerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=max_tokens,
                max_model_len=plan.max_model_len,
                num_threads=num_threads,
                seed=config.seed,
                logprobs_mode=config.logprobs_mode,
                graph_setting=config.graph_mode,
                graph_keys=model.graph_keys,
            ),
            plan,
        )
        phase_ended("build the runner")
        return WorkerInfo(
            spec=replace(model.spec, max_model_len=plan.max_model_len),
            plan=plan,
            max_num_batched_tokens=max_tokens,
            num_threads=num_threads,
            attention_backends=attention.backend_names,
            capture_support=attention.capture_support.name,
            notes=_notes(attention, self._runner),
        )

    def _plan(self, model: LoadedModel) -> CachePlan:
        config = self._config
        specs = layer_specs(model.kv_layers, block_size=config.block_size, dtype=model.spec.dtype)
        return plan_cache(
            group_layers(specs, hybrid=not config.disable_hybrid_allocator),
            num_blocks=config.num_blocks,
            kv_cache_bytes=config.kv_cache_bytes,
            max_num_seqs=config.max_num_seqs,
            max_model_len=_within(config.max_model_len, model.spec.max_model_len, "max_model_len"),
            model_len_asked=config.max_model_len is not None,
            available=available_memory() // self._num_ranks,
        )

    def execute_model(self, step: SchedulerOutput) -> None:
        """See ModelRunner."""
        self.runner.execute_model(step)

    def sample_tokens(self, mask: GrammarMask | None = None) -> RunnerOutput:
        """See ModelRunner."""
        return self.runner.sample_tokens(mask)

    def supported_tasks(self) -> list[str]:
        """What the model can be asked for."""
        return ["generate"]

    def graph_modes(self) -> dict[str, int]:
        """How many steps ran in each mode."""
        return dict(self.runner.graph_modes)


def _notes(attention: AttentionLayers, runner: ModelRunner) -> dict[str, str]:
    """What was passed over or lowered, with the reason."""
    notes = {f"attention backend {name}": reason for name, reason in attention.passed_over.items()}
    able = runner.capabilities
    if able.reason:
        notes["graph_mode"] = f"{able.decode.name} for decode and {able.mixed.name} for other steps: {able.reason}"
    return notes


def _within(asked: int | None, limit: int, name: str) -> int:
    """What was asked for, or the bundle's limit. Raises ConfigError for more than the limit."""
    if asked is not None and asked > limit:
        raise ConfigError(f"{name}={asked} exceeds the {limit} that the bundle was compiled for; lower it or recompile")
    return limit if asked is None else asked
