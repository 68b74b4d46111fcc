"""The process that compiles pieces with inductor; see fork_server for how it is asked."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

from treadle.codegen.fork_server import serve

_LEFT_OUT = ".cpp"
_EXAMPLE_TOKENS = 64
_SMALL_PIECE = """graph @piece(T in 1..64) {
  input %x: f32[T,16]
  param %n: f32[16] = load("n")
  param %w: f32[32,16] = load("w")
  %y: f32[T,16] = rms_norm(%x, %n, eps=1e-05)
  %z: f32[T,32] = linear(%y, %w)
  %a, %b: f32[T,16], f32[T,16] = split(%z, sizes=[16, 16])
  %g: f32[T,16] = gated_act(%a, %b, act="silu")
  return %g
}
"""


def main() -> None:
    """Imports what every request needs, then serves; forks inherit it."""
    from treadle.codegen import torch_private

    torch_private.private("torch._inductor", "aoti_compile_and_package")
    serve(_OPERATIONS, inline=("warm_up",))


def _warm_up(request: dict[str, Any]) -> None:
    """Takes a small piece through export and inductor, without the C++ compiler, so that forks find all of it loaded."""
    from treadle.codegen.torch_private import emit_cpp
    from treadle.ir.text import parse_graph

    emit_cpp(export_piece(parse_graph(_SMALL_PIECE), 1, 64), request["isa"], request["options"])


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


_OPERATIONS = {"header": _precompile_header, "compile": _compile, "warm_up": _warm_up}

if __name__ == "__main__":
    main()
