"""What a chat request says about tools: which the model may call, whether it must, and the constraint that makes it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from treadle.runtime.chat.reader import Tools
from treadle.runtime.chat.tool_formats import ToolFormat
from treadle.runtime.structured.constraint import JSON, STRUCTURAL_TAG, StructuredOutputsParams
from treadle.runtime.structured.tool_constraints import named_tool, required_tools, tagged_tools
from treadle.server.errors import bad_request
from treadle.server.schemas import ChatBody

Mode = Literal["none", "auto", "required", "named"]

_CHOICES = "'none', 'auto', 'required', {\"type\": \"function\", \"function\": {\"name\": ...}} or {\"type\": \"allowed_tools\", ...}"


@dataclass(frozen=True)
class ToolUse:
    """The tools that are shown to the model and that it may call, and how. `name` is the one of mode "named"."""

    tools: Sequence[Mapping[str, Any]] = ()
    mode: Mode = "none"
    name: str = ""
    parallel: bool = True
    schemas: Tools = field(default_factory=dict)


def tool_use(body: ChatBody) -> ToolUse:
    """Reads `tools`, `tool_choice` and `parallel_tool_calls`. Raises a 400 that names the field and the place in it."""
    tools = body.tools or []
    schemas = {}
    for index, tool in enumerate(tools):
        name, schema = _checked(tool, f"tools[{index}]")
        if name in schemas:
            raise bad_request(f"tools[{index}].function.name is {name!r}, as of a tool before it", "tools")
        schemas[name] = schema
    mode, name, allowed = _choice(body.tool_choice, has_tools=bool(tools))
    for chosen in [name] if mode == "named" else allowed or ():
        if chosen not in schemas:
            known = ", ".join(schemas) or "none were sent"
            raise bad_request(f"tool_choice names the function {chosen[:64]!r}, which is not among the tools: {known}", "tool_choice")
    if not tools and mode == "required":
        raise bad_request("tool_choice is 'required', which needs at least one tool; send tools", "tool_choice")
    if allowed is not None:
        tools = [tool for tool in tools if tool["function"]["name"] in allowed]
        schemas = {known: schema for known, schema in schemas.items() if known in allowed}
    return ToolUse(tools, mode if tools else "none", name, body.parallel_tool_calls is not False, schemas)


def tool_constraint(use: ToolUse, form: ToolFormat | None, answer: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
    """The constraint of a chat's answer, given the one that the request asks for beside its tools.

    Forced calls are held to their schemas. Free ones are where a tool is `strict`, or where the text is constrained too.
    Raises a 400 for combinations that cannot be held.
    """
    if use.mode in ("named", "required"):
        if answer is not None:
            what = "an answer that must be a tool call cannot be constrained otherwise too; drop one of the two"
            raise bad_request(f"tool_choice: {what}", "tool_choice")
        return named_tool(use.tools, use.name) if use.mode == "named" else required_tools(use.tools, parallel=use.parallel)
    strict = any(tool["function"].get("strict") for tool in use.tools)
    if use.mode == "none" or not (strict or answer):
        return answer
    if form is None or form.tag is None:
        what = "cannot be held to a schema where the model may also write text, in the form this model writes them"
        raise bad_request(f"tool calls {what}; set tool_choice to 'required', a function or 'none', or drop strict", "tools")
    begin, end, trigger = form.tag
    calls = tagged_tools([_as_asked(tool) for tool in use.tools], begin=begin, end=end, trigger=trigger)
    return calls if answer is None else _text_or_calls(answer, calls)


def _text_or_calls(answer: StructuredOutputsParams, calls: StructuredOutputsParams) -> StructuredOutputsParams:
    """Either the text that was asked for, whole, or calls and nothing else."""
    constraint = answer.constraint
    if constraint.kind not in (JSON, "json_object"):
        what = f"{constraint.kind} cannot be combined with tools that the model may or may not call"
        raise bad_request(f"{what}; set tool_choice to 'none' or 'required'", "tool_choice")
    schema = json.loads(constraint.source) if constraint.kind == JSON else {"type": "object"}
    tags = json.loads(calls.constraint.source)["format"]["tags"]
    either = [
        {"type": "json_schema", "json_schema": schema},
        {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True},
    ]
    return StructuredOutputsParams(structural_tag={"type": STRUCTURAL_TAG, "format": {"type": "or", "elements": either}})


def _as_asked(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool whose arguments may be any object unless it is strict."""
    function = tool["function"]
    return {"function": function if function.get("strict") else {"name": function["name"]}}


def _checked(tool: Mapping[str, Any], where: str) -> tuple[str, Mapping[str, Any]]:
    """Name and schema of a tool."""
    if tool.get("type", "function") != "function":
        kind = str(tool["type"])[:64]
        raise bad_request(f"{where}.type is {kind!r}; the only type of tool is 'function'", "tools")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise bad_request(f"{where}.function should be an object with a name and parameters", "tools")
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name.strip():
        raise bad_request(f"{where}.function.name should be a name", "tools")
    if schema is not None and not isinstance(schema, Mapping):
        raise bad_request(f"{where}.function.parameters should be a JSON schema, an object", "tools")
    return name, schema or {}


def _choice(choice: Any, *, has_tools: bool) -> tuple[Mode, str, list[str] | None]:
    """Mode, the name of "named", the names that a list of allowed ones leaves (None: all)."""
    if choice is None:
        return ("auto" if has_tools else "none"), "", None
    if choice in ("none", "auto", "required"):
        return choice, "", None
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        name = _name_in(choice)
        if name:
            return "named", name, None
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        names = [_name_in(tool) for tool in allowed.get("tools") or ()] if isinstance(allowed, Mapping) else []
        if names and all(names) and allowed.get("mode", "auto") in ("auto", "required"):
            return allowed.get("mode", "auto"), "", names
    raise bad_request(f"tool_choice should be one of: {_CHOICES}", "tool_choice")


def _name_in(tool: Any) -> str:
    """The name in {"function": {"name": ...}}, or in the flat form of it."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""
