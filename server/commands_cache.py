"""`treadle cache`: asks the artifact store questions and cleans it."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from treadle.codegen.key import NOT_HASHED, Difference
from treadle.codegen.store import Problem, Store, StoredObject
from treadle.ir.errors import ConfigError
from treadle.server.environment import store_root
from treadle.server.setting_pairs import parse_settings

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)

StoreOption = Annotated[Path | None, typer.Option("--store", help="The store; default TREADLE_STORE or the user's cache.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@app.callback()
def _group() -> None:
    """List, verify, explain, compare and clean the artifact store."""


def _open(store: Path | None) -> Store:
    return Store(store or store_root())


@app.command("ls")
def list_objects(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """List the objects: digest, size, age, what they are, what they were compiled for."""
    rows = [_row(item) for item in _open(store).ls()]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    for row in rows:
        if "problem" in row:
            typer.echo(f"{row['digest'][:12]}  {row['problem']}")
        else:
            size, age = f"{row['size'] / 1e6:.1f} MB", _age(row["created"])
            typer.echo(f"{row['digest'][:12]}  {size:>10}  {age:>6}  {row['label']}  {row['target']}")
    typer.echo(f"{len(rows)} objects, {sum(row.get('size', 0) for row in rows) / 1e6:.1f} MB in {_open(store).root}")


@app.command()
def verify(store: StoreOption = None) -> None:
    """Re-hash every object; exit 1 if any is damaged. The next compile builds damaged ones again."""
    opened = _open(store)
    problems = opened.verify()
    for problem in problems:
        typer.echo(problem.reason)
    typer.echo(f"{len(opened.digests()) - len(problems)} of {len(opened.digests())} objects are sound")
    if problems:
        sys.exit(1)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(help="The start of a digest.")],
    b: Annotated[str, typer.Argument(help="The start of another.")],
    store: StoreOption = None,
) -> None:
    """Show on which fields the keys of two objects differ."""
    _print_differences(_open(store).diff(a, b))


@app.command()
def explain(
    bundle: Annotated[Path, typer.Argument(help="A bundle: the compile it came from.")],
    setting: Annotated[list[str] | None, typer.Option("--set", help="NAME=VALUE to change in that compile; repeatable.")] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """For each artifact: would the same compile, or one with changed settings, find it in the store, and if not, why.

    Settings that enter no key say so. Nothing is compiled; the model is not needed.
    """
    from treadle.codegen.explain import explain_compile

    answers = explain_compile(bundle, parse_settings(setting or []), _open(store))
    if as_json:
        typer.echo(json.dumps([answer.as_dict() for answer in answers], indent=1))
        return
    for answer in answers:
        typer.echo(f"{'hit ' if answer.hit else 'miss'}  {answer.label}" + ("" if answer.hit else f": {answer.reason}"))
        for difference in answer.differences:
            typer.echo(f"        {difference}")
    for note in dict.fromkeys(note for answer in answers for note in answer.notes):
        typer.echo(f"note: {note}")


@app.command()
def gc(
    store: StoreOption = None,
    max_size: Annotated[str | None, typer.Option(help="Keep at most this much, for example 2G.")] = None,
    max_age_days: Annotated[float | None, typer.Option(min=0, help="Remove what was not used for so many days.")] = None,
) -> None:
    """Remove damaged objects, what killed compiles left, and what the limits say. Bundles do not need the store."""
    age = max_age_days * 86400 if max_age_days is not None else None
    removed = _open(store).gc(max_bytes=_bytes(max_size) if max_size else None, max_age=age)
    typer.echo(f"removed {len(removed.objects)} objects ({removed.bytes / 1e6:.1f} MB) and {removed.scratch} left-overs")


def _row(item: StoredObject | Problem) -> dict[str, Any]:
    if isinstance(item, Problem):
        return {"digest": item.digest, "problem": item.reason}
    fields = {"digest": item.digest, "size": item.size, "created": item.created, "label": item.label}
    return {**fields, "target": item.key.target, "key": item.key.fields()}


def _print_differences(differences: list[Difference]) -> None:
    for difference in differences:
        typer.echo(str(difference))
    if not differences:
        typer.echo("the keys are equal")
    typer.echo("never part of a key: " + ", ".join(name for name, _ in NOT_HASHED))


def _age(created: float) -> str:
    seconds = max(0.0, time.time() - created)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)B?", text.upper())
    if match is None:
        raise ConfigError(f"--max-size {text!r} is no size; write for example 500M or 2G")
    return int(float(match[1]) * _UNITS[match[2]])
