"""The process that compiles pieces with TVM; see fork_server for how it is asked."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from treadle.codegen.fork_server import serve


def main() -> None:
    """Imports what every request needs, then serves; forks inherit it."""
    import treadle.codegen.tvm_lower  # noqa: F401

    serve({"compile": _compile})


def _compile(request: dict[str, Any]) -> None:
    from treadle.codegen.tvm_emit import emit_piece
    from treadle.codegen.tvm_lower import build_library
    from treadle.ir.text import parse_graph

    graph = parse_graph(request["ir"])
    exact = request["start"] if request["start"] == request["end"] else None
    module = emit_piece(graph, exact, request["library"], request["sources"], request["versions"])
    with tempfile.TemporaryDirectory() as folder:
        build_library(
            module,
            request["target"],
            request["compiler"],
            request["link_flags"],
            Path(folder),
            Path(request["out"]),
        )


if __name__ == "__main__":
    main()
