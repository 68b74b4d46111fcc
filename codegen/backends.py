"""Code generators for pieces. Each turns canonical IR text into one artifact file. This module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from treadle.codegen.ranges import TokenRange
from treadle.codegen.target import Target
from treadle.ir.registry import Registry


@dataclass(frozen=True, kw_only=True)
class PieceJob:
    """One artifact to make. `ir` is canonical IR text and `range` the token counts.

    `name` and `sources`, where in the model each node of `ir` came from, are for messages only.
    """

    name: str
    ir: str
    range: TokenRange
    sources: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"piece {self.name} for {self.range} tokens"


class Backend(Protocol):
    """Made for one compile as `Backend(target, scratch, jobs, compiler)` and closed after it.

    `options()` is the one source of what enters the key and of what is in force while compiling (R-9.5); it is also
    asked of a backend that is never started. `format` is a row of `FORMATS` in loader.py, `suffix` that of the file
    in a bundle. docs/how-to/add-a-codegen-backend.md has the whole contract.
    """

    name: str
    format: str
    suffix: str
    needs_compiler: bool

    def options(self) -> dict[str, Any]:
        """Settings that shape the code, as plain values."""
        ...

    def start(self) -> None:
        """Begins whatever takes long and will surely be needed; `build` may be called without it."""
        ...

    def build(self, job: PieceJob, out: Path) -> None:
        """Writes the artifact. Called from several threads. Raises ArtifactError naming piece and range."""
        ...

    def close(self) -> None: ...


BACKENDS = Registry(
    "codegen backend",
    {
        "inductor": "treadle.codegen.backend_inductor:InductorBackend",
        "eager": "treadle.codegen.backend_eager:EagerBackend",
        "tvm": "treadle.codegen.backend_tvm:TvmBackend",
    },
    group="treadle.codegen_backends",
)

BACKEND_OF_LEVEL: Mapping[int, str] = {0: "eager", 1: "inductor", 2: "inductor", 3: "inductor"}
"""What each optimization level takes unless a backend is asked for."""


def make_backend(name: str, target: Target, scratch: Path, jobs: int, compiler: str | None = None) -> Backend:
    """The backend called `name`; `jobs` is how many builds may run at once, `compiler` the C++ compiler (default g++)."""
    return BACKENDS.get(name)(target=target, scratch=scratch, jobs=jobs, compiler=compiler)
