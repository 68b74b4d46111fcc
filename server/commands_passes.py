"""`treadle passes`: every pass there is, in the tree or from a plugin, documented from its source."""

from __future__ import annotations

import inspect
import json
import sys
import typing
from dataclasses import MISSING, Field, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treadle.ir.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from treadle.ir.plugins import Plugin
    from treadle.passes.base import Pass

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def passes(
    name: Annotated[str | None, typer.Argument(help="A pass to explain; default: list all.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the passes, those of plugins too: stage, tier and what each does; or explain one with its options."""
    from treadle.passes.registry import PASSES, pass_class

    if name is not None:
        found = describe_pass(name, pass_class(name), PASSES.plugin(name))
        typer.echo(json.dumps(found, indent=1) if as_json else render_pass(found))
        return
    rows = list_passes()
    typer.echo(json.dumps(rows, indent=1) if as_json else "\n".join(map(_line, rows)))


def list_passes() -> list[dict[str, Any]]:
    """Every pass: those of the pipeline in order of first use, then the others. One that does not load has an `error`."""
    from treadle.passes.pipeline import known_passes
    from treadle.passes.registry import PASSES, pass_class

    names = dict.fromkeys([*known_passes(), *PASSES.names()])
    rows = []
    for name in names:
        plugin = PASSES.plugin(name)
        try:
            rows.append(describe_pass(name, pass_class(name), plugin))
        except (ConfigError, PluginError) as error:
            rows.append({"name": name, "from": origin(plugin), "error": str(error)})
    return rows


def describe_pass(name: str, made: type[Pass], plugin: Plugin | None) -> dict[str, Any]:
    """What the source of a pass says about it, as plain data."""
    from treadle.passes.pipeline import known_passes

    hints = typing.get_type_hints(made)
    return {
        "name": name,
        "from": origin(plugin),
        "class": f"{made.__module__}.{made.__qualname__}",
        "stage": made.stage,
        "tier": made.tier,
        "in_pipeline": name in known_passes(),
        "requires": list(made.requires),
        "produces": list(made.produces),
        "after": list(made.after),
        "expects": made.expects,
        "options": [{"name": f.name, "type": type_text(hints[f.name]), "default": _default(f)} for f in fields(made)],
        "doc": documentation(made),
    }


def origin(plugin: Plugin | None) -> str:
    """`tree`, or the distribution with its version."""
    return f"{plugin.distribution} {plugin.version}" if plugin else "tree"


def documentation(made: type[Pass]) -> str:
    """The class's own docstring; else its module's, which draws the graph before and after."""
    own = made.__dict__.get("__doc__") or ""
    generated = own.startswith(f"{made.__name__}(")
    return inspect.cleandoc(own if own and not generated else sys.modules[made.__module__].__doc__ or "")


def type_text(hint: Any) -> str:
    """An annotation as a reader writes it."""
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")


def render_pass(found: dict[str, Any]) -> str:
    """One pass in full."""
    place = "in the pipeline" if found["in_pipeline"] else "runs when asked for with --pass"
    lines = [
        f"{found['name']}  ({found['from']}, {found['class']})",
        f"{found['tier']}, stage {found['stage']}, {place}" + (", expected to match" if found["expects"] else ""),
    ]
    lines += [f"{word} {', '.join(found[word])}" for word in ("requires", "after", "produces") if found[word]]
    lines += ["", found["doc"], "", "options:" if found["options"] else "no options"]
    lines += [f"  {o['name']}: {o['type']}" + _shown(o["default"]) for o in found["options"]]
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['name']:<34}cannot be loaded: {row['error']}"
    where = row["stage"] + ("" if row["in_pipeline"] else " (asked)")
    summary = row["doc"].partition("\n")[0]
    options = f"{{{','.join(o['name'] for o in row['options'])}}}" if row["options"] else ""
    source = "" if row["from"] == "tree" else f"  [{row['from']}]"
    return f"{row['name'] + options:<34}{where:<16}{row['tier']:<10}{summary}{source}"


def _default(field: Field[Any]) -> Any:
    """The default as JSON shows it; `required` says that there is none."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    return {"required": True} if field.default is MISSING else field.default


def _shown(default: Any) -> str:
    return " (required)" if default == {"required": True} else f" = {json.dumps(default)}"
