"""Constraints that make an answer a tool call: for `tool_choice` with a name or "required", and for calls within text.

`tools` are those of a chat request: `{"type": "function", "function": {"name": ..., "parameters": schema}}`. Whoever
parses tool calls chooses the form that its parser reads:

    tool_choice = a name   -> named_tool(tools, name)        the answer is the arguments, a JSON object
    tool_choice = required -> required_tools(tools)          the answer is [{"name": ..., "parameters": {...}}, ...]
    a model's own marks    -> tagged_tools(tools, begin=..., end=..., trigger=...)
                              free text in which each `trigger` starts a call; with `at_least_one` there is one for sure
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from treadle.ir.errors import UserError
from treadle.runtime.structured.constraint import StructuredOutputsParams

NAME = "{name}"
"""Stands for the tool's name in the `begin` of `tagged_tools`."""

_ANY_OBJECT = {"type": "object"}


def named_tool(tools: Sequence[Mapping[str, Any]], name: str) -> StructuredOutputsParams:
    """The answer is the arguments of one tool. Raises UserError that lists the tools if there is none of that name."""
    found = [_function(tool) for tool in tools if _function(tool)["name"] == name]
    if not found:
        known = ", ".join(_function(tool)["name"] for tool in tools) or "none"
        raise UserError(f"tool_choice names the function {name!r}, which is not among the tools: {known}")
    return StructuredOutputsParams(json=dict(_parameters(found[0])))


def required_tools(tools: Sequence[Mapping[str, Any]], *, parallel: bool = True) -> StructuredOutputsParams:
    """The answer is a JSON array of calls, each with `name` and `parameters`: at least one, just one unless `parallel`."""
    definitions: dict[str, Any] = {}
    calls = [_call(_function(tool), index, definitions) for index, tool in enumerate(tools)]
    if not calls:
        raise UserError("tool_choice 'required' needs at least one tool")
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not parallel:
        schema["maxItems"] = 1
    return StructuredOutputsParams(json=schema | ({"$defs": definitions} if definitions else {}))


def tagged_tools(
    tools: Sequence[Mapping[str, Any]],
    *,
    begin: str,
    end: str,
    trigger: str,
    at_least_one: bool = False,
    stop_after_first: bool = False,
) -> StructuredOutputsParams:
    """Calls between a model's own marks: `begin`, in which `NAME` stands for the tool, its arguments as JSON, `end`.

    For Hermes: begin '<tool_call>\\n{"name": "{name}", "arguments": ', end '}\\n</tool_call>', trigger '<tool_call>'.
    """
    if not begin.startswith(trigger):
        raise UserError(f"the begin of a tool call {begin!r} should start with its trigger {trigger!r}")
    tags = [
        {
            "type": "tag",
            "begin": begin.replace(NAME, _function(tool)["name"]),
            "content": {"type": "json_schema", "json_schema": dict(_parameters(_function(tool)))},
            "end": end,
        }
        for tool in tools
    ]
    form: dict[str, Any] = {"type": "triggered_tags", "triggers": [trigger], "tags": tags}
    form |= {name: True for name, asked in (("at_least_one", at_least_one), ("stop_after_first", stop_after_first)) if asked}
    return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": form})


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError("each tool needs a function with a name")
    return function


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    return function.get("parameters") or _ANY_OBJECT


def _call(function: Mapping[str, Any], index: int, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of one call. Definitions move to the top, where references look for them, under names of their own."""
    parameters = dict(_parameters(function))
    for key in ("$defs", "definitions"):
        own = parameters.pop(key, None)
        if not isinstance(own, Mapping):
            continue
        names = {name: f"tool{index}_{name}" for name in own}
        parameters = _renamed(parameters, key, names)
        definitions |= {names[name]: _renamed(schema, key, names) for name, schema in own.items()}
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "parameters": parameters},
        "required": ["name", "parameters"],
    }


def _renamed(schema: Any, key: str, names: Mapping[str, str]) -> Any:
    """A copy in which references to `#/key/name` go to `#/$defs/` and the new name."""
    text = json.dumps(schema)
    for old, new in names.items():
        text = text.replace(json.dumps(f"#/{key}/{old}"), json.dumps(f"#/$defs/{new}"))
    return json.loads(text)
