"""The eager backend: the artifact is the IR text itself, run op by op through the references. For -O0 and for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treadle.codegen.backends import PieceJob
from treadle.codegen.target import Target
from treadle.ir.text import parse_graph


class EagerBackend:
    name = "eager"
    format = "ir"
    suffix = ".ir"
    needs_compiler = False

    def __init__(self, *, target: Target, scratch: Path, jobs: int, compiler: str | None):
        del target, scratch, jobs, compiler

    def options(self) -> dict[str, Any]:
        return {}

    def start(self) -> None:
        pass

    def build(self, job: PieceJob, out: Path) -> None:
        """Checks that the text parses and writes it."""
        parse_graph(job.ir)
        out.write_text(job.ir)

    def close(self) -> None:
        pass
