"""Turns messages as clients send them into what a chat template expects: roles, contents, tool calls.

Text only; a part of another kind is refused by name. What is rendered from the result is the template's affair.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from treadle.ir.errors import UserError
from treadle.runtime.chat.tools_as_text import call_as_text

logger = logging.getLogger(__name__)

ContentFormat = Literal["string", "openai", "both"]
"""Which contents a template renders: plain strings, lists of typed parts, or either."""

PART_SEPARATOR = "\n"
"""Joins the text parts of one message for a template that knows strings only."""


class ChatError(UserError):
    """Messages that cannot become a prompt; `param` names the place, such as `messages[2].content[0].type`."""

    def __init__(self, message: str, param: str = "messages"):
        super().__init__(message)
        self.param = param


def _text_field(name: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda part: part.get(name)


PART_PARSERS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "text": _text_field("text"),
    "input_text": _text_field("text"),
    "output_text": _text_field("text"),
    "refusal": _text_field("refusal"),
    "thinking": _text_field("thinking"),
}
"""Part type -> how to read its text. The single way by which a structured part enters a prompt."""


def normalise_messages(
    messages: Sequence[Mapping[str, Any]], content_format: ContentFormat, *, shows_tool_calls: bool = True
) -> list[dict[str, Any]]:
    """Returns one conversation message for each given one, with contents in the form the template renders.

    A null content is empty, never the word None. Arguments of tool calls become objects. For a template that
    cannot show tool calls they are appended to the content as text, so that nothing is dropped in silence.
    Raises ChatError naming the message for a shape that is not the chat format's.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise ChatError(f"messages should be a list of messages, not {type(messages).__name__}")
    if not messages:
        raise ChatError("messages is empty; send at least one message")
    return [
        _normalise_message(message, f"messages[{i}]", content_format, shows_tool_calls)
        for i, message in enumerate(messages)
    ]


def _normalise_message(
    message: Mapping[str, Any], where: str, content_format: ContentFormat, shows_tool_calls: bool
) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ChatError(f"{where} should be an object with a role and a content", where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ChatError(f"{where}.role should be a name such as system, user, assistant or tool", f"{where}.role")
    texts = _content_texts(message.get("content"), f"{where}.content")
    calls = _tool_calls(message.get("tool_calls"), f"{where}.tool_calls")
    if calls and not shows_tool_calls:
        texts += [call_as_text(call["function"]) for call in calls]
    kept = {key: value for key, value in message.items() if value is not None and key not in ("content", "tool_calls")}
    kept["content"] = _shaped(texts, message.get("content"), content_format)
    if calls:
        kept["tool_calls"] = calls
    return kept


def _content_texts(content: Any, where: str) -> list[str]:
    """The texts of a content: none for null, one for a string, one for each part of a list."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        return [_part_text(part, f"{where}[{i}]") for i, part in enumerate(content)]
    raise ChatError(f"{where} should be a string, a list of parts or null, not {type(content).__name__}", where)


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise ChatError(f"{where} should be an object with a type, or a string", where)
    kind = part.get("type", "text" if "text" in part else None)
    if not isinstance(kind, str) or kind not in PART_PARSERS:
        known = ", ".join(PART_PARSERS)
        raise ChatError(f"{where}.type is {kind!r}; this model takes parts of type: {known}", f"{where}.type")
    text = PART_PARSERS[kind](part)
    if not isinstance(text, str):
        raise ChatError(f"{where} of type {kind!r} should carry its text as a string", where)
    return text


def _shaped(texts: list[str], content: Any, content_format: ContentFormat) -> str | list[dict[str, str]]:
    as_list = content_format == "openai" or (
        content_format == "both" and isinstance(content, Sequence) and not isinstance(content, str) and len(texts) > 1
    )
    return [{"type": "text", "text": text} for text in texts] if as_list else PART_SEPARATOR.join(texts)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if calls is None:
        return []
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise ChatError(f"{where} should be a list of tool calls", where)
    return [_tool_call(call, f"{where}[{j}]") for j, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ChatError(f"{where} should be an object with a function that has a name", where)
    arguments = repair_arguments(function.get("arguments"), where)
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def repair_arguments(arguments: Any, where: str) -> dict[str, Any]:
    """Returns a tool call's arguments as an object; null and "" are {}, and so is what is not a JSON object.

    Malformed arguments are replaced with a warning, not refused: the message stays in the chat's history, and
    refusing it once would make every later turn fail too.
    """
    if isinstance(arguments, Mapping):
        return dict(arguments)
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    parsed = _parsed(arguments)
    if isinstance(parsed, dict):
        return parsed
    logger.warning("%s.function.arguments is not a JSON object; {} is used in its place", where)
    return {}


def _parsed(arguments: Any) -> Any:
    try:
        return json.loads(arguments)
    except (TypeError, ValueError, RecursionError):
        return None
