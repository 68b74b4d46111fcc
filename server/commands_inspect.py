"""`treadle inspect`: what a bundle holds, how it was made, and where it departs from what was asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from treadle.codegen.bundle import Bundle, open_bundle
from treadle.ir.errors import BundleError, ConfigError
from treadle.ir.fold import fold_text

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def inspect(
    bundle: Annotated[Path, typer.Argument(help="A bundle folder.")],
    ir: Annotated[str | None, typer.Option("--ir", help="Print the IR of a stage (traced, ..., unified) or a piece.")] = None,
    fold: Annotated[bool, typer.Option("--fold", help="With --ir: print layers that are equal once, in a repeat block.")] = False,
    misses: Annotated[bool, typer.Option("--near-misses", help="Also list places where a pass nearly matched.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write one self-contained page to this file.")] = None,
    time: Annotated[bool, typer.Option("--time", help="With --html: time each piece on this machine.")] = False,
    verify: Annotated[Path | None, typer.Option(help="Check the signature with this public key (PEM).")] = None,
    dispatch: Annotated[bool, typer.Option("--dispatch", help="Print the graph mode of every batch shape, with the reason.")] = False,
    graph_mode: Annotated[
        str | None, typer.Option(help="With --dispatch: for this setting instead of the default of `serve`.")
    ] = None,
) -> None:
    """Show stages, passes, pieces, dispatch table, sizes and settings. Works for a bundle of another machine too."""
    opened = open_bundle(bundle, verify_key=verify, for_loading=time)
    if dispatch:
        typer.echo(_dispatch_text(opened, graph_mode))
        return
    if graph_mode is not None:
        raise ConfigError("--graph-mode belongs to --dispatch; add it")
    if html is not None:
        _write_page(opened, html, timed=time)
        return
    if time:
        raise ConfigError("--time belongs to --html; add --html OUT.html")
    if ir is not None:
        text = opened.file(_ir_path(opened, ir)).read_text()
        typer.echo(fold_text(text) if fold else text, nl=False)
        return
    summary = summarise(opened)
    if as_json:
        typer.echo(json.dumps(summary, indent=1))
        return
    typer.echo(render(summary, with_misses=misses))


def _dispatch_text(bundle: Bundle, graph_mode: str | None) -> str:
    """What an engine on this bundle would run each step as, in runs of equal answers."""
    from treadle.runtime.bundle_modes import bundle_dispatch
    from treadle.runtime.config import EngineConfig
    from treadle.runtime.dispatch import AUTO

    config = EngineConfig(bundle=str(bundle.root), graph_mode=AUTO if graph_mode is None else graph_mode)
    lines = [f"{'batch':<8}{'tokens':<14}{'mode':<11}{'padded to':<11}reason"]
    for row in bundle_dispatch(bundle.manifest, config):
        tokens = f"{row.start}" if row.start == row.end else f"{row.start} to {row.end}"
        padded = "-" if row.padded_to is None else str(row.padded_to)
        lines.append(f"{row.batch:<8}{tokens:<14}{row.mode:<11}{padded:<11}{row.reason}")
    return "\n".join(lines)


def _storage_lines(storage: dict[str, Any] | None) -> list[str]:
    """Planned bytes of computed values at the most tokens; what is returned has storage of its own."""
    if storage is None:
        return []
    lines = ["", f"memory at {storage['tokens']} tokens (shared arena, without sharing, outputs, results in place, views)"]
    for name, row in [*storage["pieces"].items(), ("between", storage["between"])]:
        sizes = "".join(f"{_mb(row[key]):>12}" for key in ("arena_bytes", "unshared_bytes", "output_bytes"))
        lines.append(f"  {name:<12}{sizes}{row['in_place']:>5}{row['views']:>5}")
    return lines


def _write_page(bundle: Bundle, out: Path, *, timed: bool) -> None:
    from treadle.server.inspect_html import render_page

    times = None
    if timed:
        from treadle.codegen.time_pieces import time_pieces

        times = time_pieces(bundle)
    try:
        out.write_text(render_page(bundle, times), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write --html {out}: {error.strerror}") from error
    typer.echo(f"wrote {out} ({out.stat().st_size / 1e6:.1f} MB)")


def summarise(bundle: Bundle) -> dict[str, Any]:
    """Everything that is shown, as plain data."""
    manifest = bundle.manifest
    sizes = {entry.path: entry.size for entry in manifest.files}
    return {
        "bundle": bundle.root.name,
        "model": {**msgspec.to_builtins(manifest.model), "config": manifest.model.config},
        "target": msgspec.to_builtins(manifest.target),
        "toolchain": manifest.toolchain,
        "limits": msgspec.to_builtins(manifest.limits),
        "stages": [Path(path).stem.partition("-")[2] for path in manifest.stages],
        "passes": _reports(bundle),
        "storage": _optional_report(bundle, "reports/storage.json"),
        "measured": _optional_report(bundle, "reports/profit.json"),
        "proof": _optional_report(bundle, "reports/verify.json"),
        "pieces": [
            {
                "name": piece.name,
                "key": piece.key,
                "layers": piece.layers,
                "calls": sum(step.piece == piece.name for step in manifest.program.steps),
                "bytes": sum(sizes[item.file] for item in piece.ranges),
            }
            for piece in manifest.pieces
        ],
        "dispatch": {
            name: [{"tokens": [start, end], "file": file} for start, end, file in rows]
            for name, rows in manifest.dispatch_table().items()
        },
        "weights": {
            "stored": manifest.weights.stored,
            "tensors": len(manifest.weights.tensors),
            "bytes": sum(sizes[path] for path in bundle.weight_files()),
        },
        "plugins": [msgspec.to_builtins(entry) for entry in manifest.plugins],
        "native": [{"name": entry.name, "bytes": sizes[entry.file]} for entry in manifest.native],
        "settings": [msgspec.to_builtins(row) for row in manifest.settings],
        "times": [msgspec.to_builtins(row) for row in manifest.times],
        "bytes": bundle.total_bytes(),
        "unlisted": bundle.unlisted(),
    }


def render(summary: dict[str, Any], *, with_misses: bool = False) -> str:
    """The summary as text, one section each."""
    model = summary["model"]
    lines = [
        f"{summary['bundle']}: {model['name']} ({model['architecture']}, {model['dtype']}, {model['num_layers']} layers, "
        f"vocabulary {model['vocab_size']}), {_mb(summary['bytes'])}",
        f"target     {summary['target']['name']} (needs {', '.join(summary['target']['features']) or 'nothing special'})",
        "toolchain  " + ", ".join(f"{name} {version}" for name, version in summary["toolchain"].items()),
        f"limits     {summary['limits']['max_num_batched_tokens']} tokens a step, "
        f"{summary['limits']['max_model_len']} tokens a request",
        f"stages     {' -> '.join(summary['stages'])}",
        "",
        "passes (matches, near misses)",
    ]
    for report in summary["passes"]:
        counts = ", ".join(f"{kind} {number}" for kind, number in report["counts"].items())
        lines.append(f"  {report.get('spec') or report['name']:<36}{report['matched']:>5}{len(report['near_misses']):>5}  {counts}".rstrip())
        if report.get("warning"):
            lines.append(f"      warning: {report['warning']}")
        if with_misses:
            lines += [f"      {miss['node']}: {miss['predicate']}  {miss['source']}" for miss in report["near_misses"]]
    lines += _measured_lines(summary["measured"]) + _proof_lines(summary["proof"])
    lines += ["", "pieces (calls, size, layers)"]
    for piece in summary["pieces"]:
        where = _spans(piece["layers"]) or "-"
        lines.append(f"  {piece['name']:<12}{piece['calls']:>5}{_mb(piece['bytes']):>12}  {where}")
    lines += _storage_lines(summary["storage"])
    lines += ["", "dispatch (tokens of a step -> artifact)"]
    for name, rows in summary["dispatch"].items():
        for row in rows:
            start, end = row["tokens"]
            lines.append(f"  {name:<12}{f'{start}' if start == end else f'{start} to {end}':<14}{row['file']}")
    lines += ["", _weights_line(summary["weights"])]
    lines += [f"native     {entry['name']}, {_mb(entry['bytes'])}" for entry in summary["native"]]
    lines += [f"plugin     {_plugin_line(entry)}" for entry in summary["plugins"]]
    lines += ["", "settings (value, source, what was asked and why it is not that)"]
    for row in summary["settings"]:
        why = f"  asked for {row['asked']!r}: {row['reason']}" if row["reason"] else ""
        lines.append(f"  {row['field']:<24}{row['value']!s:<16}{row['source']}{why}")
    lines += ["", "compile times"]
    lines += [f"  {row['stage']:<24}{row['seconds']:>8.1f} s" for row in summary["times"]]
    if summary["unlisted"]:
        lines += ["", f"not listed, never read: {', '.join(summary['unlisted'])}"]
    return "\n".join(lines)


def _ir_path(bundle: Bundle, name: str) -> str:
    table = {Path(path).stem.partition("-")[2]: path for path in bundle.manifest.stages}
    table |= {piece.name: piece.ir for piece in bundle.manifest.pieces}
    if name not in table:
        raise BundleError(f"{bundle.root.name} has no stage or piece {name!r}; it has: {', '.join(table)}")
    return table[name]


def _reports(bundle: Bundle) -> list[dict[str, Any]]:
    return json.loads(bundle.file("reports/passes.json").read_bytes())


def _optional_report(bundle: Bundle, path: str) -> Any:
    return json.loads(bundle.file(path).read_bytes()) if path in bundle.manifest.reports else None


def _measured_lines(profit: dict[str, Any] | None) -> list[str]:
    if profit is None:
        return []
    lines = [f"  {choice['name']:<36}{choice['reason']}" for choice in profit["choices"]]
    return ["", "measured passes", *(lines or [f"  {profit['reason'] or 'none of them rewrote anything'}"])]


def _proof_lines(proof: dict[str, Any] | None) -> list[str]:
    if proof is None:
        return []
    good = sum(check["ok"] for check in proof["checks"])
    shapes = ", ".join(map(str, proof["shapes"]))
    return ["", f"proof      {good} of {len(proof['checks'])} comparisons hold for {shapes} tokens (seed {proof['seed']})"]


def _weights_line(weights: dict[str, Any]) -> str:
    if not weights["stored"]:
        return f"weights    {weights['tensors']} tensors, not stored: made from the checkpoint at start"
    return f"weights    {weights['tensors']} tensors, {_mb(weights['bytes'])}"


def _plugin_line(entry: dict[str, Any]) -> str:
    needed = f"; running needs {', '.join(entry['run_time'])}" if entry["run_time"] else ""
    return f"{entry['name']} {entry['version']} ({entry['source'][:12]}): {', '.join(entry['uses'])}{needed}"


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def _spans(layers: list[int]) -> str:
    """Layers as spans: [0, 1, 2, 5] is "layers 0 to 2, 5"."""
    spans: list[list[int]] = []
    for layer in layers:
        if spans and layer == spans[-1][1] + 1:
            spans[-1][1] = layer
        else:
            spans.append([layer, layer])
    text = ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in spans)
    return f"layers {text}" if text else ""
