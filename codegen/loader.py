"""Loads the pieces of a bundle and dispatches each call to the artifact for its token count.

Imports torch, but neither inductor nor transformers; nothing here can compile except `RangeDispatch` in compile mode,
which the engine does not use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from treadle.codegen.bundle import Bundle
from treadle.codegen.counters import COUNTERS
from treadle.codegen.manifest import PieceEntry
from treadle.codegen.ranges import RangeTable, TokenRange
from treadle.codegen.torch_private import NativePiece, load_package, open_native
from treadle.ir.errors import ArtifactError
from treadle.ir.registry import Registry
from treadle.kernels.native import NativeLibrary, load_native, native_sources

if TYPE_CHECKING:
    import torch

Tensors = list["torch.Tensor"]
Artifact = Callable[[Tensors], "Sequence[torch.Tensor]"]
"""Takes inputs, then params; empties the list it is given."""

FORMATS = Registry(
    "artifact format",
    {
        "aoti": "treadle.codegen.loader:load_aoti",
        "ir": "treadle.codegen.loader:load_ir",
        "tvm": "treadle.codegen.tvm_runtime:load_tvm",
    },
    group="treadle.artifact_formats",
)


def load_artifact(path: Path, format_: str) -> Artifact:
    """Loads a verified artifact file. Raises ArtifactError if it cannot be loaded."""
    artifact = FORMATS.get(format_)(path)
    COUNTERS.add("loads")
    return artifact


class AotiPackage:
    """An AOTInductor package: a call from Python, and on demand what C needs to call it."""

    def __init__(self, path: Path):
        self._path = path
        self._run = load_package(path).boxed_run

    def __call__(self, arguments: Tensors) -> Sequence[torch.Tensor]:
        return self._run(arguments)

    def native(self) -> NativePiece:
        """The package for a caller without the interpreter. Raises ArtifactError if it cannot run there."""
        return open_native(self._path)


def load_aoti(path: Path) -> Artifact:
    """An AOTInductor package."""
    return AotiPackage(path)


def load_ir(path: Path) -> Artifact:
    """IR text, run op by op in the bytes of its storage plan. Outputs are contiguous, as those of every artifact."""
    from treadle.ir.text import parse_graph
    from treadle.passes.bufferise import plan_graph
    from treadle.passes.bufferise_check import check_plan, run_planned

    graph = parse_graph(path.read_text())
    plan = plan_graph(graph)
    check_plan(graph, plan)
    count = len(graph.inputs)

    def call(arguments: Tensors) -> Sequence[torch.Tensor]:
        return [output.contiguous() for output in run_planned(graph, plan, arguments[:count], arguments[count:])]

    return call


class RangeDispatch:
    """A piece for every token count it was made for. Exactly one of two modes (R-9.19):

    precompiled: `artifacts` has something loaded for each of `ranges`; compile: `compile_range` makes it now, for all of
    them, before the first call.
    """

    def __init__(
        self,
        name: str,
        ranges: Sequence[TokenRange],
        tokens_from: tuple[int, int] | None,
        *,
        artifacts: Mapping[TokenRange, Artifact] | None = None,
        compile_range: Callable[[TokenRange], Artifact] | None = None,
    ):
        assert (artifacts is None) != (compile_range is None), "either artifacts or compile_range, not both or neither"
        if compile_range is not None:
            artifacts = {token_range: compile_range(token_range) for token_range in ranges}
        assert artifacts is not None
        if missing := [token_range for token_range in ranges if token_range not in artifacts]:
            raise ArtifactError(
                f"piece {name} has no artifact for {', '.join(map(str, missing))} tokens; "
                f"there are: {', '.join(map(str, artifacts)) or 'none'}; compile the bundle again"
            )
        self.name = name
        self.table: RangeTable[Artifact] = RangeTable(name, artifacts)
        self.tokens_from = tokens_from
        self._only = next(iter(artifacts.values())) if tokens_from is None else None

    def __call__(self, arguments: Tensors) -> Sequence[torch.Tensor]:
        """Runs the piece on inputs, then params. Raises ArtifactError for a token count in no range."""
        if self._only is not None:
            return self._only(arguments)
        assert self.tokens_from is not None
        position, axis = self.tokens_from
        return self.table.lookup(arguments[position].shape[axis])(arguments)


    def native(self) -> list[tuple[TokenRange, NativePiece]]:
        """Every artifact for a caller without the interpreter, in the order in which they are tried.

        Raises ArtifactError, which says why, if one of them is code that only Python can call.
        """
        found = []
        for token_range, artifact in self.table.items():
            native = getattr(artifact, "native", None)
            if native is None:
                raise ArtifactError(f"piece {self.name} is called through Python")
            found.append((token_range, native()))
        return found


def load_piece(bundle: Bundle, entry: PieceEntry) -> RangeDispatch:
    """Verifies and loads every artifact of one piece."""
    ranges = [TokenRange(item.start, item.end) for item in entry.ranges]
    artifacts = {
        token_range: load_artifact(bundle.file(item.file), item.format)
        for token_range, item in zip(ranges, entry.ranges, strict=True)
    }
    return RangeDispatch(entry.name, ranges, entry.tokens_from, artifacts=artifacts)


def load_pieces(bundle: Bundle) -> dict[str, RangeDispatch]:
    """Every piece of the bundle by name, verified and loaded, after the native libraries that pieces call.

    Raises BundleError or ArtifactError naming the file.
    """
    load_natives(bundle, only_exported=True)
    return {entry.name: load_piece(bundle, entry) for entry in bundle.manifest.pieces}


def load_natives(bundle: Bundle, *, only_exported: bool = False) -> dict[str, NativeLibrary]:
    """The bundle's native libraries by name, verified and loaded; with `only_exported` those that pieces call."""
    sources = native_sources()
    exported = {entry.name for entry in bundle.manifest.native if entry.name in sources and sources[entry.name].exported}
    return {
        entry.name: load_native(bundle.file(entry.file), exported=entry.name in exported)
        for entry in bundle.manifest.native
        if not only_exported or entry.name in exported
    }
