"""`treadle verify`: proves the passes and compiled pieces of a bundle on seeded inputs and stores the result in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from treadle.codegen.amend_bundle import add_report, check_amendable
from treadle.ir.errors import ConfigError

if TYPE_CHECKING:
    from treadle.codegen.prove_bundle import Proof

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def verify(
    bundle: Annotated[Path, typer.Argument(help="A bundle folder.")],
    shapes: Annotated[str | None, typer.Option(help="Token counts to run, for example 1,2,7,64 (the default).")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights and inputs.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    sign: Annotated[Path | None, typer.Option(help="Private key (PEM) to sign the amended manifest with.")] = None,
    store: Annotated[bool, typer.Option("--store/--no-store", help="Write reports/verify.json into the bundle.")] = True,
) -> None:
    """Compare every pass and every compiled piece with the unrewritten graph. Exit code 1 if one differs too much."""
    counts = _parse_shapes(shapes) if shapes is not None else None
    if store:
        check_amendable(bundle, sign)
    from treadle.codegen.prove_bundle import REPORT, prove_bundle

    proof = prove_bundle(bundle, shapes=counts, seed=seed)
    data = json.dumps(proof.as_dict(), indent=1)
    if store:
        add_report(bundle, REPORT, data.encode(), sign)
    typer.echo(data if as_json else render(proof))
    if proof.failures:
        typer.echo(f"treadle: {_blame(proof)}", err=True)
        raise typer.Exit(1)


def render(proof: Proof) -> str:
    """One line for each pass, piece and whole, with the error at each token count."""
    heads = "".join(f"{f'T={tokens}':>10}" for tokens in proof.shapes)
    lines = [f"{'relative error':<46}{'bound':>9}{heads}"]
    rows: dict[tuple[str, int, str], dict[int, str]] = {}
    bounds: dict[tuple[str, int, str], float] = {}
    for check in proof.checks:
        row = (check.kind, check.position, check.name)
        mark = "" if check.ok else "!"
        rows.setdefault(row, {})[check.tokens] = f"{mark}{check.error:.1e}" if check.error else "0"
        bounds[row] = check.bound
    for (kind, position, name), errors in rows.items():
        place = f" {position}" if position else ""
        label = f"{kind}{place} {name}" if kind in ("pass", "piece") else name
        bound = f"{bounds[kind, position, name]:.0e}" if bounds[kind, position, name] else "bitwise"
        cells = "".join(f"{errors.get(tokens, ''):>10}" for tokens in proof.shapes)
        lines.append(f"{label:<46}{bound:>9}{cells}")
    good = len(proof.checks) - len(proof.failures)
    lines.append(f"{good} of {len(proof.checks)} comparisons hold (seed {proof.seed})")
    return "\n".join(lines)


def _blame(proof: Proof) -> str:
    """The first failure: the earliest pass or piece that is wrong by itself, before what merely inherits it."""
    first = min(proof.failures, key=lambda check: ("pass", "piece", "all passes", "program").index(check.kind))
    what = f"{first.kind} {first.name}" if first.kind in ("pass", "piece") else first.name
    bound = f"at most {first.bound:g} is allowed" if first.bound else "it must not differ at all"
    return f"{what} changes the outputs for {first.tokens} tokens: by {first.error:g} of the largest, {bound}"


def _parse_shapes(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--shapes {text!r} is not a list of token counts such as 1,2,7,64") from error
