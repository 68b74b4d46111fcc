"""Code generators for pieces. Each turns canonical IR text into one artifact file. This module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from treadle.codegen.ranges import TokenRange
from treadle.codegen.target import Target
from treadle.ir.registry import Registry


@dataclass(frozen=True, kw_only=True)
class PieceJob:
    """One artifact to make. `name` is for messages only; `ir` is canonical IR text and `range` the token counts."""

    name: str
    ir: str
    range: TokenRange

    @property
    def label(self) -> str:
        return f"piece {self.name} for {self.range} tokens"


class Backend(Protocol):
    """Made for one compile as `Backend(target, scratch, jobs, compiler)` and closed after it.

    `options()` is the one source of what enters the key and of what is in force while compiling (R-9.5).
    """

    name: str
    format: str
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
    },
)


def make_backend(name: str, target: Target, scratch: Path, jobs: int, compiler: str | None = None) -> Backend:
    """The backend called `name`; `jobs` is how many builds may run at once, `compiler` the C++ compiler (default g++)."""
    return BACKENDS.get(name)(target=target, scratch=scratch, jobs=jobs, compiler=compiler)
