"""Reads an answer while it comes: text is fed in pieces of any size, what it says comes out as content, reasoning, calls.

A format is a generator over the text that has arrived: it takes what it has understood, yields pieces of the answer, and
yields None when it needs more text. Whole and streamed answers run the same generator, so they cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple, TypeVar


class Content(NamedTuple):
    """Text of the answer itself."""

    text: str


class Reasoning(NamedTuple):
    """Text of the reasoning before it."""

    text: str


class CallStart(NamedTuple):
    """A tool call begins; the arguments that follow belong to it."""

    name: str


class Arguments(NamedTuple):
    """A part of the arguments of the call that began last, as JSON text."""

    text: str


Piece = Content | Reasoning | CallStart | Arguments
R = TypeVar("R")
Pieces = Generator[Piece | None, None, R]
"""Pieces of an answer as they become known; None: more text is needed, which cannot happen once the text has ended."""

Tools = Mapping[str, Mapping[str, Any]]
"""Name of a tool -> the JSON schema of its arguments."""


class Text:
    """What has arrived of an answer and was not taken yet; `ended` once nothing will follow."""

    def __init__(self) -> None:
        self.rest = ""
        self.ended = False

    def take(self, length: int | None = None) -> str:
        """Removes and returns the first `length` characters, or all."""
        length = len(self.rest) if length is None else length
        taken, self.rest = self.rest[:length], self.rest[length:]
        return taken


class Reader:
    """Drives one format over one answer."""

    def __init__(self, parse: Callable[[Text], Pieces[None]]):
        self._text = Text()
        self._pieces = parse(self._text)

    def feed(self, text: str) -> list[Piece]:
        """Takes in more of the answer; returns what that made known."""
        self._text.rest += text
        return self._known()

    def finish(self) -> list[Piece]:
        """Says that the answer has ended; returns what was held back."""
        self._text.ended = True
        return self._known()

    def _known(self) -> list[Piece]:
        found: list[Piece] = []
        for piece in self._pieces:
            if piece is not None:
                found.append(piece)
            elif not self._text.ended:
                break
        return found


def until(text: Text, *marks: str, kind: type[Content] | type[Reasoning] = Content) -> Pieces[str | None]:
    """Yields text up to the first of `marks`, which is taken and returned; None if the text ends without one.

    A tail that may be the beginning of a mark is held back until it is known.
    """
    while True:
        found = [(place, mark) for mark in marks if (place := text.rest.find(mark)) >= 0]
        place, mark = min(found, default=(len(text.rest), ""))
        if not mark and not text.ended:
            place -= _tail_of_mark(text.rest, marks)
        if place:
            yield kind(text.take(place))
        if mark:
            text.take(len(mark))
            return mark
        if text.ended:
            return None
        yield None


def starts_with(text: Text, mark: str) -> Pieces[bool]:
    """Whether `mark` comes next, after whitespace; if so both are taken, otherwise neither."""
    while True:
        bare = text.rest.lstrip()
        if bare.startswith(mark):
            text.take(len(text.rest) - len(bare) + len(mark))
            return True
        if text.ended or not mark.startswith(bare):
            return False
        yield None


def everything(text: Text) -> Pieces[None]:
    """The rest is content."""
    yield from until(text)


def trimmed(pieces: Pieces[None]) -> Pieces[None]:
    """Drops whitespace where content, reasoning and calls meet; at both ends of an answer and within it stays."""
    last: type | None = None
    white, leading = "", False
    for piece in pieces:
        if piece is None:
            yield None
        elif isinstance(piece, Content | Reasoning):
            if type(piece) is not last:
                white, leading = "", last is not None or isinstance(piece, Reasoning)
                last = type(piece)
            shown = white + piece.text
            shown = shown.lstrip() if leading else shown
            body = shown.rstrip()
            white = shown[len(body) :]
            if body:
                leading = False
                yield type(piece)(body)
        else:
            last, white = CallStart, ""
            yield piece
    if white and last is Content:
        yield Content(white)


def first_call_only(pieces: Pieces[None]) -> Pieces[None]:
    """Drops everything from a second call on: for callers who take one call at a time."""
    calls = 0
    for piece in pieces:
        calls += isinstance(piece, CallStart)
        if piece is None or calls < 2:
            yield piece


def _tail_of_mark(text: str, marks: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that one of `marks` begins with."""
    longest = max((len(mark) for mark in marks), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0
