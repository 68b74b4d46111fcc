"""`treadle trace`: a model's graph as text, before any pass."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def trace(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, a .gguf file or the alias smollm2.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write the text; default: print it.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto (default: as compile chooses), float32, bfloat16 or float16.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Most tokens in one step, the upper end of T.")] = None,
    fold: Annotated[bool, typer.Option("--fold", help="Print layers that are equal once, in a repeat block.")] = False,
) -> None:
    """Trace a model and write its graph as text, as a compile starts from it. Weights are not read."""
    from treadle.codegen.compile import trace_model
    from treadle.ir.fold import fold_text
    from treadle.ir.text import print_graph

    asked: dict[str, Any] = {"dtype": dtype, "max_num_batched_tokens": max_num_batched_tokens}
    text = print_graph(trace_model(model, **{name: value for name, value in asked.items() if value is not None}))
    text = fold_text(text) if fold else text
    if output is None:
        typer.echo(text, nl=False)
        return
    output.write_text(text)
    typer.echo(str(output))
