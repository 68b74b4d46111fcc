"""The `repeat` block of the text form: lines that stand for several, one copy for each value of `i`.

    repeat i in 1..29 {
      %L{i}.add: f32[T,64] = aten.add.Tensor(%L{i-1}.add, %model.layers.{i}.bias)
    }

It is expanded before the text is read as a graph. Folding, the way back, has its own module.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from treadle.ir.errors import VerifyError

HEAD = re.compile(r"\s*repeat i in (\d+)\.\.(\d+)(?: step (\d+))? \{$")
INDEX = re.compile(r"\{i([+-]\d+)?\}")

Line = tuple[int, str]
"""A line of text with its number, for errors."""


def expand_text(text: str) -> str:
    """The same text without repeat blocks. Raises VerifyError with the line number for a block that cannot be read."""
    return "".join(f"{line}\n" for _, line in expand_lines(text))


def expand_lines(text: str) -> list[Line]:
    """Every line of the text with its number; those of a repeat block come once for each index, in order."""
    lines: list[Line] = []
    rest = iter(enumerate(text.splitlines(), 1))
    for number, line in rest:
        if not line.lstrip().startswith("repeat "):
            lines.append((number, line))
            continue
        values = _indices(number, line)
        body = _body(number, rest)
        lines += [(at, _put(at, inner, index)) for index in values for at, inner in body]
    return lines


def _indices(number: int, line: str) -> range:
    match = HEAD.match(line)
    if match is None:
        raise VerifyError(f"line {number}: expected `repeat i in 1..29 {{` or `repeat i in 0..24 step 6 {{`\n  {line.strip()}")
    first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
    if last < first or step < 1:
        raise VerifyError(f"line {number}: a repeat needs a rising range and a step of at least 1\n  {line.strip()}")
    return range(first, last + 1, step)


def _body(start: int, rest: Iterator[Line]) -> list[Line]:
    body: list[Line] = []
    for number, line in rest:
        if line.strip() == "}":
            return body
        if line.lstrip().startswith("repeat "):
            raise VerifyError(f"line {number}: a repeat cannot stand in a repeat\n  {line.strip()}")
        body.append((number, line.removeprefix("  ")))
    raise VerifyError(f"line {start}: the repeat is never closed with }}")


def _put(number: int, line: str, index: int) -> str:
    try:
        return put_index(line, index)
    except ValueError as error:
        raise VerifyError(f"line {number}: {error}\n  {line.strip()}") from error


def put_index(text: str, index: int) -> str:
    """The text with `{i}`, `{i+2}` and `{i-1}` as numbers. Raises ValueError for a negative one."""

    def value(match: re.Match[str]) -> str:
        found = index + int(match[1] or 0)
        if found < 0:
            raise ValueError(f"{match[0]} is {found} for i = {index}")
        return str(found)

    return INDEX.sub(value, text)
