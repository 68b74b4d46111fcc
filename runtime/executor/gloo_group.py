"""The group of ranks that are processes of this machine, over gloo. Implements ir/group.py's Group."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

TIMEOUT = timedelta(seconds=120)
"""How long a rank waits in a collective for the others. A rank that died is seen at once, by its closed connection."""


class GlooGroup:
    """Blocks until all `world` ranks have made theirs over the same new file."""

    def __init__(self, meeting_file: Path, rank: int, world: int):
        from torch.distributed import FileStore, ProcessGroupGloo

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # ranks are on one machine: nobody else can connect
        self.rank = rank
        self.world = world
        self._store = FileStore(str(meeting_file), world)
        self._processes: Any = ProcessGroupGloo(self._store, rank, world, TIMEOUT)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks. Raises RuntimeError if a rank is gone."""
        return self.start_all_reduce(x)()

    def start_all_reduce(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Sends from gloo's own thread while the caller computes. What it returns raises RuntimeError if a rank is gone."""
        total = x.clone(memory_format=torch.contiguous_format)
        sending = self._processes.allreduce([total])

        def finish() -> torch.Tensor:
            sending.wait()
            return total

        return finish

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's run of rows of the sum over ranks. Raises RuntimeError if a rank is gone."""
        share = x.new_empty((x.shape[0] // self.world, *x.shape[1:]))
        self._processes._reduce_scatter_base(share, x.contiguous()).wait()
        return share

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's tensor, in rank order. Raises RuntimeError if a rank is gone."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.world)]
        self._processes.allgather([parts], [x]).wait()
        return parts
