"""Folds the text form: layers that are equal up to their number print once, in a `repeat` block.

It works on text, so that it folds graphs and split programs alike. Values made in a block are renamed by the rule
`%L{i}.name`, where a value that the next layer reads counts as that layer's; what enters the first layer is renamed
alike. Everything else, weights and inputs among it, keeps its name, and expanding gives the whole graph back.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from treadle.ir.repeat_text import expand_text, put_index

_TOKEN = re.compile(r"%[\w.]+|\d+")
_LAYER = re.compile(r"\.(\d+)(?=[.\s;,)\]:]|$)")
_MAX_PERIOD = 8
_PREFIXES = "LMNPQRSUVWXYZ"
_MARK = "\0"  # stands for the % of a name that a block has given, until all names are final


def fold_text(text: str) -> str:
    """The text with equal layers folded. Blocks that are there already are expanded first, so folding twice is once."""
    lines = expand_text(text).splitlines()
    folded: list[str] = []
    start = 0
    for at, line in enumerate(lines):
        if line == "}":
            folded += [lines[start], *_fold_graph(lines[start + 1 : at]), line]
            start = at + 1
    return "\n".join([*folded, *lines[start:], ""])


@dataclass
class _Line:
    """A line in parts: `parts[1::2]` are its numbers and %names, in order; `made` are the results of a node."""

    text: str
    kind: str
    layer: int | None
    parts: list[str]
    made: list[str]

    @staticmethod
    def of(text: str, last: int | None) -> _Line:
        words = text.split(maxsplit=1)[0]
        kind = "node" if words.startswith("%") else words
        left = text.partition(" = ")[0].partition(": ")[0]
        parts = _split(text)
        made = re.findall(r"%[\w.]+", left) if kind == "node" else []
        return _Line(text, kind, _layer(text, kind, last), parts, made)


def _split(text: str) -> list[str]:
    parts, at = [], 0
    for match in _TOKEN.finditer(text):
        parts += [text[at : match.start()], match[0]]
        at = match.end()
    return [*parts, text[at:]]


def _layer(text: str, kind: str, last: int | None) -> int | None:
    """The number of the layer that a line belongs to; a node without a place goes with the one before it."""
    if kind == "return":
        return None
    code, _, comment = text.partition("   // ")
    if kind != "node":
        found = _LAYER.search(code.partition(": ")[0])
        return int(found[1]) if found else None
    path = comment.partition(" | ")[0]
    if path and not re.search(r"\.py:\d+$", path):
        found = re.search(r"(?:^|\.)(\d+)(?=\.|$)", path)
        return int(found[1]) if found else None
    if found := re.search(r"\blayer=(\d+)", code):
        return int(found[1])
    if " = piece " in code and (found := _LAYER.search(code.partition(";")[2])):
        return int(found[1])
    return last


@dataclass
class _Block:
    """Iterations that are equal up to their index, as one template; `names` are the new names of what they make."""

    template: list[str]
    indices: range
    used: int
    names: dict[str, str]

    def show(self) -> list[str]:
        step = f" step {self.indices.step}" if self.indices.step != 1 else ""
        head = f"  repeat i in {self.indices[0]}..{self.indices[-1]}{step} {{"
        return [head, *(f"  {line}" for line in self.template), "  }"]

    @property
    def saved(self) -> int:
        return (len(self.indices) - 1) * len(self.template) - 2


def _fold_graph(texts: Sequence[str]) -> list[str]:
    lines: list[_Line] = []
    for text in texts:
        lines.append(_Line.of(text, lines[-1].layer if lines and lines[-1].kind == "node" else None))
    segments = _segments(lines)
    names: dict[str, str] = {}
    shown: list[str] = []
    at, number = 0, 0
    while at < len(segments):
        block = _best(segments, at, _PREFIXES[min(number, len(_PREFIXES) - 1)], names)
        if block is None:
            shown += [line.text for line in segments[at]]
        else:
            shown += block.show()
            names |= block.names
            number += bool(block.names)
        at += block.used if block else 1
    made = [name for line in lines for name in line.made]
    if len({names.get(name, name).replace(_MARK, "%") for name in made}) != len(made):
        return list(texts)  # a name of the rule is taken already
    return [_rename(line, names).replace(_MARK, "%") for line in shown]


def _rename(text: str, names: Mapping[str, str]) -> str:
    return re.sub(r"%[\w.]+", lambda match: names.get(match[0], match[0]), text)


def _segments(lines: list[_Line]) -> list[list[_Line]]:
    """Neighbouring lines of one kind and layer."""
    segments: list[list[_Line]] = []
    for line in lines:
        if segments and (segments[-1][-1].kind, segments[-1][-1].layer) == (line.kind, line.layer):
            segments[-1].append(line)
        else:
            segments.append([line])
    return segments


def _best(segments: list[list[_Line]], at: int, prefix: str, taken: Mapping[str, str]) -> _Block | None:
    """The block starting at a segment that saves most lines, or None. Names in `taken` have been given already."""
    if segments[at][0].layer is None:
        return None
    blocks = []
    for period in range(1, min(_MAX_PERIOD, (len(segments) - at) // 2) + 1):
        groups = [
            [line for segment in segments[begin : begin + period] for line in segment]
            for begin in range(at, len(segments) - period + 1, period)
        ]
        block = _grow(groups, period, prefix)
        if block is not None and block.saved > 0 and not block.names.keys() & taken.keys():
            blocks.append(block)
    return max(blocks, key=lambda block: block.saved, default=None)


def _grow(groups: list[list[_Line]], period: int, prefix: str) -> _Block | None:
    """A block of as many leading groups as are equal up to the index; None for fewer than two."""
    low, high = groups[0][0].layer, groups[1][0].layer
    if low is None or high is None or high <= low or any("{" in line.text for line in groups[0]):
        return None
    pattern = _Pattern(groups[0], groups[1], low, high - low, prefix)
    if not pattern.make():
        return None
    names = dict(pattern.entries)
    count = 0
    for group in groups:
        index = low + count * (high - low)
        given = names | pattern.names_of(group, index)
        if [_rename(line.text, given) for line in group] != [put_index(line, index) for line in pattern.template]:
            break
        names, count = given, count + 1
    indices = range(low, low + count * (high - low), high - low)
    return _Block(pattern.template, indices, period * count, names) if count > 1 else None


class _Pattern:
    """What two neighbouring iterations have in common, as template lines."""

    def __init__(self, first: list[_Line], second: list[_Line], low: int, step: int, prefix: str):
        self._first, self._second = first, second
        self._low, self._step, self._prefix = low, step, prefix
        self._made = _made(first)
        own = set(_made(second))
        read = {token for line in second for token in line.parts[1::2]}
        self._carried = {name for name in self._made if name in read and name not in own}
        self._hints = _hints(self._made)
        self.entries: dict[str, str] = {}
        self.template: list[str] = []

    def make(self) -> bool:
        """Fills `template` and `entries`. False if the iterations differ by more than names and the index."""
        if len(self._first) != len(self._second) or len(self._made) != len(_made(self._second)):
            return False
        for old, new in zip(self._first, self._second, strict=True):
            if old.parts[::2] != new.parts[::2]:
                return False
            parts = list(old.parts)
            for at in range(1, len(parts), 2):
                token = self._token(old.parts[at], new.parts[at], old.kind == "node")
                if token is None:
                    return False
                parts[at] = token
            self.template.append("".join(parts))
        return len(set(self.entries.values())) == len(self.entries)

    def names_of(self, group: list[_Line], index: int) -> dict[str, str]:
        """The names by the rule for what one iteration makes."""
        made = _made(group)
        if len(made) != len(self._made):
            return {}
        return {name: put_index(self._rule(place), index) for place, name in enumerate(made)}

    def _rule(self, place: int) -> str:
        index = f"{{i+{self._step}}}" if self._made[place] in self._carried else "{i}"
        return f"{_MARK}{self._prefix}{index}.{self._hints[place]}"

    def _token(self, a: str, b: str, in_node: bool) -> str | None:
        if in_node and a in self._made:
            return self._rule(self._made.index(a))
        if in_node and b in self._carried:
            rule = f"{_MARK}{self._prefix}{{i}}.{self._hints[self._made.index(b)]}"
            name = put_index(rule, self._low)
            return rule if self.entries.setdefault(a, name) == name else None
        return self._indexed(a, b)

    def _indexed(self, a: str, b: str) -> str | None:
        """`a` with {i} for each number that is larger by the step in `b`; None if they differ in another way."""
        if a == b:
            return a
        parts, others = _split_numbers(a), _split_numbers(b)
        if parts[::2] != others[::2]:
            return None
        for at in range(1, len(parts), 2):
            one, other = parts[at], others[at]
            if one == other:
                continue
            if int(other) - int(one) != self._step:
                return None
            offset = int(one) - self._low
            parts[at] = f"{{i{offset:+d}}}" if offset else "{i}"
        return "".join(parts)


def _split_numbers(token: str) -> list[str]:
    return re.split(r"(\d+)", token)


def _made(lines: list[_Line]) -> list[str]:
    return [name for line in lines for name in line.made]


def _hints(names: list[str]) -> list[str]:
    """Short names, unique in the block: the old ones without layer prefix and number, numbered in order."""
    hints: list[str] = []
    seen: Counter[str] = Counter()
    for name in names:
        hint = re.sub(r"(\.\d+)+$", "", re.sub(r"^[A-Z]\d+\.", "", name[1:]))
        hints.append(f"{hint}.{seen[hint]}" if seen[hint] else hint)
        seen[hint] += 1
    return hints
