"""Ops that all ranks of a tensor-parallel group call together, and the ops on one rank's share that go with them.

A collective is not pure: every rank must call the same ones in the same order. It splits the graph, so it runs
between pieces; its reference takes the group that the runtime (or a simulation) brings.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from treadle.ir.errors import VerifyError
from treadle.ir.group import Group
from treadle.ir.ops.library import add_rms_norm as add_then_norm
from treadle.ir.ops.library import rms_norm
from treadle.ir.ops.registry import op


def reached(group: Group | None, world: int, name: str) -> Group:
    """The group of a collective. Raises VerifyError if there is none, or one of another size."""
    if group is None:
        raise VerifyError(f"{name} over {world} ranks needs a group: run the graph with one for each rank")
    if group.world != world:
        raise VerifyError(f"{name} is over {world} ranks, but the group has {group.world}")
    return group


def _like_x(x: Tensor, **_: object) -> Tensor:
    return torch.empty_like(x)


def _sum(x: Tensor, world: int, group: Group | None, name: str) -> Tensor:
    return x if world == 1 else reached(group, world, name).all_reduce(x)


@op("all_reduce(Tensor x, *, int world) -> Tensor", splits=True, collective=True, fake=_like_x)
def all_reduce(x: Tensor, *, world: int, group: Group | None = None) -> Tensor:
    """The sum of every rank's x, on every rank. With one rank it is x itself."""
    return _sum(x, world, group, "all_reduce")


def _gathered(x: Tensor, *, world: int, dim: int = -1) -> Tensor:
    shape = list(x.shape)
    shape[dim] *= world
    return x.new_empty(shape)


@op("all_gather(Tensor x, *, int world, int dim=-1) -> Tensor", splits=True, collective=True, fake=_gathered)
def all_gather(x: Tensor, *, world: int, dim: int = -1, group: Group | None = None) -> Tensor:
    """Every rank's x joined along `dim` in rank order, on every rank."""
    if world == 1:
        return x
    return torch.cat(reached(group, world, "all_gather").all_gather(x), dim)


def _scattered(x: Tensor, *, world: int, dim: int = -1) -> Tensor:
    if x.shape[dim] % world:
        raise ValueError(f"dimension {dim} has {x.shape[dim]} elements, which {world} ranks cannot share equally")
    shape = list(x.shape)
    shape[dim] //= world
    return x.new_empty(shape)


@op("reduce_scatter(Tensor x, *, int world, int dim=-1) -> Tensor", splits=True, collective=True, fake=_scattered)
def reduce_scatter(x: Tensor, *, world: int, dim: int = -1, group: Group | None = None) -> Tensor:
    """This rank's equal share, along `dim`, of the sum of every rank's x."""
    if world == 1:
        return x
    others = reached(group, world, "reduce_scatter")
    return others.all_reduce(x).chunk(world, dim)[others.rank].contiguous()


def _normed(x: Tensor, weight: Tensor | None = None, **_: object) -> Tensor:
    return torch.empty_like(x)


@op(
    "all_reduce_rms_norm(Tensor x, Tensor? weight=None, *, int world, float eps, float offset=0.0, "
    "bool scale_in_f32=False) -> Tensor",
    splits=True,
    collective=True,
    fake=_normed,
)
def all_reduce_rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    world: int,
    eps: float,
    offset: float = 0.0,
    scale_in_f32: bool = False,
    group: Group | None = None,
) -> Tensor:
    """The norm of the sum over ranks: `rms_norm(all_reduce(x), weight)` as one op."""
    total = _sum(x, world, group, "all_reduce_rms_norm")
    return rms_norm(total, weight, eps=eps, offset=offset, scale_in_f32=scale_in_f32)


def _normed_and_total(x: Tensor, residual: Tensor, weight: Tensor | None = None, **_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(residual)


@op(
    "all_reduce_add_rms_norm(Tensor x, Tensor residual, Tensor? weight=None, *, int world, float eps, "
    "float offset=0.0, bool scale_in_f32=False) -> (Tensor, Tensor)",
    splits=True,
    collective=True,
    fake=_normed_and_total,
)
def all_reduce_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    world: int,
    eps: float,
    offset: float = 0.0,
    scale_in_f32: bool = False,
    group: Group | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum over ranks, residual add, norm: `add_rms_norm(all_reduce(x), residual, weight)` as one op."""
    total = _sum(x, world, group, "all_reduce_add_rms_norm")
    return add_then_norm(total, residual, weight, eps=eps, offset=offset, scale_in_f32=scale_in_f32)


def _product_like(x: Tensor, weight: Tensor, bias: Tensor | None = None, **_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@op(
    "linear_all_reduce(Tensor x, Tensor weight, Tensor? bias=None, *, int world, int chunks) -> Tensor",
    splits=True,
    collective=True,
    fake=_product_like,
)
def linear_all_reduce(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, world: int, chunks: int, group: Group | None = None
) -> Tensor:
    """`all_reduce(linear(x, weight, bias))` in `chunks` runs of tokens: one is summed while the next is computed.

    x [T, K], weight [N, K] -> [T, N]. A bias is part of every rank's product, so all ranks but one have zeros for it.
    """
    if world == 1:
        return F.linear(x, weight, bias)
    others = reached(group, world, "linear_all_reduce")
    waiting = [others.start_all_reduce(F.linear(part, weight, bias)) for part in x.chunk(chunks)]
    return torch.cat([finish() for finish in waiting])


@op("embedding_shard(Tensor table, Tensor ids, Tensor start) -> Tensor")
def embedding_shard(table: Tensor, ids: Tensor, start: Tensor) -> Tensor:
    """Rows of one rank's share of a table: table [V/world, H], ids [...], start [] -> [..., H].

    Row i of the share is row `start + i` of the whole; ids of other ranks give zeros, so that a sum over ranks is
    the look-up in the whole table.
    """
    local = ids - start
    mine = (local >= 0) & (local < table.shape[0])
    rows = F.embedding(local.clamp(0, table.shape[0] - 1), table)
    return rows * mine.unsqueeze(-1).to(rows.dtype)
