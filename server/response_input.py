"""From the body of /v1/responses to a chat: its items become messages, its flat fields those of a chat request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from treadle.server.errors import bad_request
from treadle.server.schemas import Body, ChatBody

_ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")

_REFUSED = {
    "background": "every answer is given on its own connection; leave it out",
    "conversation": "conversations are kept by previous_response_id",
    "prompt": "there are no stored prompts; send instructions and input",
    "max_tool_calls": "tools are called by the client",
    "include": "nothing can be included beside what is sent",
    "top_logprobs": "logprobs are given by /v1/chat/completions",
}
"""Fields that would silently change nothing if they were ignored -> what to do."""

_HARMLESS = ("include", "reasoning.encrypted_content")
"""`include` of reasoning that is never encrypted asks for nothing: clients send it always."""

_SAME_NAME = ("model", "temperature", "top_p", "stream", "tool_choice", "parallel_tool_calls", "user", "priority")
_ELSEWHERE = {
    "n": "an answer is one response",
    "best_of": "an answer is one response",
    "max_tokens": "send max_output_tokens",
    "max_completion_tokens": "send max_output_tokens",
    "prompt_logprobs": "logprobs are given by /v1/chat/completions",
    "response_format": "send text.format",
    "stream_options": "the last event always has the usage",
    "messages": "send input",
}
"""Fields of a chat that this endpoint has another way for -> which. All others of a chat go on to it as they are."""


class ReasoningOptions(BaseModel):
    """How much a model is asked to think, for chat templates that know it."""

    model_config = ConfigDict(strict=True, extra="allow")
    effort: str | None = None


class TextOptions(BaseModel):
    """The form of the text: `format` is text, json_object or json_schema with its fields beside the type."""

    model_config = ConfigDict(strict=True, extra="allow")
    format: dict[str, Any] | None = None


class ResponsesBody(Body):
    """Body of /v1/responses. `input` is text or a list of items."""

    input: Any = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: str | None = None
    store: bool | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    priority: int = 0
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    max_tool_calls: int | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None

    def check(self) -> None:
        """Refuses what cannot be honoured; raises ApiError naming the field."""
        for field, reason in {**_REFUSED, **_ELSEWHERE}.items():
            value = getattr(self, field, None)
            if value and not (field == _HARMLESS[0] and set(value) <= {_HARMLESS[1]}):
                raise bad_request(f"{field} is not supported: {reason}", field, "unsupported_parameter")
        if self.truncation not in (None, "disabled"):
            what = f"truncation={self.truncation[:64]!r} is not supported: nothing is dropped; use 'disabled'"
            raise bad_request(what, "truncation", "unsupported_parameter")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise bad_request(f"max_output_tokens={self.max_output_tokens} should be at least 1", "max_output_tokens")

    def as_chat(self, history: Sequence[dict[str, Any]]) -> tuple[ChatBody, list[dict[str, Any]]]:
        """The chat that this asks for after the messages of `history`, and the conversation without instructions."""
        conversation = [*history, *input_messages(self.input_items)]
        extra = self.model_extra or {}
        fields = {name: getattr(self, name) for name in _SAME_NAME if getattr(self, name) is not None}
        fields |= {name: extra[name] for name in ChatBody.model_fields if extra.get(name) is not None}
        fields["messages"] = [*self._instructions(), *conversation]
        if self.tools:
            fields["tools"] = [_chat_tool(tool) for tool in self.tools]
        if self.max_output_tokens is not None:
            fields["max_completion_tokens"] = self.max_output_tokens
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = _chat_format(self.text.format)
        if self.reasoning is not None and self.reasoning.effort is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        return ChatBody(**fields), conversation

    @property
    def input_items(self) -> list[dict[str, Any]]:
        """The input as items; text is a message of the user."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": self.input}]}]
        if not isinstance(self.input, list) or not self.input:
            raise bad_request("input should be text, or a list of at least one item", "input")
        return self.input

    def _instructions(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": self.instructions}] if self.instructions else []


def input_messages(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Chat messages for input or output items. Raises a 400 that names the place and the types there are.

    Calls that follow each other, or an assistant's text, are of one message; reasoning goes to the message it led to.
    """
    messages: list[dict[str, Any]] = []
    thought = ""
    for index, item in enumerate(items):
        kind = _kind(item, f"input[{index}]")
        if kind == "reasoning":
            thought += "".join(str(part.get("text", "")) for part in item.get("content") or () if isinstance(part, Mapping))
            continue
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _output(item.get("output"))})
            continue
        if kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant" or thought:
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": item.get("role"), "content": item.get("content")})
        if thought and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"], thought = thought, ""
    return messages


def _kind(item: Any, where: str) -> str:
    if not isinstance(item, Mapping):
        raise bad_request(f"{where} should be an object with a type, or with a role and a content", "input")
    kind = item.get("type", "message" if "role" in item else None)
    if kind not in _ITEM_TYPES:
        raise bad_request(f"{where}.type is {str(kind)[:64]!r}; it should be one of: {', '.join(_ITEM_TYPES)}", "input")
    return kind


def _output(output: Any) -> Any:
    """The result of a call as a message's content: text, or parts of text."""
    return output if isinstance(output, str | list) or output is None else str(output)


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool with its fields beside the type, as a chat has it."""
    if "function" in tool or tool.get("type") != "function":
        return dict(tool)
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type" and value is not None}}


def _chat_format(form: Mapping[str, Any]) -> dict[str, Any]:
    if form.get("type") == "json_schema" and "json_schema" not in form:
        return {"type": "json_schema", "json_schema": {key: value for key, value in form.items() if key != "type"}}
    return dict(form)
