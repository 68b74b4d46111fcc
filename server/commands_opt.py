"""`treadle opt`: runs passes on the text of a graph, and shows what they did."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from treadle.ir.graph import Graph

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def opt(
    file: Annotated[Path, typer.Argument(help="The text of a graph, from treadle trace, inspect --ir or an editor.")],
    passes: Annotated[str | None, typer.Option(help='Passes in order, for example raise_linear,other{opt=1,name="x"}.')] = None,
    pipeline: Annotated[bool, typer.Option("--pipeline", help="Run all passes of the pipeline, in its order.")] = False,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Check the rules of the IR before and after each pass.")] = True,
    run: Annotated[bool, typer.Option("--run", help="Run the result on seeded inputs and compare with the graph as read.")] = False,
    print_after_all: Annotated[bool, typer.Option("--print-after-all", help="Print the graph after each pass that changed it.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Print the difference of the text before and after.")] = False,
    reports: Annotated[bool, typer.Option("--reports", help="Print matches, near misses and warnings of each pass.")] = False,
    fold: Annotated[bool, typer.Option("--fold", help="Print layers that are equal once, in a repeat block.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the result here.")] = None,
    tokens: Annotated[int, typer.Option(help="Number of tokens for --run.")] = 11,
    seed: Annotated[int, typer.Option(help="Seed of weights and inputs for --run.")] = 0,
) -> None:
    """Run passes on a graph's text. Without an option that prints or writes something else, print the result."""
    from treadle.ir.fold import fold_text
    from treadle.ir.text import print_graph
    from treadle.passes.base import run_passes
    from treadle.passes.bisect import text_diff
    from treadle.server.ir_text import choose_passes, read_graph, report_lines

    def show(graph: Graph) -> str:
        return fold_text(print_graph(graph)) if fold else print_graph(graph)

    def after(name: str, graph: Graph) -> None:
        typer.echo(f"// after {name}\n{show(graph)}")

    steps = choose_passes(passes, pipeline)
    before = read_graph(file)
    graph = before.copy()
    asked = () if pipeline else [step.name for step in steps]
    done = run_passes(graph, steps, verify=verify, observe=after if print_after_all else None, asked=asked)
    if diff:
        typer.echo(text_diff(before, graph, show=show))
    if reports:
        typer.echo("\n".join(report_lines(done)))
    if run:
        typer.echo(_run_both(before, graph, tokens, seed))
    if output is not None:
        output.write_text(show(graph))
        typer.echo(str(output))
    elif not (diff or reports or run or print_after_all):
        typer.echo(show(graph), nl=False)


def _run_both(before: Graph, after: Graph, tokens: int, seed: int) -> str:
    from treadle.passes.seeded_run import SeededRun, compare, describe

    trial = SeededRun(before, tokens=tokens, seed=seed)
    wanted, given = trial.outputs(before), trial.outputs(after)
    lines = [describe(value.name, tensor) for value, tensor in zip(after.outputs, given, strict=True)]
    return "\n".join([*lines, f"against the graph as read: {compare(after, wanted, given)}"])
