"""`treadle inspect --html`: one page with everything in it, made from a bundle. It needs no network and no build step."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import msgspec

from treadle.codegen.bundle import Bundle
from treadle.codegen.manifest import Manifest, PieceEntry
from treadle.codegen.program import Step
from treadle.server.stage_diff import Row, diff_stages, normal

CONTEXT = 3
"""Unchanged rows that stay visible beside a change."""
_SHOWN_SITES = 12
_LONGEST_LINE = 240
_COLOURS = 8

Times = Mapping[str, Mapping[int, float]]
"""Piece -> token count -> seconds."""


def render_page(bundle: Bundle, times: Times | None = None) -> str:
    """The whole page as one document of HTML, with style and script inside."""
    manifest = bundle.manifest
    reports = json.loads(bundle.file("reports/passes.json").read_bytes())
    body = [
        _header(bundle),
        _section("pipeline", "Pipeline", _pipeline(bundle, reports)),
        _section("passes", "Passes", _passes(reports)),
        _section("stages", "What each stage changed", _stages(bundle)),
        _section("pieces", "Pieces", _pieces(bundle, times)),
        _section("dispatch", "Dispatch", _dispatch(manifest)),
        *_stored_reports(bundle),
        _section("settings", "Settings", _settings(manifest)),
        _section("times", "Compile times", _times(manifest)),
    ]
    title = escape(f"{manifest.model.name}: treadle bundle")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'; img-src data:\">"
        f'<link rel="icon" href="data:,"><title>{title}</title>\n<style>\n{_asset("inspect.css")}</style></head>\n<body>\n'
        + "\n".join(body)
        + f"\n<script>\n{_asset('inspect.js')}</script>\n</body></html>\n"
    )


def _asset(name: str) -> str:
    return (files("treadle.server") / "assets" / name).read_text()


def _header(bundle: Bundle) -> str:
    manifest = bundle.manifest
    model = manifest.model
    facts = {
        "architecture": model.architecture,
        "dtype": model.dtype,
        "layers": model.num_layers,
        "vocabulary": model.vocab_size,
        "hidden size": model.hidden_size,
        "target": manifest.target.name,
        "tokens a step": manifest.limits.max_num_batched_tokens,
        "tokens a request": manifest.limits.max_model_len,
        "size": _size(bundle.total_bytes()),
    }
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in facts.items())
    tools = ", ".join(f"{name} {version}" for name, version in manifest.toolchain.items())
    links = "".join(
        f'<a href="#{anchor}">{anchor}</a>'
        for anchor in ("pipeline", "passes", "stages", "pieces", "dispatch", "memory", "settings", "times")
    )
    return (
        f'<header><h1>{_text(model.name)}</h1><p class="quiet">{_text(bundle.root.name)} · made with {_text(tools)}</p>'
        f'<dl class="facts">{cells}</dl></header><nav>{links}</nav>'
    )


def _pipeline(bundle: Bundle, reports: Sequence[Mapping[str, Any]]) -> str:
    chips = []
    for path in bundle.manifest.stages:
        text = bundle.file(path).read_text()
        lines = sum(" = " in line and ": " in line for line in text.splitlines())
        chips.append(f'<li><b>{_text(_stage_name(path))}</b><span class="quiet">{lines} definitions</span></li>')
    matched = sum(report["matched"] for report in reports)
    near = sum(len(report["near_misses"]) for report in reports)
    return (
        f'<ol class="chips">{"".join(chips)}</ol><p>{len(reports)} passes rewrote {matched} places and nearly matched '
        f"{near} more; {len(bundle.manifest.pieces)} unique pieces serve {bundle.manifest.model.num_layers} layers.</p>"
    )


def _passes(reports: Iterable[Mapping[str, Any]]) -> str:
    rows = []
    for number, report in enumerate(reports, 1):
        counts = ", ".join(f"{kind} {count}" for kind, count in report["counts"].items())
        details = _sites("rewritten", report["sites"]) + _misses(report["near_misses"])
        if warning := report.get("warning"):
            details = f'<p class="warning">{_text(warning)}</p>{details}'
        name = _text(report.get("spec") or report["name"])
        opened = f"<details><summary>{name}</summary>{details}</details>" if details else name
        rows.append(
            f'<tr class="{"idle" if not report["matched"] else ""}"><td class="num">{number}</td><td>{opened}</td>'
            f'<td><span class="tier {_text(report["tier"])}">{_text(report["tier"])}</span></td>'
            f'<td class="num">{report["matched"]}</td><td class="num">{len(report["near_misses"]) or ""}</td>'
            f'<td class="num">{report["seconds"] * 1000:.0f} ms</td><td class="wide">{_text(counts)}</td></tr>'
        )
    return _table([">#", "pass", "tier", ">matches", ">near misses", ">time", "kinds"], rows)


def _sites(title: str, sites: Sequence[Mapping[str, str]]) -> str:
    return _places(title, [(site["node"], site["source"], "") for site in sites])


def _misses(misses: Sequence[Mapping[str, str]]) -> str:
    return _places("near misses", [(miss["node"], miss["source"], miss["predicate"]) for miss in misses])


def _places(title: str, places: Sequence[tuple[str, str, str]]) -> str:
    """Places with those that differ only by layer counted together."""
    if not places:
        return ""
    first: dict[tuple[str, ...], tuple[str, str, str]] = {}
    counts: Counter[tuple[str, ...]] = Counter()
    for place in places:
        key = tuple(map(normal, place))
        first.setdefault(key, place)
        counts[key] += 1
    rows = []
    for key, (node, source, reason) in list(first.items())[:_SHOWN_SITES]:
        why = f'<br><span class="reason">{_text(reason)}</span>' if reason else ""
        times = f"{counts[key]}×" if counts[key] > 1 else ""
        rows.append(
            f'<tr><td class="num">{times}</td><td><code>{_text(node)}</code>{why}</td>'
            f'<td class="quiet">{_text(source)}</td></tr>'
        )
    more = len(first) - len(rows)
    rest = f'<p class="quiet">and {more} more kinds of place</p>' if more > 0 else ""
    return f"<h4>{escape(title)}</h4>{_table(['', 'node', 'model source'], rows)}{rest}"


def _stages(bundle: Bundle) -> str:
    tabs, panels = [], []
    texts = [(_stage_name(path), bundle.file(path).read_text()) for path in bundle.manifest.stages]
    for number, ((before, old), (after, new)) in enumerate(pairwise(texts)):
        rows = diff_stages(old, new)
        changes = sum(row.change != "same" for row in rows)
        label = f"{_text(before)} → {_text(after)}"
        tabs.append(f'<button data-panel="diff{number}">{label} <span class="quiet">{changes}</span></button>')
        panels.append(
            f'<div class="panel" id="diff{number}"><table class="diff"><thead><tr><th>{_text(before)}</th>'
            f"<th>{_text(after)}</th></tr></thead>{''.join(_diff_rows(rows))}</table></div>"
        )
    note = (
        '<p class="quiet">Layers that repeat another are one line. Lines that differ only by the numbers in names count '
        "as the same. Select a marked run to see it.</p>"
    )
    return f'{note}<div class="tabs">{"".join(tabs)}</div>{"".join(panels)}'


def _diff_rows(rows: Sequence[Row]) -> Iterator[str]:
    """Bodies of the table: runs of unchanged rows are closed, except beside a change."""
    groups = [list(run) for _, run in groupby(rows, key=lambda row: row.change == "same")]
    for number, run in enumerate(groups):
        if run[0].change != "same":
            yield f"<tbody>{''.join(map(_diff_row, run))}</tbody>"
            continue
        head = CONTEXT if number else 0
        tail = len(run) - (CONTEXT if number + 1 < len(groups) else 0)
        if tail - head < 2:
            head = tail = len(run)
        yield f"<tbody>{''.join(map(_diff_row, run[:head]))}</tbody>"
        if head < tail:
            yield f'<tbody class="gap"><tr><td colspan="2"><button>{tail - head} unchanged lines</button></td></tr></tbody>'
            yield f"<tbody hidden>{''.join(map(_diff_row, run[head:tail]))}</tbody>"
        yield f"<tbody>{''.join(map(_diff_row, run[tail:]))}</tbody>"


def _diff_row(row: Row) -> str:
    cells = []
    for side, line in (("old", row.left), ("new", row.right)):
        kind = "" if row.change == "same" else side
        if line is None:
            cells.append('<td class="none"></td>')
        elif line.fold:
            cells.append(f'<td class="fold">{_text(line.text)}</td>')
        else:
            cells.append(f'<td class="{kind}">{_code(line.text)}</td>')
    return f"<tr>{''.join(cells)}</tr>"


def _code(line: str) -> str:
    """A line of IR with its model source set apart."""
    code, mark, source = line.partition("   // ")
    shown = _text(code)
    if len(code) > _LONGEST_LINE:
        shown = f'<span title="{escape(code[: 4 * _LONGEST_LINE])}">{_text(code[:_LONGEST_LINE])}…</span>'
    return shown + (f' <i title="{escape(source)}">{_text(source)}</i>' if mark else "")


def _pieces(bundle: Bundle, times: Times | None) -> str:
    manifest = bundle.manifest
    sizes = {entry.path: entry.size for entry in manifest.files}
    weights = _weight_bytes(manifest)
    counts = sorted({tokens for row in (times or {}).values() for tokens in row})
    rows = [_piece_row(bundle, index, piece, sizes, weights, times, counts) for index, piece in enumerate(manifest.pieces)]
    heads = ["piece", ">calls", "after attention of layers", ">code", ">weights, all calls", ">weights, one call"]
    heads += [f">T = {tokens}" for tokens in counts]
    note = "" if times else '<p class="quiet">Give <code>--time</code> to have each piece timed on this machine.</p>'
    texts = "".join(
        f"<details><summary>IR of {_text(piece.name)}</summary><pre>{_text(bundle.file(piece.ir).read_text())}</pre></details>"
        for piece in manifest.pieces
    )
    return f"{_strip(manifest)}{_table(heads, rows)}{note}{texts}"


def _piece_row(
    bundle: Bundle,
    index: int,
    piece: PieceEntry,
    sizes: Mapping[str, int],
    weights: Mapping[str, int],
    times: Times | None,
    counts: Sequence[int],
) -> str:
    calls = [step for step in bundle.manifest.program.steps if step.piece == piece.name]
    names = dict.fromkeys(name for step in calls for name in step.params)
    total = sum(weights.get(name, 0) for name in names)
    one = sum(weights.get(name, 0) for name in calls[0].params) if calls else 0
    timed = "".join(f'<td class="num">{_duration((times or {}).get(piece.name, {}).get(tokens))}</td>' for tokens in counts)
    code = sum(sizes[item.file] for item in piece.ranges)
    return (
        f'<tr><td><span class="swatch c{index % _COLOURS}"></span>{_text(piece.name)}</td><td class="num">{len(calls)}</td>'
        f'<td>{_text(_spans(piece.layers) or "–")}</td><td class="num">{_size(code)}</td>'
        f'<td class="num">{_size(total)}</td><td class="num">{_size(one)}</td>{timed}</tr>'
    )


def _strip(manifest: Manifest) -> str:
    """The program as a row of cells: one colour for each piece, an attention op between two."""
    index = {piece.name: number for number, piece in enumerate(manifest.pieces)}
    cells = "".join(_cell(step, index) for step in manifest.program.steps)
    return f'<div class="strip" aria-label="steps of the program">{cells}</div>'


def _cell(step: Step, index: Mapping[str, int]) -> str:
    if step.kind == "piece":
        return f'<span class="c{index[step.piece] % _COLOURS}" title="piece {escape(step.piece)}"></span>'
    layer = f" of layer {step.attrs['layer']}" if "layer" in step.attrs else ""
    return f'<span class="op" title="{escape(step.op + layer)}"></span>'


def _weight_bytes(manifest: Manifest) -> dict[str, int]:
    from math import prod

    widths = {"f32": 4, "bf16": 2, "f16": 2, "i64": 8, "i32": 4, "i8": 1, "u8": 1, "bool": 1}
    return {
        tensor.name: prod(tensor.shape) * widths.get(tensor.dtype, 1) for tensor in manifest.weights.tensors
    }


def _dispatch(manifest: Manifest) -> str:
    rows = [
        f"<tr><td>{_text(name)}</td><td>{start if start == end else f'{start} to {end}'}</td>"
        f"<td><code>{_text(file)}</code></td></tr>"
        for name, ranges in manifest.dispatch_table().items()
        for start, end, file in ranges
    ]
    return _table(["piece", "tokens of a step", "artifact"], rows)


def _storage(report: Mapping[str, Any]) -> str:
    """Planned bytes of computed values, for each piece and between pieces."""
    rows = [
        f"<tr><td>{_text(name)}</td><td><code>{_text(row['arena'])}</code></td>"
        + "".join(f'<td class="num">{_size(row[key])}</td>' for key in ("arena_bytes", "unshared_bytes", "output_bytes"))
        + f'<td class="num">{row["in_place"]}</td><td class="num">{row["views"]}</td></tr>'
        for name, row in [*report["pieces"].items(), ("between pieces", report["between"])]
    ]
    heads = ["piece", "arena, bytes", f"at {report['tokens']} tokens", "without sharing", "outputs", "in place", "views"]
    return _table(heads, rows)


def _stored_reports(bundle: Bundle) -> Iterator[str]:
    """The storage plans, what was measured at compile time and what `treadle verify` found, if the bundle has it."""
    if "reports/storage.json" in bundle.manifest.reports:
        yield _section("memory", "Memory", _storage(json.loads(bundle.file("reports/storage.json").read_bytes())))
    if "reports/profit.json" in bundle.manifest.reports:
        yield _section("measured", "Measured choices", _profit(json.loads(bundle.file("reports/profit.json").read_bytes())))
    if "reports/verify.json" in bundle.manifest.reports:
        yield _section("proof", "Proof", _proof(json.loads(bundle.file("reports/verify.json").read_bytes())))


def _profit(report: Mapping[str, Any]) -> str:
    if report["reason"]:
        return f"<p>{_text(report['reason'])}</p>"
    rows = []
    for choice in report["choices"]:
        for point in choice["times"]:
            rows.append(
                f'<tr><td>{_text(choice["name"])}</td><td class="num">{point["tokens"]}</td>'
                f'<td class="num">{_duration(point["with_pass"])}</td><td class="num">{_duration(point["without"])}</td>'
                f"<td>{'kept' if choice['kept'] else 'left out'}</td></tr>"
            )
    return _table(["pass", ">tokens", ">with it", ">without it", "decision"], rows)


def _proof(proof: Mapping[str, Any]) -> str:
    found: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for check in proof["checks"]:
        place = f"{check['kind']} {check['position']}" if check["position"] else check["kind"]
        found.setdefault((place, check["name"]), []).append(check)
    rows = []
    for (place, name), checks in found.items():
        errors = {check["tokens"]: check for check in checks}
        cells = "".join(
            f'<td class="num {"" if errors[tokens]["ok"] else "bad"}">{_error(errors[tokens]["error"])}</td>'
            for tokens in proof["shapes"]
        )
        bound = f"{checks[0]['bound']:.0e}" if checks[0]["bound"] else "bitwise"
        rows.append(f'<tr><td>{_text(place)}</td><td>{_text(name)}</td><td class="num">{bound}</td>{cells}</tr>')
    verdict = "Everything holds." if proof["ok"] else '<span class="bad">Something differs.</span>'
    heads = ["what", "name", ">allowed", *(f">T = {tokens}" for tokens in proof["shapes"])]
    return f"<p>{verdict} Seed {proof['seed']}; errors are relative to the largest output.</p>{_table(heads, rows)}"


def _error(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _settings(manifest: Manifest) -> str:
    rows = []
    for row in manifest.settings:
        why = f"asked for {row.asked!r}: {row.reason}" if row.reason else ""
        rows.append(
            f"<tr><td>{_text(row.field)}</td><td><code>{_text(row.value)}</code></td><td>{_text(row.source)}</td>"
            f'<td class="wide">{_text(why)}</td></tr>'
        )
    return _table(["setting", "value", "decided by", "why it is not what was asked for"], rows)


def _times(manifest: Manifest) -> str:
    longest = max((row.seconds for row in manifest.times), default=0) or 1
    rows = [
        f'<tr><td>{_text(row.stage)}</td><td class="num">{row.seconds:.1f} s</td><td class="wide">'
        f'<meter max="{longest:.3f}" value="{row.seconds:.3f}"></meter></td></tr>'
        for row in manifest.times
    ]
    return _table(["stage", ">time", ""], rows)


def _section(anchor: str, title: str, body: str) -> str:
    return f'<section id="{anchor}"><h2>{escape(title)}</h2>{body}</section>'


def _table(heads: Sequence[str], rows: Sequence[str]) -> str:
    """A table from its rows; a heading that starts with ">" stands over numbers."""
    head = "".join(f'<th class="num">{escape(name[1:])}</th>' if name[:1] == ">" else f"<th>{escape(name)}</th>" for name in heads)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _stage_name(path: str) -> str:
    return Path(path).stem.partition("-")[2]


def _text(value: object) -> str:
    return escape(str(msgspec.to_builtins(value) if not isinstance(value, str) else value))


def _size(count: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def _spans(layers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in runs)
