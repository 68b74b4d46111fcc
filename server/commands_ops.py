"""`treadle ops`: every op of the dialect, treadle's own or from a plugin, documented from its source."""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treadle.ir.errors import PluginError, VerifyError
from treadle.server.commands_passes import origin

if TYPE_CHECKING:
    from treadle.ir.ops.registry import Op
    from treadle.ir.plugins import Plugin

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def ops(
    name: Annotated[str | None, typer.Argument(help="An op to explain, also torch's own as aten.add.Tensor; default: list all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the ops of the dialect, those of plugins too, with their schemas; or explain one."""
    from treadle.ir.ops.registry import get_op, plugin_ops

    if name is not None:
        found = describe_op(get_op(name), plugin_ops().get(name))
        typer.echo(json.dumps(found, indent=1) if as_json else render_op(found))
        return
    rows = list_ops()
    typer.echo(json.dumps(rows, indent=1) if as_json else "\n".join(map(_line, rows)))


def list_ops() -> list[dict[str, Any]]:
    """Every op: treadle's own in the order of their file, then those of plugins. One that does not load has an `error`."""
    from treadle.ir.ops.registry import dialect, get_op, plugin_ops

    offered = plugin_ops()
    rows = [describe_op(row, None) for name, row in dialect().items() if name not in offered]
    for name, plugin in sorted(offered.items()):
        try:
            rows.append(describe_op(get_op(name), plugin))
        except (PluginError, VerifyError) as error:
            rows.append({"name": name, "from": origin(plugin), "error": str(error)})
    return rows


def describe_op(row: Op, plugin: Plugin | None) -> dict[str, Any]:
    """What the registry knows of an op, as plain data."""
    return {
        "name": row.name,
        "from": "torch" if row.name.count(".") == 2 else origin(plugin),
        "schema": row.schema,
        "splits": row.splits,
        "reads": list(row.reads),
        "writes": list(row.writes),
        "fake": row.fake is not None,
        "doc": inspect.cleandoc(row.doc),
    }


def render_op(found: dict[str, Any]) -> str:
    """One op in full."""
    lines = [f"{found['name']}  ({found['from']})", f"  {found['schema']}", ""]
    lines += [found["doc"]] if found["doc"] else []
    lines += ["Splits the graph: it runs between the pieces."] if found["splits"] else []
    lines += [f"{word.capitalize()} {', '.join(found[word])}." for word in ("reads", "writes") if found[word]]
    lines += ["Has a fake of its own for shapes."] if found["fake"] else []
    return "\n".join(lines).rstrip()


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['name']:<20}cannot be loaded: {row['error']}"
    source = "" if row["from"] == "tree" else f"  [{row['from']}]"
    return f"{row['name']:<20}{'splits  ' if row['splits'] else '        '}{row['doc'].partition(chr(10))[0]}{source}"
