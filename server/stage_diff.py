"""Two stages of IR text side by side: equal layers folded into one line, unchanged runs marked, changes paired."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import groupby
from typing import Literal

_LAYER = re.compile(r"\b(?:layers|layer|h|blocks?|blk|kv)\.(\d+)\b")
_SOURCE = re.compile(r"   // (.+)$")
Change = Literal["same", "changed", "added", "removed"]


@dataclass(frozen=True)
class Line:
    """A line of IR, or (`fold`) what stands for the lines of layers that repeat. `key` is equal for equal meaning."""

    text: str
    key: str
    fold: bool = False


@dataclass(frozen=True)
class Row:
    """A row of the side by side view; a side is None where the other has a line of its own."""

    change: Change
    left: Line | None
    right: Line | None


def normal(text: str) -> str:
    """A line without what differs from layer to layer: layer indices, numbers of names, names of pieces."""
    text = re.sub(r"\.\d+(?=\.)", ".*", text)
    text = re.sub(r"(%[A-Za-z_][\w*.]*?)(?:\.\d+)+(?![\w.])", r"\1", text)
    text = re.sub(r"\blayer=\d+", "layer=*", text)
    text = re.sub(r"\bpiece\d+", "piece*", text)
    return re.sub(r"\b(layers|h|blocks?|blk|kv)\.\d+\b", r"\1.*", text)


def fold_layers(text: str) -> list[Line]:
    """The lines of a stage, where a block that equals an earlier one up to its layer is one line."""
    lines: list[Line] = []
    seen: set[tuple[str, ...]] = set()
    repeated: list[_Place] = []
    for place, block in _blocks(text.splitlines()):
        key = tuple(map(normal, block))
        if place is not None and key in seen:
            if repeated and repeated[-1][0] != place[0]:
                lines += _fold_line(repeated)
                repeated = []
            repeated.append(place)
            continue
        lines += _fold_line(repeated)
        repeated = []
        seen.add(key)
        lines += [Line(line, normal(line)) for line in block]
    return lines + _fold_line(repeated)


_Place = tuple[str, int]
"""("layer", index) or ("piece", number)."""


def _blocks(lines: list[str]) -> Iterator[tuple[_Place | None, list[str]]]:
    """Runs of lines that belong to one layer, or to one piece of a split program."""
    pieces = any(line.startswith("program @") for line in lines)
    current: _Place | None = None
    number = -1
    placed: list[tuple[_Place | None, str]] = []
    for line in lines:
        if pieces and line.startswith("graph @"):
            number += 1
            current = ("piece", number)
        elif line.startswith(("graph @", "program @")):
            current = None
        elif current is None or current[0] == "layer":
            current = _layer_of(line, current)
        placed.append((current, line))
    for place, run in groupby(placed, key=lambda item: item[0]):
        yield place, [line for _, line in run]


def _layer_of(line: str, before: _Place | None) -> _Place | None:
    """The layer of a line; one that names no place stays with the line before, unless it is a declaration."""
    source = _SOURCE.search(line)
    found = _LAYER.search(source[1] if source else line)
    if found is not None:
        return "layer", int(found[1])
    declared = line.lstrip().startswith(("input ", "param ", "weight ", "return", "}"))
    return None if source is not None or declared else before


def _fold_line(places: list[_Place]) -> list[Line]:
    if not places:
        return []
    kind, low, high = places[0][0], min(places)[1], max(places)[1]
    which = f"{kind} {low} repeats" if low == high else f"{kind}s {low} to {high} repeat"
    return [Line(f"{which} what stands above, with other weights and names", f"fold {kind} {low} {high}", fold=True)]


def diff_stages(before: str, after: str) -> list[Row]:
    """Rows of two stages. Lines that differ only by the numbers in names count as the same."""
    left, right = fold_layers(before), fold_layers(after)
    matcher = SequenceMatcher(None, [line.key for line in left], [line.key for line in right], autojunk=False)
    rows: list[Row] = []
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag == "equal":
            rows += [Row("same", one, other) for one, other in zip(left[a:b], right[c:d], strict=True)]
        else:
            rows += _align(left[a:b], right[c:d])
    return rows


def _align(left: list[Line], right: list[Line]) -> Iterator[Row]:
    """Pairs the lines of a change that come from the same line of the model; the rest have a row of their own."""
    matcher = SequenceMatcher(None, list(map(_place, left)), list(map(_place, right)), autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag == "equal":
            yield from map(_row, left[a:b], right[c:d])
        else:
            yield from (_row(line, None) for line in left[a:b])
            yield from (_row(None, line) for line in right[c:d])


def _place(line: Line) -> str:
    """Where a node came from in the model and what kind of op it is; the whole line for anything else."""
    source = _SOURCE.search(line.text)
    if source is None:
        return line.key
    op = re.search(r"= (?:aten\.)?(\w+)", line.text)
    return f"{normal(source[1])} {op[1] if op else ''}"


def _row(left: Line | None, right: Line | None) -> Row:
    if left is None:
        return Row("added", None, right)
    return Row("removed", left, None) if right is None else Row("changed", left, right)
