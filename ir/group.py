"""A group of ranks that run the same program on their own shares, as collective ops see it.

`ThreadGroup` holds all ranks in one process, one thread each: how a sharded graph is checked without any network.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class Group(Protocol):
    """What a collective's reference calls. Every rank calls the same method in the same order."""

    rank: int
    world: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, bitwise the same on each of them. `x` is not changed."""
        ...

    def start_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        """Begins a sum over ranks and returns what waits for it; `x` must stay as it is until then."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's run of rows of the sum over ranks; the rows are a multiple of the ranks."""
        ...

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Every rank's tensor, in rank order; all have one shape."""
        ...


class ThreadGroup:
    """One rank of a group whose ranks are threads of this process. Sums are made in rank order."""

    def __init__(self, rank: int, shared: _Shared):
        self.rank = rank
        self.world = shared.world
        self._shared = shared

    def all_reduce(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for part in self.all_gather(x):
            total = total + part
        return total

    def start_all_reduce(self, x: Tensor) -> Callable[[], Tensor]:
        total = self.all_reduce(x)  # threads meet here: there is no message to wait for
        return lambda: total

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self.all_reduce(x).chunk(self.world)[self.rank].contiguous()

    def all_gather(self, x: Tensor) -> list[Tensor]:
        shared = self._shared
        shared.slots[self.rank] = x
        shared.barrier.wait()
        found = [slot for slot in shared.slots if slot is not None]
        shared.barrier.wait()  # nobody may begin the next exchange before everybody has read this one
        return found


class _Shared:
    def __init__(self, world: int):
        self.world = world
        self.slots: list[Tensor | None] = [None] * world
        self.barrier = threading.Barrier(world)


def run_ranks(world: int, work: Callable[[ThreadGroup], Any]) -> list[Any]:
    """Calls `work(group)` once for each rank, at the same time; the results in rank order.

    Raises what the first failing rank raised; the others are let go.
    """
    shared = _Shared(world)
    results: list[Any] = [None] * world
    failures: list[tuple[int, BaseException]] = []

    def one(rank: int) -> None:
        try:
            results[rank] = work(ThreadGroup(rank, shared))
        except BaseException as error:
            failures.append((rank, error))
            shared.barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,), name=f"rank-{rank}") for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    broken = threading.BrokenBarrierError
    own = sorted((f for f in failures if not isinstance(f[1], broken)), key=lambda failure: failure[0])
    if failures:
        raise (own or failures)[0][1]
    return results
