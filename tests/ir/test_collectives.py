"""Collective ops over ranks that are threads, and the recipes that give each rank its weights (C07-04, C07-05)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treadle.ir.errors import VerifyError
from treadle.ir.graph import Value
from treadle.ir.group import run_ranks
from treadle.ir.infer import infer
from treadle.ir.ops.registry import dialect, get_op
from treadle.ir.types import T, tensor
from treadle.ir.weights import Concat, Load, OnFirstRank, RankOffset, Recipe, Shard, bind_rank, parse_recipe


def ref(name: str, **arguments):
    return get_op(name).reference(**arguments)


def test_collectives_by_their_definition() -> None:
    """C07-05: sum, concatenation, and a share of the sum; every rank gets the same bits of a sum."""
    parts = [torch.randn(5, 6) for _ in range(3)]

    def work(group):
        x, common = parts[group.rank], {"world": 3, "group": group}
        return (
            ref("all_reduce", x=x, **common),
            ref("all_gather", x=x, **common),
            ref("reduce_scatter", x=x, **common),
        )

    total = parts[0] + parts[1] + parts[2]
    for rank, (summed, gathered, share) in enumerate(run_ranks(3, work)):
        assert torch.equal(summed, total)
        assert torch.equal(gathered, torch.cat(parts, -1))
        assert torch.equal(share, total[:, rank * 2 : rank * 2 + 2])


def test_fused_norms_are_their_parts() -> None:
    """Bitwise what all_reduce and the norm give one after the other."""
    parts, residual, weight = [torch.randn(4, 8) for _ in range(2)], torch.randn(4, 8), torch.randn(8)
    settings = {"weight": weight, "eps": 1e-6, "offset": 1.0, "scale_in_f32": True}

    def work(group):
        x, common = parts[group.rank], {"world": 2, "group": group}
        total = ref("all_reduce", x=x, **common)
        wanted = [ref("rms_norm", x=total, **settings), *ref("add_rms_norm", x=total, residual=residual, **settings)]
        given = [ref("all_reduce_rms_norm", x=x, **settings, **common)]
        given += ref("all_reduce_add_rms_norm", x=x, residual=residual, **settings, **common)
        return all(torch.equal(a, b) for a, b in zip(wanted, given, strict=True))

    assert run_ranks(2, work) == [True, True]


def test_one_rank_needs_no_group() -> None:
    """C07-04, R-7.9: with one rank a collective returns its operand; with more and no group it raises."""
    x = torch.randn(2, 4)
    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        assert ref(name, x=x, world=1) is x
        with pytest.raises(VerifyError, match=f"{name} over 2 ranks needs a group"):
            ref(name, x=x, world=2)

    def of_another_size(group):
        ref("all_reduce", x=x, world=4, group=group)

    with pytest.raises(VerifyError, match="over 4 ranks, but the group has 2"):
        run_ranks(2, of_another_size)


def test_a_failing_rank_lets_the_others_go() -> None:
    """The first rank's own error is raised, not that of those who waited for it."""

    def work(group):
        if group.rank == 1:
            raise ValueError("rank 1 broke")
        ref("all_reduce", x=torch.ones(1), world=2, group=group)

    with pytest.raises(ValueError, match="rank 1 broke"):
        run_ranks(2, work)


def test_types_and_declarations() -> None:
    """Result types follow the number of ranks; each collective splits the graph and says that it is one."""
    x = Value("x", tensor("bf16", (T, 6)))
    assert [str(kind) for kind in infer("all_reduce", {"x": x}, {"world": 3})] == ["bf16[T,6]"]
    assert [str(kind) for kind in infer("all_gather", {"x": x}, {"world": 3})] == ["bf16[T,18]"]
    assert [str(kind) for kind in infer("reduce_scatter", {"x": x}, {"world": 3})] == ["bf16[T,2]"]
    with pytest.raises(VerifyError, match="4 ranks cannot share equally"):
        infer("reduce_scatter", {"x": x}, {"world": 4})
    collectives = {name for name, op in dialect().items() if op.collective}
    assert collectives == {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_reduce_rms_norm",
        "all_reduce_add_rms_norm",
        "all_reduce_rms_norm_quant",
        "linear_all_reduce",
        "reduce_scatter_rows",
        "own_rows",
        "all_gather_rows",
        "all_reduce_add_rms_norm_quant",
    }
    assert all(get_op(name).splits for name in collectives)


def test_shards_of_a_table_look_up_the_whole() -> None:
    """Every id is in one rank's share; the padded rows of the last one are never looked up."""
    table, ids = torch.randn(7, 3), torch.arange(7)
    total = torch.zeros(7, 3)
    for rank in range(2):
        share = Shard(Load("t"), 0, 2, pad=True, rank=rank).evaluate(lambda _: table)
        total += ref("embedding_shard", table=share, ids=ids, start=torch.tensor(rank * 4))
    assert torch.equal(total, table)


RECIPES = [
    Shard(Load("a"), 1, 2),
    Shard(Concat((Load("a"), Load("b"))), 0, 4, (16, 8, 8), (4, 2, 2)),
    Shard(Load("a"), 0, 3, pad=True, rank=1),
    OnFirstRank(Load("a")),
    RankOffset(10, rank=3),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_recipes_round_trip_and_bind(recipe: Recipe) -> None:
    """The text form reads back; binding a rank reaches the recipes inside others and is seen in the text."""
    assert parse_recipe(str(recipe)) == recipe
    bound = bind_rank(Concat((recipe, Load("c"))), 1)
    assert "rank=1" in str(bound) and "load(\"c\")" in str(bound)
    assert parse_recipe(str(bound)) == bound
    assert list(bound.sources()) == [*recipe.sources(), "c"]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(1, 4), st.booleans())
def test_shares_cover_every_part_once(units: list[int], world: int, by_rows: bool) -> None:
    """The ranks' shares of each part, one after the other, are that part."""
    sizes = tuple(unit * world for unit in units)
    whole = torch.arange(float(sum(sizes) * 2)).reshape(sum(sizes), 2)
    whole = whole if by_rows else whole.T.contiguous()
    dim = 0 if by_rows else 1
    shares = [Shard(Load("x"), dim, world, sizes, rank=rank).evaluate(lambda _: whole) for rank in range(world)]
    cut = [torch.split(share, units, dim) for share in shares]
    rebuilt = torch.cat([part for parts in zip(*cut, strict=True) for part in parts], dim)
    assert torch.equal(rebuilt, whole)


def test_neighbours_hold_the_same_repeated_share() -> None:
    """Two key heads over four ranks: ranks 0 and 1 hold the first, 2 and 3 the second."""
    whole = torch.arange(4.0)
    shares = [Shard(Load("k"), 0, 4, (4,), (2,), rank=rank).evaluate(lambda _: whole).tolist() for rank in range(4)]
    assert shares == [[0, 1], [0, 1], [2, 3], [2, 3]]
    biases = [OnFirstRank(Load("b"), rank=rank).evaluate(lambda _: whole).sum().item() for rank in range(2)]
    assert biases == [6.0, 0.0]
    with pytest.raises(AssertionError, match="bind_rank"):
        Shard(Load("k"), 0, 4).evaluate(lambda _: whole)
