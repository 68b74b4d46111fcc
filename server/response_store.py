"""Answers of /v1/responses that a later request may refer to, in memory: the least recently used go first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import orjson


@dataclass(frozen=True)
class StoredResponse:
    """An answer as it was sent, the input items of its request, and the conversation that it ends, as chat messages."""

    response: dict[str, Any]
    input_items: list[dict[str, Any]]
    messages: list[dict[str, Any]]


class ResponseStore:
    """Holds at most `max_responses` answers, and `max_bytes` of what each adds to its conversation."""

    def __init__(self, max_responses: int, max_bytes: int):
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._stored: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def add(self, stored: StoredResponse) -> None:
        """Keeps an answer; others go if there is no room. One that is larger than the whole store is not kept."""
        size = len(orjson.dumps(stored.response)) + len(orjson.dumps(stored.input_items))
        self._stored[stored.response["id"]] = stored, size
        self._num_bytes += size
        while len(self._stored) > self._max_responses or self._num_bytes > self._max_bytes:
            _, (_, dropped) = self._stored.popitem(last=False)
            self._num_bytes -= dropped

    def get(self, response_id: str) -> StoredResponse | None:
        """The answer of that id; None if there is none, or not any more."""
        if response_id not in self._stored:
            return None
        self._stored.move_to_end(response_id)
        return self._stored[response_id][0]

    def remove(self, response_id: str) -> bool:
        """Forgets an answer; False if it was not there."""
        if response_id not in self._stored:
            return False
        self._num_bytes -= self._stored.pop(response_id)[1]
        return True
