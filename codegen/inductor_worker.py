"""The process that compiles pieces with inductor: JSON requests on stdin, one JSON answer each on stdout."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

_PARENT_CHECK_SECONDS = 0.5
_LEFT_OUT = (".cpp", ".json.tmp")
_EXAMPLE_TOKENS = 64


def main() -> None:
    """Answers requests until stdin closes. What torch prints goes to stderr, so that stdout holds answers only."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), file=answers, flush=True)


def _end_with_parent(parent: int) -> None:
    """Ends this process and its compiler once the parent is gone, however it went."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_SECONDS)
    os.killpg(0, signal.SIGKILL)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """The worker must outlive any failure of the compiler, so whatever it raises becomes the answer."""
    try:
        _OPERATIONS[request["op"]](request)
    except Exception as error:
        return {"error": _explain(error)}
    return {}


def _explain(error: BaseException) -> str:
    text = str(error).strip() or "no message"
    lines = text.splitlines()
    return f"{type(error).__name__}: " + "\n  ".join(lines[:30])


def _precompile_header(request: dict[str, Any]) -> None:
    from treadle.codegen.torch_private import precompile_header

    precompile_header(request["which"], request["isa"], request["options"])


def _compile(request: dict[str, Any]) -> None:
    from treadle.codegen.torch_private import compile_package
    from treadle.ir.text import parse_graph

    graph = parse_graph(request["ir"])
    program = export_piece(graph, request["start"], request["end"])
    out = Path(request["out"])
    package = out.with_name(f"{out.name}.pt2")
    compile_package(
        program, request["isa"], request["options"], package, precompiled_headers=request["headers"]
    )
    strip_sources(package, out)
    package.unlink()


def export_piece(graph: Any, start: int, end: int) -> Any:
    """`torch.export` of a piece for token counts `start` to `end`: static if they are equal.

    Outputs are made contiguous, since the next piece is compiled for contiguous inputs. A range from 1 is traced from
    2 on (torch.export takes 0 and 1 for constants); the code has no size in it and is right for 1, which tests show.
    """
    import torch

    example = start if start == end else max(2, min(end, max(start, _EXAMPLE_TOKENS)))
    dynamic = start != end and end > 2
    values = [*graph.inputs, *graph.params]
    arguments = tuple(_example(value.type, example) for value in values)
    shapes = tuple(_dynamic_dims(value.type, start, end) if dynamic else None for value in values)
    with torch.no_grad():
        return torch.export.export(
            contiguous_module(graph), arguments, dynamic_shapes={"arguments": shapes}, strict=False
        )


def contiguous_module(graph: Any) -> Any:
    """The piece as a module whose outputs are contiguous."""
    import torch

    from treadle.ir.interpret import as_module

    class ContiguousPiece(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = as_module(graph)

        def forward(self, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(output.contiguous() for output in self.inner(*arguments))

    return ContiguousPiece()


def _example(type_: Any, tokens: int) -> Any:
    import torch

    return torch.zeros(type_.at(tokens), dtype=type_.dtype.torch)


def _dynamic_dims(type_: Any, start: int, end: int) -> dict[int, Any] | None:
    import torch

    tokens = torch.export.Dim("T", min=max(2, start), max=end)
    dims: dict[int, Any] = {}
    for axis, dim in enumerate(type_.shape):
        if not isinstance(dim, int):
            dims[axis] = _export_dim(dim, tokens)
    return dims or None


def _export_dim(dim: Any, tokens: Any) -> Any:
    """An affine dimension over T in torch.export's words."""
    from treadle.ir.types import T

    slope = int(dim.coeff(T, 1))
    offset = int(dim.coeff(T, 0))
    scaled = tokens if slope == 1 else slope * tokens
    return scaled + offset if offset else scaled


def strip_sources(package: Path, out: Path) -> None:
    """Copies a package without its C++ text, which names this machine's folders; the library itself stays as it is."""
    with zipfile.ZipFile(package) as source, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as stripped:
        for info in source.infolist():
            if not info.filename.endswith(_LEFT_OUT):
                entry = zipfile.ZipInfo(info.filename, date_time=(1980, 1, 1, 0, 0, 0))
                stripped.writestr(entry, source.read(info))


_OPERATIONS = {"header": _precompile_header, "compile": _compile}

if __name__ == "__main__":
    main()
