"""Compiles a model ahead of time into a bundle: read config, trace, passes, compile pieces, write bundle.

    source -> ir.trace -> passes.pipeline -> compile_pieces (through the store) -> write_bundle
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.codegen.backends import Backend, make_backend
from treadle.codegen.bundle import is_bundle
from treadle.codegen.choose_passes import pipeline_options, settle_passes, with_passes
from treadle.codegen.compile_natives import compile_natives
from treadle.codegen.compile_pieces import CompiledPiece, KeyContext, compile_pieces, default_jobs
from treadle.codegen.config import IR_DTYPES, CompileConfig, resolve_compile
from treadle.codegen.describe import CompiledModel, add_rank_weights, fill_bundle, used_params
from treadle.codegen.loader import Artifact, load_artifact
from treadle.codegen.locks import owned_scratch, sweep_scratch
from treadle.codegen.profit import Profit, choose_by_time
from treadle.codegen.progress import Progress, StageClock
from treadle.codegen.ranges import TokenRange, plan_ranges
from treadle.codegen.signing import sign
from treadle.codegen.store import Store, StoredObject
from treadle.codegen.store_location import default_store_root
from treadle.codegen.target import Target, resolve_target
from treadle.codegen.toolchain import toolchain, treadle_version
from treadle.codegen.used_plugins import key_pairs, used_plugins
from treadle.codegen.write_bundle import check_destination, writing_bundle
from treadle.ir.config import Resolved
from treadle.ir.errors import BundleError, ConfigError
from treadle.kernels.native import load_native, native_sources

if TYPE_CHECKING:
    import torch

    from treadle.ir.graph import Graph
    from treadle.ir.source import ModelSource
    from treadle.passes.pipeline import CompiledStages

_SCRATCH = "compile-"
MEASURED_LEVEL = 3
"""At this level fusions are timed on the target and left out where they do not pay."""
DEFAULT_MODEL_LEN = 2048
"""For a model that does not state how many positions it was made for."""


def compile(
    model: str | Path | torch.nn.Module,
    output: str | Path | None = None,
    *,
    store: str | Path | None = None,
    progress: Progress | None = None,
    passes: str | Sequence[str] = (),
    **settings: Any,
) -> Path:
    """Compiles `model` (a folder, a GGUF file, an alias or an nn.Module) and returns the path of the bundle.

    `output` defaults to `<model name>.bundle` in the current folder, `store` to the user's cache. `passes` adds passes to
    the pipeline, as `name{opt=1}`: it is the setting `extra_passes`. `settings` are the fields of CompileConfig. Raises ConfigError, ModelError, TraceError, ArtifactError or BundleError; then nothing is
    left at `output`, and what was compiled stays in the store.
    """
    if isinstance(model, str | Path) and str(model) and is_bundle(model):
        raise BundleError(f"{model} is a bundle, which is compiled already: `treadle serve {model}` runs it")
    resolved = settle_passes(resolve_compile(with_passes(settings, passes)))
    target = resolve_target(resolved.config.target)
    destination = Path(output) if output is not None else Path(default_output(model))
    check_destination(destination, force=resolved.config.force)
    if resolved.config.sign is not None:
        sign(b"", Path(resolved.config.sign))
    kept = Store(Path(store) if store is not None else default_store_root(os.environ))
    clock = StageClock(progress or Progress())
    sweep_scratch(_scratch_parent(), _SCRATCH)
    with owned_scratch(_scratch_parent(), _SCRATCH) as scratch:
        return _Compile(model, destination, resolved, target, kept, clock, progress or Progress(), scratch).run()


def trace_model(model: str | Path | torch.nn.Module, **settings: Any) -> Graph:
    """The graph that a compile of `model` with these settings starts from. Raises as `compile` does."""
    from treadle.ir.source import open_source
    from treadle.ir.trace import trace

    resolved = resolve_compile(settings)
    source = open_source(model)
    config = _settle(resolved, source, resolve_target(resolved.config.target)).config
    return trace(source, dtype=IR_DTYPES[config.dtype], max_tokens=config.max_num_batched_tokens)


def settle_settings(model: str | Path | torch.nn.Module, **settings: Any) -> Resolved[CompileConfig]:
    """The effective settings of a compile of `model`, which reads its configuration and no weight. Raises as `compile` does."""
    from treadle.ir.source import open_source

    resolved = settle_passes(resolve_compile(settings))
    settled = _settle(resolved, open_source(model), resolve_target(resolved.config.target))
    if settled.config.level == MEASURED_LEVEL:
        reason = "and those that prove slow on this machine while it compiles"
        settled = settled.override("measured", reason, disabled_passes=settled.config.disabled_passes)
    return settled


def default_output(model: object) -> str:
    """`<model name>.bundle`, relative to the current folder."""
    name = model if isinstance(model, str) else getattr(model, "name", type(model).__name__)
    stem = Path(str(name)).name.removesuffix(".gguf")
    return re.sub(r"[^\w.-]", "-", stem or "model") + ".bundle"


def _scratch_parent() -> Path:
    """Under the system's temporary folder, not the user's home: generated code may name the folder it was built in."""
    import tempfile

    return Path(tempfile.gettempdir()) / f"treadle-{os.getuid()}" / "scratch"


class _Compile:
    """One compile under way. The stages are the methods, in the order of `run`."""

    def __init__(
        self,
        model: str | Path | torch.nn.Module,
        destination: Path,
        resolved: Resolved[CompileConfig],
        target: Target,
        store: Store,
        clock: StageClock,
        progress: Progress,
        scratch: Path,
    ):
        self._model = model
        self._destination = destination
        self._resolved = resolved
        self._target = target
        self._store = store
        self._clock = clock
        self._progress = progress
        self._scratch = scratch
        self._profit: Profit | None = None
        self._architecture = ""

    def run(self) -> Path:
        config = self._resolved.config
        jobs = config.jobs or default_jobs()
        backend = make_backend(config.backend, self._target, self._scratch, jobs, config.compiler)
        with ThreadPoolExecutor(1) as pool:
            try:
                if not self._store.digests():
                    backend.start()  # an empty store means a cold compile: workers get ready while we trace
                natives = pool.submit(self._compile_natives)
                source = self._read_config()
                stages = self._trace_and_rewrite(source)
                if self._resolved.config.level == MEASURED_LEVEL:
                    stages = self._leave_out_slow_passes(stages, backend, jobs, natives)
                return self._compile_and_write(source, stages, backend, jobs, natives)
            finally:
                backend.close()

    def _compile_and_write(
        self,
        source: ModelSource,
        stages: CompiledStages,
        backend: Backend,
        jobs: int,
        natives: Future[dict[str, StoredObject]],
    ) -> Path:
        """Compiles the pieces while weights are written, which waits for the disk more than for a processor."""
        config = self._resolved.config
        # The inner pool ends before the writer: nobody writes into a scratch folder that is being removed.
        with writing_bundle(self._destination, force=config.force) as writer, ThreadPoolExecutor(1) as pool:
            params = used_params(stages.unified)
            world = config.tensor_parallel_size
            weights = pool.submit(add_rank_weights, writer, params, source, config.store_weights, world)
            pieces = self._compile_pieces(stages, backend, jobs)
            with self._clock.stage("native kernels"):
                built = natives.result()
            with self._clock.stage("write bundle"):
                compiled = CompiledModel(
                    source=source,
                    stages=stages,
                    pieces=pieces,
                    plugins=used_plugins(stages, source.architecture, backend),
                    natives=built,
                    weights=weights.result()[0],
                    rank_weights=weights.result()[1:],
                    resolved=self._resolved,
                    target=self._target,
                    toolchain={**toolchain(config.compiler), "treadle": treadle_version()},
                    profit=self._profit,
                )
                manifest = fill_bundle(writer, compiled)
            manifest.times = list(self._clock.times)
            return writer.finish(manifest, Path(config.sign) if config.sign is not None else None)

    def _read_config(self) -> ModelSource:
        from treadle.ir.source import open_source

        with self._clock.stage("read config"):
            source = open_source(self._model)
            self._resolved = _settle(self._resolved, source, self._target)
            self._architecture = source.architecture
        if not self._resolved.config.store_weights and source.kind == "module":
            raise ConfigError("store_weights=False needs a model on disk: an nn.Module cannot be found again later")
        return source

    def _trace_and_rewrite(self, source: ModelSource) -> CompiledStages:
        from treadle.ir.trace import trace
        from treadle.passes.pipeline import run_pipeline

        config = self._resolved.config
        with self._clock.stage("trace"):
            graph = trace(source, dtype=IR_DTYPES[config.dtype], max_tokens=config.max_num_batched_tokens)
        with self._clock.stage("passes"):
            stages = run_pipeline(graph, pipeline_options(config))
        _check_ranks(stages, config.tensor_parallel_size)
        for report in stages.reports:
            if report.warning:
                self._progress.note(report.warning)
        return stages

    def _leave_out_slow_passes(
        self, stages: CompiledStages, backend: Backend, jobs: int, natives: Future[dict[str, StoredObject]]
    ) -> CompiledStages:
        """Times the fusions on and off and rewrites again without those that do not pay (level 3)."""
        from treadle.passes.pipeline import run_pipeline

        widest = plan_ranges(self._resolved.config.max_num_batched_tokens)

        for name, built in natives.result().items():
            if native_sources()[name].exported:
                load_native(built.path, exported=True)

        def build(program: CompiledStages, pieces: Mapping[str, Graph]) -> dict[str, Artifact]:
            compiled = self._build(program, pieces, widest, backend, jobs)
            files = {piece.name: next(iter(piece.artifacts.values())).path for piece in compiled}
            return {name: load_artifact(path, backend.format) for name, path in files.items()}

        with self._clock.stage("measure passes"):
            self._profit = choose_by_time(stages, pipeline_options(self._resolved.config), self._target, build)
        for words in (self._profit.reason, *(f"{one.name} {one.reason}" for one in self._profit.choices)):
            if words:
                self._progress.note(words)
        slow = [choice for choice in self._profit.choices if not choice.kept]
        if not slow:
            return stages
        without = (*self._resolved.config.disabled_passes, *self._profit.left_out)
        reason = "; ".join(f"{choice.name} {choice.reason}" for choice in slow)
        self._resolved = self._resolved.override("measured", reason, disabled_passes=without)
        return run_pipeline(stages.traced, pipeline_options(self._resolved.config))

    def _compile_pieces(self, stages: CompiledStages, backend: Backend, jobs: int) -> list[CompiledPiece]:
        config = self._resolved.config
        ranges = plan_ranges(config.max_num_batched_tokens, config.exact_sizes)
        with self._clock.stage("compile pieces"):
            return self._build(stages, stages.unified.pieces, ranges, backend, jobs)

    def _build(
        self,
        stages: CompiledStages,
        pieces: Mapping[str, Graph],
        ranges: Sequence[TokenRange],
        backend: Backend,
        jobs: int,
    ) -> list[CompiledPiece]:
        config = self._resolved.config
        context = KeyContext(
            pipeline=stages.pipeline(),
            target=self._target,
            toolchain=toolchain(config.compiler, with_compiler=backend.needs_compiler),
            plugins=key_pairs(used_plugins(stages, self._architecture, backend)),
        )
        return compile_pieces(
            pieces,
            ranges,
            backend,
            context,
            self._store,
            jobs=jobs,
            on_start=self._progress.piece,
            report=self._progress.note,
        )

    def _compile_natives(self) -> dict[str, StoredObject]:
        config = self._resolved.config
        return compile_natives(
            self._target, self._store, compiler=config.compiler, report=self._progress.note
        )


def _check_ranks(stages: CompiledStages, world: int) -> None:
    """Raises ConfigError if a pass that was asked for cut the model over another number of ranks than it gets weights for."""
    from treadle.ir.ops.registry import get_op

    cut = {node.attrs["world"] for node in stages.fused.nodes if get_op(node.op).collective}
    if cut - {world}:
        raise ConfigError(
            f"the passes cut the model over {min(cut - {world})} ranks, but tensor_parallel_size is {world}; "
            "use --tensor-parallel-size, which runs them"
        )


HALF_PRECISION_ISAS = ("avx512",)
"""Where products of 16-bit matrices are not emulated; elsewhere they take up to 30 times as long as float32."""


def _choose_dtype(stated: str, target: Target) -> tuple[str, str, str]:
    """(who decided, why, dtype): the checkpoint's own, unless the target would only emulate it."""
    names = {ir: name for name, ir in IR_DTYPES.items()}
    if stated in ("bf16", "f16") and target.isa not in HALF_PRECISION_ISAS:
        return "target", f"the checkpoint is {names[stated]}, which {target.name} would emulate slowly", "float32"
    return "model", f"the checkpoint is {names[stated]}", names[stated]


def _settle(resolved: Resolved[CompileConfig], source: ModelSource, target: Target) -> Resolved[CompileConfig]:
    """Fills in what only the model can say, and lowers what it cannot do, with the reason."""
    config = resolved.config
    if config.dtype == "auto":
        source_name, reason, dtype = _choose_dtype(source.default_dtype, target)
        resolved = resolved.override(source_name, reason, dtype=dtype)
    stated = source.max_model_len
    if config.max_model_len is None:
        reason = f"the model has {stated} positions" if stated else "the model does not state its positions"
        return resolved.override("model", reason, max_model_len=stated or DEFAULT_MODEL_LEN)
    if stated is not None and config.max_model_len > stated:
        return resolved.override("model", f"the model has only {stated} positions", max_model_len=stated)
    return resolved
