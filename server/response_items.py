"""Output items of /v1/responses: built from the pieces of an answer, with the events that tell of each step."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from treadle.runtime.chat.reader import Arguments, CallStart, Content, Piece, Reasoning

Event = dict[str, Any]
IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"


def random_id(prefix: str) -> str:
    """An id in the form of OpenAI's."""
    return f"{prefix}_{secrets.token_hex(24)}"


class OutputItems:
    """The items of one answer, in order: reasoning, messages and function calls. The last may still be open."""

    def __init__(self, call_id: Callable[[], str]):
        self.items: list[dict[str, Any]] = []
        self._call_id = call_id
        self._kind: type | None = None

    def add(self, pieces: Iterable[Piece]) -> Iterator[Event]:
        """Takes in pieces; yields the events for them, without their sequence numbers."""
        for piece in pieces:
            if isinstance(piece, CallStart):
                yield from self._open(piece)
                continue
            if not isinstance(piece, Arguments) and type(piece) is not self._kind:
                yield from self._open(piece)
            yield self._grow(piece.text)

    def close(self, status: str) -> Iterator[Event]:
        """Ends the open item, if there is one, with a status."""
        if self._kind is None:
            return
        item, kind = self.items[-1], self._kind
        self._kind = None
        item["status"] = status
        if kind is CallStart:
            yield self._event("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            part = item["content"][0]
            what = "response.output_text.done" if kind is Content else "response.reasoning_text.done"
            yield self._event(what, content_index=0, text=part["text"], **_logprobs(kind))
            yield self._event("response.content_part.done", content_index=0, part=dict(part))
        yield self._event("response.output_item.done", item=item, with_id=False)

    def _open(self, piece: CallStart | Content | Reasoning) -> Iterator[Event]:
        yield from self.close(COMPLETED)
        self._kind = type(piece)
        if isinstance(piece, CallStart):
            item = {"type": "function_call", "id": random_id("fc"), "call_id": self._call_id(), "name": piece.name}
            self.items.append({**item, "arguments": "", "status": IN_PROGRESS})
            yield self._event("response.output_item.added", item=dict(self.items[-1]), with_id=False)
            return
        if isinstance(piece, Content):
            item = {"type": "message", "id": random_id("msg"), "role": "assistant", "status": IN_PROGRESS}
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"type": "reasoning", "id": random_id("rs"), "summary": [], "status": IN_PROGRESS}
            part = {"type": "reasoning_text", "text": ""}
        self.items.append({**item, "content": []})
        yield self._event("response.output_item.added", item={**item, "content": []}, with_id=False)
        self.items[-1]["content"].append(part)
        yield self._event("response.content_part.added", content_index=0, part=dict(part))

    def _grow(self, text: str) -> Event:
        if self._kind is CallStart:
            self.items[-1]["arguments"] += text
            return self._event("response.function_call_arguments.delta", delta=text)
        self.items[-1]["content"][0]["text"] += text
        what = "response.output_text.delta" if self._kind is Content else "response.reasoning_text.delta"
        return self._event(what, content_index=0, delta=text, **_logprobs(self._kind))

    def _event(self, kind: str, *, with_id: bool = True, **fields: Any) -> Event:
        place: dict[str, Any] = {"output_index": len(self.items) - 1}
        if with_id:
            place["item_id"] = self.items[-1]["id"]
        return {"type": kind, **place, **fields}


def _logprobs(kind: type | None) -> dict[str, Any]:
    """Events about text carry logprobs, here none."""
    return {"logprobs": []} if kind is Content else {}
