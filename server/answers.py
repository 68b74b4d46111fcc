"""How the text of a chat's answer is read: reasoning and tool calls apart from the content, whole and streamed alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from treadle.runtime.chat.json_calls import read_calls
from treadle.runtime.chat.reader import (
    Arguments,
    CallStart,
    Content,
    Piece,
    Pieces,
    Reader,
    Reasoning,
    Text,
    everything,
    first_call_only,
    trimmed,
)
from treadle.runtime.chat.tool_formats import random_call_id
from treadle.runtime.outputs import STOP
from treadle.runtime.renderer import Prompt
from treadle.server.schemas import ChatBody
from treadle.server.state import ServerState
from treadle.server.tools import ToolUse, tool_use

TOOL_CALLS = "tool_calls"
_TAIL = 16
"""Tokens from a prompt's end that are looked at for an open mark of reasoning."""


class Answer:
    """One completion of a chat: takes its text as it comes, gives what a message or the next chunk says."""

    def __init__(self, parse: Callable[[Text], Pieces[None]], call_id: Callable[[], str], *, counts_calls: bool = True):
        self._reader = Reader(parse)
        self.call_id = call_id
        self._counts_calls = counts_calls
        self._num_calls = 0

    def pieces(self, text: str, *, ended: bool) -> list[Piece]:
        """What new text made known."""
        found = self._reader.feed(text)
        return found + self._reader.finish() if ended else found

    def delta(self, text: str, *, ended: bool) -> dict[str, Any]:
        """Fields of the `delta` for new text: any of content, reasoning_content, reasoning and tool_calls."""
        found: dict[str, Any] = {}
        for piece in self.pieces(text, ended=ended):
            if isinstance(piece, Content):
                found["content"] = found.get("content", "") + piece.text
            elif isinstance(piece, Reasoning):
                found["reasoning_content"] = found["reasoning"] = found.get("reasoning", "") + piece.text
            else:
                self._add(piece, found.setdefault(TOOL_CALLS, []))
        return found

    def message(self, text: str) -> dict[str, Any]:
        """Fields of the `message` for the whole text; the content is null where there are only calls."""
        found = self.delta(text, ended=True)
        calls = [{key: value for key, value in call.items() if key != "index"} for call in found.get(TOOL_CALLS, ())]
        content = found.get("content", None if calls else "")
        return {**found, "content": content, **({TOOL_CALLS: calls} if calls else {})}

    def finish_reason(self, reason: str | None) -> str | None:
        """The engine's reason, or that calls are waiting for their results."""
        return TOOL_CALLS if reason == STOP and self._num_calls and self._counts_calls else reason

    def _add(self, piece: CallStart | Arguments, calls: list[dict[str, Any]]) -> None:
        if isinstance(piece, CallStart):
            function = {"name": piece.name, "arguments": ""}
            calls.append({"index": self._num_calls, "id": self.call_id(), "type": "function", "function": function})
            self._num_calls += 1
            return
        index = self._num_calls - 1
        if not calls or calls[-1]["index"] != index:
            calls.append({"index": index, "function": {"arguments": ""}})
        calls[-1]["function"]["arguments"] += piece.text


def answer_of(body: ChatBody, prompt: Prompt, state: ServerState) -> Answer:
    """The reader for one completion of a request."""
    use, form, reasoning = tool_use(body), state.tool_format, state.reasoning_format
    opened = reasoning is not None and reasoning.opened(_end_of(prompt, state))
    with_reasoning = body.include_reasoning is not False

    def parse(text: Text) -> Pieces[None]:
        if reasoning is not None:
            yield from reasoning.parse(text, opened)
        yield from calls(text)

    def calls(text: Text) -> Pieces[None]:
        if use.mode == "named":
            yield from _arguments_of(text, use.name)
        elif use.mode == "required":
            yield from read_calls(text)
            yield from everything(text)
        elif use.mode == "auto" and form is not None:
            yield from form.parse(text, use.schemas)
        else:
            yield from everything(text)

    def shaped(text: Text) -> Pieces[None]:
        if reasoning is None and use.mode == "none":
            return everything(text)
        pieces = trimmed(parse(text))
        pieces = pieces if use.parallel else first_call_only(pieces)
        return pieces if with_reasoning else _without_reasoning(pieces)

    call_id = form.call_id if form is not None else random_call_id
    return Answer(shaped, call_id, counts_calls=use.mode != "named")


def keeps_special_tokens(body: ChatBody, use: ToolUse, state: ServerState) -> bool:
    """Whether special tokens have to stay in the text, because a format's marks are among them."""
    marks = set(state.tool_format.marks) if state.tool_format is not None and use.mode == "auto" else set()
    if state.reasoning_format is not None:
        marks |= {state.reasoning_format.start, state.reasoning_format.end}
    return not marks.isdisjoint(state.renderer.special_marks)


def _arguments_of(text: Text, name: str) -> Pieces[None]:
    """The whole text is the arguments of one call."""
    while not text.rest and not text.ended:
        yield None
    if text.rest:
        yield CallStart(name)
    while text.rest or not text.ended:
        if text.rest:
            yield Arguments(text.take())
        else:
            yield None


def _without_reasoning(pieces: Pieces[None]) -> Pieces[None]:
    for piece in pieces:
        if not isinstance(piece, Reasoning):
            yield piece


def _end_of(prompt: Prompt, state: ServerState) -> str:
    return prompt.text if prompt.text is not None else state.renderer.decode(prompt.token_ids[-_TAIL:])
