"""Llama 3.2 and 4, ToolACE: the whole answer is a Python list of calls, `[weather(city="Oslo", days=2), now()]`."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from treadle.runtime.chat.reader import (
    Arguments,
    CallStart,
    Content,
    Pieces,
    Text,
    Tools,
    everything,
    starts_with,
)
from treadle.runtime.chat.tool_formats import ToolFormat

START, END = "<|python_start|>", "<|python_end|>"
_OPENS = re.compile(r"\s*\[\s*([A-Za-z_][\w.-]*)\s*\(")
_MAY_OPEN = re.compile(r"\s*(\[\s*([A-Za-z_][\w.-]*\s*)?)?\Z")
_NAMES = {"true": True, "false": False, "null": None}


def parse(text: Text, tools: Tools) -> Pieces[None]:
    """Calls come out when the list is complete: what Python's parser refuses, or names no tool, is content."""
    marked = yield from starts_with(text, START)
    while _MAY_OPEN.match(text.rest) and not text.ended:
        yield None
    found = _OPENS.match(text.rest)
    if found and found[1] in tools:
        while (end := _end_of_list(text.rest)) is None and not text.ended:
            yield None
        calls = _calls(text.rest[:end], tools) if end else []
        for name, arguments in calls:
            yield CallStart(name)
            yield Arguments(json.dumps(arguments, ensure_ascii=False))
        if calls:
            text.take(end)
            yield from starts_with(text, END)
            marked = False
    if marked:
        yield Content(START)
    yield from everything(text)


def _end_of_list(text: str) -> int | None:
    """The place after the bracket that closes the list; None while it is open."""
    depth, quote, escaped = 0, "", False
    for place, character in enumerate(text):
        if quote:
            if escaped or character == "\\":
                escaped = not escaped
            elif character == quote:
                quote = ""
        elif character in "\"'":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth == 0:
                return place + 1
    return None


def _calls(source: str, tools: Tools) -> list[tuple[str, dict[str, Any]]]:
    """The calls of a list; none if anything in it is not a call of a tool with literal keyword arguments."""
    try:
        tree = ast.parse(source.strip(), mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else []
        return [_call(node, tools) for node in nodes]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _call(node: ast.expr, tools: Tools) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with keyword arguments only")
    name = ast.unparse(node.func)
    if name not in tools:
        raise ValueError("not a tool")
    return name, {str(keyword.arg): _literal(keyword.value) for keyword in node.keywords}


def _literal(node: ast.expr) -> Any:
    """The value of a literal, in which JSON's names stand for its constants too."""
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_literal(key) if key is not None else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("JSON objects have strings as keys")
        return dict(zip(keys, map(_literal, node.values), strict=True))
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("not a value that JSON has")
    return value


FORMAT = ToolFormat(parse=parse, marks=(START, END))
