"""Waiting requests in policy order. A preempted or skipped request keeps its place: the order depends on it alone."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from treadle.runtime.request import Request

Order = Callable[[Request], tuple]


def arrival_order(request: Request) -> tuple:
    """First come, first served."""
    return (request.queue_number,)


def priority_order(request: Request) -> tuple:
    """A lower `priority` goes first, then the earlier arrival."""
    return (request.priority, request.arrival_time, request.queue_number)


ORDERS: dict[str, Order] = {"fcfs": arrival_order, "priority": priority_order}


class RequestQueue:
    """A heap; removal from the middle is O(n) and happens on aborts only."""

    def __init__(self, order: Order):
        self._order = order
        self._heap: list[tuple[tuple, Request]] = []

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (self._order(request), request))

    def peek(self) -> Request:
        return self._heap[0][1]

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[1]

    def remove(self, request: Request) -> None:
        self._heap.remove((self._order(request), request))
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in self._heap)

    def __contains__(self, request: Request) -> bool:
        return any(request is other for other in self)
