"""Products of matrices in the TVM backend: a call to torch's against TVM's own code, in one run on one thread.

    python -m benchmarks.tvm_products

Prints a table of microseconds for the gate-up product of a small model (3072 x 576, float32) by number of tokens. This
is what decides `LIBRARY` in codegen/tvm_runtime.py. Needs the extra `tvm`.
"""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from treadle.codegen.backend_tvm import TvmBackend
from treadle.codegen.target import resolve_target
from treadle.codegen.tvm_emit import emit_piece
from treadle.codegen.tvm_lower import build_library
from treadle.codegen.tvm_runtime import installed_versions, load_tvm
from treadle.ir.text import parse_graph
from treadle.kernels.native import find_compiler

ROWS, COLUMNS = 3072, 576
TOKENS = (1, 4, 16, 64, 256)
PIECE = f"""graph @product(T in 1..256) {{
  input %x: f32[T,{COLUMNS}]
  param %w: f32[{ROWS},{COLUMNS}] = load("w")
  %y: f32[T,{ROWS}] = linear(%x, %w)
  return %y
}}
"""


def build(library: tuple[str, ...], folder: Path) -> Path:
    backend = TvmBackend(target=resolve_target("cpu"), scratch=folder, jobs=1, compiler=None)
    out = folder / f"product-{len(library)}.so"
    module = emit_piece(parse_graph(PIECE), None, library, (), installed_versions())
    build_library(module, backend.target(), find_compiler(), backend.options()["link_flags"], folder, out)
    return out


def best_microseconds(call: Callable[[], object], seconds: float = 0.5) -> float:
    call()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return best * 1e6


def main() -> None:
    torch.set_num_threads(1)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {installed_versions()}")
    print("| tokens | torch's, us | through the call, us | TVM's own, us |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        called, own = (load_tvm(build(library, Path(scratch))) for library in (("linear",), ()))
        weight = torch.randn(ROWS, COLUMNS)
        for tokens in TOKENS:
            x = torch.randn(tokens, COLUMNS)
            direct = best_microseconds(lambda x=x: torch.mm(x, weight.t()))
            through, generated = (best_microseconds(lambda x=x, f=f: f([x, weight])) for f in (called, own))
            print(f"| {tokens} | {direct:.0f} | {through:.0f} | {generated:.0f} |")


if __name__ == "__main__":
    main()
