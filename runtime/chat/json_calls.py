"""Reads tool calls written as JSON: `{"name": ..., "arguments": {...}}`, alone or in a list, arguments as they come."""

from __future__ import annotations

import json
import re
from collections.abc import Container
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, NamedTuple

from treadle.runtime.chat.reader import Arguments, CallStart, Pieces, Text

ARGUMENTS = ("arguments", "parameters")
_MEMBERS = ("name", "function", "type", "id", *ARGUMENTS)
"""Members a call may have; an object with another one before its arguments is no call."""

_DECODER = json.JSONDecoder(strict=False)
_OUTSIDE, _INSIDE = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')
_SPACE = re.compile(r"[ \t\r\n]*")


class _Head(NamedTuple):
    """A call up to its arguments: those start at `place`, or the call ends there and they are `arguments`."""

    name: str
    place: int
    arguments: str | None = None


class _More(Exception):
    """The text ends before it can be told."""


class _NoCall(Exception):
    """What stands there is not a call."""


def read_calls(text: Text, names: Container[str] | None = None, *, separators: str = ",") -> Pieces[int]:
    """Yields the calls that come next, one or a list of them, and returns how many; 0 takes nothing from the text.

    With `names` only those are calls. Characters of `separators` may stand between two.
    """
    opened = yield from _list_opens(text)
    count = 0
    while (yield from _one_call(text, names, 0 if count else opened)):
        count += 1
        yield from _skip(text, separators)
    if count and opened:
        yield from _skip(text, "]")
    return count


def stream_value(text: Text) -> Pieces[None]:
    """Yields the JSON object or list that comes next as arguments, up to where it closes or the text ends."""
    depth, in_string, place = 0, False, 0
    while True:
        while match := (_INSIDE if in_string else _OUTSIDE).search(text.rest, place):
            place = match.end()
            character = match.group()
            if character == "\\":
                place += 1
            elif character == '"':
                in_string = not in_string
            else:
                depth += 1 if character in "{[" else -1
                if depth <= 0:
                    yield Arguments(text.take(place))
                    return
        place = max(place - len(text.rest), 0)
        if text.rest:
            yield Arguments(text.take())
        if text.ended:
            return
        yield None


def _list_opens(text: Text) -> Pieces[int]:
    """Number of characters up to and with the bracket of a list of calls; 0 if none opens."""
    while not (bare := text.rest.lstrip()) and not text.ended:
        yield None
    return len(text.rest) - len(bare) + 1 if bare.startswith("[") else 0


def _one_call(text: Text, names: Container[str] | None, offset: int) -> Pieces[bool]:
    """Yields the call that starts after `offset` characters, which are taken with it; False if there is none."""
    while True:
        try:
            head = _scan(text.rest, offset)
            break
        except _NoCall:
            return False
        except _More:
            if text.ended:
                return False
            yield None
    if names is not None and head.name not in names:
        return False
    text.take(head.place)
    yield CallStart(head.name)
    if head.arguments is not None:
        yield Arguments(head.arguments)
        return True
    yield from stream_value(text)
    yield from _close(text)
    return True


def _scan(text: str, place: int) -> _Head:
    """Reads the head of a call. Raises _NoCall, or _More where the text ends too early."""
    name: str | None = None
    arguments: str | None = None
    place = _expect(text, place, "{")
    while True:
        place = _spaces(text, place)
        if text[place] == "}":
            if name is None:
                raise _NoCall
            return _Head(name, place + 1, arguments or "{}")
        if text[place] == ",":
            place = _spaces(text, place + 1)
        key, place = _string(text, place)
        if key not in _MEMBERS:
            raise _NoCall
        place = _spaces(text, _expect(text, place, ":"))
        if key in ARGUMENTS and name is not None and text[place] == "{":
            return _Head(name, place)
        value, place = _value(text, place)
        if isinstance(value, dict) and key == "function":
            name, arguments = _name(value.get("name")), _as_text(_first(value, ARGUMENTS))
        elif key in ("name", "function"):
            name = _name(value)
        elif key in ARGUMENTS:
            arguments = _as_text(value)


def _close(text: Text) -> Pieces[None]:
    """Takes what follows the arguments within the call's object: other members, the closing brace."""
    while True:
        try:
            place = _spaces(text.rest, 0)
            if text.rest[place] == ",":
                _, place = _string(text.rest, _spaces(text.rest, place + 1))
                _, place = _value(text.rest, _spaces(text.rest, _expect(text.rest, place, ":")))
                _spaces(text.rest, place)  # a number is only known to have ended by what follows it
                text.take(place)
                continue
            if text.rest[place] == "}":
                text.take(place + 1)
            return
        except _NoCall:
            return
        except _More:
            if text.ended:
                return
            yield None


def _skip(text: Text, characters: str) -> Pieces[None]:
    """Takes whitespace and `characters`; whitespace that ends the text so far too."""
    while True:
        bare = text.rest.lstrip(characters + " \t\r\n")
        text.take(len(text.rest) - len(bare))
        if bare or text.ended:
            return
        yield None


def _spaces(text: str, place: int) -> int:
    """The place after whitespace, where a character stands. Raises _More at the end."""
    match = _SPACE.match(text, place)
    place = match.end() if match else place
    if place >= len(text):
        raise _More
    return place


def _expect(text: str, place: int, character: str) -> int:
    place = _spaces(text, place)
    if text[place] != character:
        raise _NoCall
    return place + 1


def _string(text: str, place: int) -> tuple[str, int]:
    if text[place] != '"':
        raise _NoCall
    try:
        return scanstring(text, place + 1, False)
    except ValueError as error:
        raise _More from error


def _value(text: str, place: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, place)
    except (ValueError, RecursionError) as error:
        raise _More from error


def _name(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _NoCall
    return value


def _first(value: dict[str, Any], keys: tuple[str, ...]) -> Any:
    return next((value[key] for key in keys if key in value), None)


def _as_text(arguments: Any) -> str | None:
    """Arguments as JSON text; some models write them as a string that holds it."""
    if arguments is None:
        return None
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
