"""Shows tools to a model whose chat template cannot: described in the system message, called in Hermes' form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

CALL_BEGIN, CALL_END = "<tool_call>\n", "\n</tool_call>"
_RESPONSE = "<tool_response>\n{}\n</tool_response>"

_INTRODUCTION = """You can call the tools below. Each line is a JSON object: a tool's name, what it does, the schema of its arguments.
<tools>
{tools}
</tools>
To call a tool, write its name and its arguments as JSON between these marks:
<tool_call>
{{"name": "the tool's name", "arguments": {{"argument": "value"}}}}
</tool_call>
Call a tool only where it helps. What it answers comes in the next message."""


def with_tools(conversation: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]], *, role: str) -> list[dict[str, Any]]:
    """The conversation with `tools` described in its first message, which is made if it has not that `role`.

    Results of tools become messages of the user. Contents are those the normaliser gives: text, or lists of text parts.
    """
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    introduction = _INTRODUCTION.format(tools=lines)
    messages = [_result_as_user(message) for message in conversation]
    if messages[0].get("role") != role:
        return [{"role": role, "content": introduction}, *messages]
    first = messages[0]
    content = first["content"]
    joined = f"{introduction}\n\n{content}" if isinstance(content, str) else [{"type": "text", "text": introduction}, *content]
    return [{**first, "content": joined}, *messages[1:]]


def call_as_text(function: Mapping[str, Any]) -> str:
    """An earlier call of the assistant as it would have written it."""
    call = {"name": function["name"], "arguments": function["arguments"]}  # models write the name first
    return CALL_BEGIN + json.dumps(call, ensure_ascii=False) + CALL_END


def _result_as_user(message: dict[str, Any]) -> dict[str, Any]:
    if message.get("role") != "tool":
        return message
    content = message["content"]
    text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
    marked = _RESPONSE.format(text)
    return {"role": "user", "content": marked if isinstance(content, str) else [{"type": "text", "text": marked}]}
