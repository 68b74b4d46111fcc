"""The inductor backend: one AOTInductor package for a piece and a range, compiled in a worker process and its forks.

Weights are ordinary inputs of the package, so that it serves every layer. The worker has an environment of its
own: its caches, precompiled headers and temporary files lie in the scratch folder and go with it, whatever HOME is.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from treadle.codegen.backends import PieceJob
from treadle.codegen.compiler_shim import write_shim
from treadle.codegen.target import Target
from treadle.codegen.workers import WorkerPool
from treadle.kernels.native import find_compiler


class InductorBackend:
    name = "inductor"
    format = "aoti"
    suffix = ".pt2"
    needs_compiler = True
    calls_kernels = True

    def __init__(self, *, target: Target, scratch: Path, jobs: int, compiler: str | None):
        self._target = target
        self._headers = False
        shim = write_shim(scratch / "bin", find_compiler(compiler), scratch)
        self._pool = WorkerPool(
            "treadle.codegen.inductor_worker",
            jobs,
            scratch,
            {
                "CXX": str(shim),
                "TORCHINDUCTOR_CACHE_DIR": str(scratch / "private" / "inductor"),
                "TORCHINDUCTOR_COMPILE_THREADS": "1",
                "TRITON_CACHE_DIR": str(scratch / "private" / "triton"),
            },
            first=[{"op": "warm_up", "isa": target.isa, "options": self.options()}],
        )

    def options(self) -> dict[str, Any]:
        """Inductor's settings. Exact float32: no fast math, no contraction. Thread count is decided at run time."""
        return {
            "aot_inductor.compile_wrapper_opt_level": "O0",
            "aot_inductor.enable_frame_pointer": False,
            "aot_inductor.enable_line_tables": False,
            "compile_threads": 1,
            "cpp.dynamic_threads": True,
            "cpp.enable_floating_point_contract_flag": "off",
            "cpp.enable_unsafe_math_opt_flag": False,
            "cpp.march": "",
            "cpp.simdlen": self._target.vector_bits,
            "cpp.threads": 8,
            "cpp.vec_isa_ok": True,
            "force_disable_caches": True,
            "freezing": False,
            "max_autotune": False,
        }

    def start(self) -> None:
        """Starts the worker and its precompiled headers, which pay from three pieces on."""
        # inductor checks precompiled headers with the openssl command; without it each file parses the headers itself.
        self._headers = shutil.which("openssl") is not None
        headers = ("wrapper", "kernel") if self._headers else ()
        self._pool.start([{"op": "header", "which": which, **self._common()} for which in headers])

    def build(self, job: PieceJob, out: Path) -> None:
        request = {
            "op": "compile",
            "ir": job.ir,
            "start": job.range.start,
            "end": job.range.end,
            "out": str(out),
            **self._common(),
        }
        self._pool.call(request, job.label)

    def close(self) -> None:
        self._pool.close()

    def _common(self) -> dict[str, Any]:
        return {"isa": self._target.isa, "options": self.options(), "headers": self._headers}
