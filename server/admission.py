"""Who may start: counts the requests in flight, refuses more than a limit, and lets a server drain."""

from __future__ import annotations

import asyncio

from treadle.server.errors import ApiError


class Slot:
    """One admitted request; `release` may be called more than once."""

    def __init__(self, admission: Admission):
        self._admission: Admission | None = admission

    def release(self) -> None:
        """Gives the place back."""
        admission, self._admission = self._admission, None
        if admission is not None:
            admission.leave()

    def __enter__(self) -> Slot:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Admission:
    """The gate in front of the engine. `limit` counts requests that run and those that wait."""

    def __init__(self, limit: int, retry_after: int):
        self.limit = limit
        self.draining = False
        self.num_inflight = 0
        self._retry = {"Retry-After": str(retry_after)}
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> Slot:
        """Admits one request. Raises a 503 while draining or when the server is full."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", headers=self._retry)
        if self.num_inflight >= self.limit:
            message = f"the server has {self.num_inflight} requests in flight, which is its limit; try again shortly"
            raise ApiError(503, message, code="overloaded", headers=self._retry)
        self.num_inflight += 1
        self._idle.clear()
        return Slot(self)

    def leave(self) -> None:
        """Ends one request; called by its slot."""
        self.num_inflight -= 1
        assert self.num_inflight >= 0, "a request left twice"
        if self.num_inflight == 0:
            self._idle.set()

    async def drained(self, within: float) -> bool:
        """Stops admitting and waits for what is in flight; returns whether all ended within that many seconds."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), within)
        except TimeoutError:
            return False
        return True
