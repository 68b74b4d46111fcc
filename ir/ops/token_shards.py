"""Collectives of sequence parallelism: between them each rank has the rows of its own tokens only.

A step of T tokens gives every rank ceil(T / world) rows; what is added to fill up is zero, and cut off again when rows
are gathered. Types say T on both sides, as with select_rows: each piece counts the rows that it is given.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.ir.group import Group
from treadle.ir.ops.collectives import reached
from treadle.ir.ops.registry import op


def _same(x: Tensor, **_: object) -> Tensor:
    return torch.empty_like(x)


def _filled(x: Tensor, world: int) -> Tensor:
    """x [T, H] with rows of zeros up to a multiple of `world`."""
    return F.pad(x, (0, 0, 0, -x.shape[0] % world))


@op("reduce_scatter_rows(Tensor x, *, int world) -> Tensor", splits=True, collective=True, fake=_same)
def reduce_scatter_rows(x: Tensor, *, world: int, group: Group | None = None) -> Tensor:
    """This rank's rows of the sum of every rank's x: x [T, H] -> [ceil(T / world), H]."""
    if world == 1:
        return x
    return reached(group, world, "reduce_scatter_rows").reduce_scatter(_filled(x, world))


@op("own_rows(Tensor x, *, int world) -> Tensor", splits=True, collective=True, fake=_same)
def own_rows(x: Tensor, *, world: int, group: Group | None = None) -> Tensor:
    """This rank's rows of a value that every rank has whole: x [T, H] -> [ceil(T / world), H]. Sends nothing."""
    if world == 1:
        return x
    return _filled(x, world).chunk(world)[reached(group, world, "own_rows").rank].contiguous()


@op("all_gather_rows(Tensor x, Tensor like, *, int world) -> Tensor", splits=True, collective=True, fake=_same)
def all_gather_rows(x: Tensor, like: Tensor, *, world: int, group: Group | None = None) -> Tensor:
    """Every rank's rows in rank order, as many as `like` [T, ...] has: x [ceil(T / world), H] -> [T, H]."""
    if world == 1:
        return x
    return torch.cat(reached(group, world, "all_gather_rows").all_gather(x))[: like.shape[0]]
