"""The TVM backend: one shared library for a piece and a range, compiled in a worker process and its forks.

Products of matrices are calls to torch's, because TVM's own are many times slower without tuning; see
docs/how-to/add-a-codegen-backend.md for the measurements.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treadle.codegen.backends import PieceJob
from treadle.codegen.target import Target
from treadle.codegen.tvm_runtime import LIBRARY, installed_versions
from treadle.codegen.workers import WorkerPool
from treadle.kernels.native import find_compiler

_PROCESSORS = {
    "x86_64": ("x86_64-unknown-linux-gnu", "x86-64"),
    "aarch64": ("aarch64-unknown-linux-gnu", "generic"),
}


class TvmBackend:
    name = "tvm"
    format = "tvm"
    suffix = ".so"
    needs_compiler = True

    def __init__(self, *, target: Target, scratch: Path, jobs: int, compiler: str | None):
        self._versions = installed_versions()
        self._target = target
        self._compiler = find_compiler(compiler)
        self._pool = WorkerPool("treadle.codegen.tvm_worker", jobs, scratch, {})

    def options(self) -> dict[str, Any]:
        """TVM's versions, what is called instead of generated, and what the linker is told."""
        return {
            "library": sorted(LIBRARY),
            "link_flags": ["-lm", "-Wl,-z,now", "-Wl,-z,noexecstack", "-Wl,--build-id=none", "-s"],
            "versions": self._versions,
        }

    def start(self) -> None:
        """Starts the worker, which imports TVM."""
        self._pool.start()

    def build(self, job: PieceJob, out: Path) -> None:
        request = {
            "op": "compile",
            "ir": job.ir,
            "start": job.range.start,
            "end": job.range.end,
            "out": str(out),
            "sources": list(job.sources),
            "target": self.target(),
            "compiler": self._compiler,
            **self.options(),
        }
        self._pool.call(request, job.label)

    def close(self) -> None:
        self._pool.close()

    def target(self) -> dict[str, Any]:
        """The target in LLVM's words: nothing beyond its listed features may be used."""
        triple, processor = _PROCESSORS[self._target.arch]
        features = [f"+{name}" for name in self._target.features]
        return {"kind": "llvm", "mtriple": triple, "mcpu": processor, "mattr": features}
