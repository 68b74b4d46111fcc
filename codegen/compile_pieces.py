"""Turns unique pieces into artifacts: key, look up in the store, build what is missing, several at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from treadle.codegen.backends import Backend, PieceJob
from treadle.codegen.counters import COUNTERS
from treadle.codegen.key import ArtifactKey, Pairs, pairs
from treadle.codegen.ranges import TokenRange
from treadle.codegen.store import Store, StoredObject
from treadle.codegen.target import Target
from treadle.ir.graph import Graph
from treadle.ir.hashing import canonical_text, structural_hash
from treadle.ir.types import T, TensorType


@dataclass(frozen=True, kw_only=True)
class KeyContext:
    """What all keys of one compile share."""

    pipeline: tuple[str, ...]
    target: Target
    toolchain: Mapping[str, str]
    plugins: Pairs = ()


@dataclass(frozen=True, kw_only=True)
class CompiledPiece:
    """A unique piece and its artifacts. `ir_hash` is the hash of its canonical text."""

    name: str
    graph: Graph
    ir_hash: str
    format: str
    suffix: str
    artifacts: Mapping[TokenRange, StoredObject]

    @property
    def tokens_from(self) -> tuple[int, int] | None:
        return tokens_from(self.graph)


def tokens_from(graph: Graph) -> tuple[int, int] | None:
    """Input and axis that hold the token count; None for a graph without T."""
    for position, value in enumerate(graph.inputs):
        if isinstance(value.type, TensorType):
            for axis, dim in enumerate(value.type.shape):
                if dim == T:
                    return position, axis
    return None


def piece_key(ir_hash: str, token_range: TokenRange, backend: Backend, context: KeyContext) -> ArtifactKey:
    """The key of one artifact; it has no field for anything else."""
    return ArtifactKey(
        kind="piece",
        ir=ir_hash,
        start=token_range.start,
        end=token_range.end,
        backend=backend.name,
        pipeline=context.pipeline,
        options=pairs(backend.options()),
        target=context.target.name,
        features=context.target.features,
        toolchain=pairs(context.toolchain),
        plugins=context.plugins,
    )


def default_jobs() -> int:
    """One for each core this process may use."""
    return max(1, len(os.sched_getaffinity(0)))


def compile_pieces(
    pieces: Mapping[str, Graph],
    ranges: Sequence[TokenRange],
    backend: Backend,
    context: KeyContext,
    store: Store,
    *,
    jobs: int,
    on_start: Callable[[int, int, str], None] = lambda number, total, label: None,
    report: Callable[[str], None] = lambda reason: None,
) -> list[CompiledPiece]:
    """Compiles every piece for every range; `on_start(k, n, label)` is called as each begins (R-9.20).

    A piece without T is compiled once. The graphs stay as they are (R-9.7). Raises ArtifactError naming piece and
    range for the first failure, after those under way have ended; what was compiled stays in the store.
    """
    planned = []
    for name, graph in pieces.items():
        wanted = list(ranges) if tokens_from(graph) is not None else [TokenRange(1, 1)]
        text, ir_hash = canonical_text(graph), structural_hash(graph)
        sources = tuple(str(node.source) for node in graph.nodes)
        planned += [
            (PieceJob(name=name, ir=text, range=token_range, sources=sources), ir_hash) for token_range in wanted
        ]

    def one(number: int, job: PieceJob, ir_hash: str) -> StoredObject:
        on_start(number, len(planned), job.label)
        key = piece_key(ir_hash, job.range, backend, context)
        found, built = store.find_or_build(key, lambda out: backend.build(job, out), job.label, report)
        COUNTERS.add("compilations" if built else "store_hits")
        return found

    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(one, number, job, ir_hash) for number, (job, ir_hash) in enumerate(planned, 1)]
        try:
            done = [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    artifacts: dict[str, dict[TokenRange, StoredObject]] = {name: {} for name in pieces}
    for (job, _), stored in zip(planned, done, strict=True):
        artifacts[job.name][job.range] = stored
    hashes = {job.name: ir_hash for job, ir_hash in planned}
    return [
        CompiledPiece(
            name=name,
            graph=graph,
            ir_hash=hashes[name],
            format=backend.format,
            suffix=backend.suffix,
            artifacts=artifacts[name],
        )
        for name, graph in pieces.items()
    ]
