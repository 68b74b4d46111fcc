"""`treadle bisect`: the first pass after which a graph's outputs differ from the unrewritten graph's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from treadle.ir.graph import Graph
    from treadle.passes.bisect import Bisection

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def bisect(
    model: Annotated[str, typer.Argument(metavar="FILE.ir|MODEL", help="The text of a graph, or a model to trace.")],
    passes: Annotated[str | None, typer.Option(help="Passes in order, as for treadle opt; default: the pipeline.")] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Largest difference relative to the largest output; default by element type.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="For a model: float32, bfloat16 or float16.")] = None,
    tokens: Annotated[int, typer.Option(help="Number of tokens to run.")] = 11,
    seed: Annotated[int, typer.Option(help="Seed of weights and inputs.")] = 0,
) -> None:
    """Find the first pass after which outputs on seeded inputs differ too much. Exit code 1 if there is one."""
    from treadle.passes.bisect import bisect as find
    from treadle.server.ir_text import choose_passes

    steps = choose_passes(passes, pipeline=passes is None)
    found = find(_graph(model, dtype), steps, tolerance=tolerance, tokens=tokens, seed=seed)
    typer.echo("\n".join(_lines(found)))
    if found.culprit is not None:
        raise typer.Exit(1)


def _graph(model: str, dtype: str | None) -> Graph:
    if model.endswith(".ir"):
        from treadle.server.ir_text import read_graph

        return read_graph(Path(model))
    from treadle.codegen.compile import trace_model

    asked: dict[str, Any] = {"dtype": dtype} if dtype is not None else {}
    return trace_model(model, **asked)


def _lines(found: Bisection) -> Iterator[str]:
    yield f"{'pass':<42}{'matches':>8}  outputs against the unrewritten graph (tolerance {found.tolerance:g})"
    for step in found.steps:
        told = "broke the graph" if step.error else str(step.difference or "not changed")
        yield f"{step.position:>3} {step.spec:<38}{step.matched:>8}  {told}"
    if found.culprit is None:
        yield "no pass changes the outputs beyond the tolerance"
        return
    yield f"\nfirst wrong pass: {found.culprit.position} {found.culprit.spec} ({found.culprit.tier})"
    if found.culprit.error:
        yield found.culprit.error
    elif found.culprit.difference is not None:
        yield str(found.culprit.difference)
        if found.value:
            yield f"first value that it changed: %{found.value}"
    yield f"\n{found.diff}"
