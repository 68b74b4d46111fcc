"""Ranges of token counts and the dispatch over them (spec 09, piecewise backend)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treadle.codegen.loader import RangeDispatch
from treadle.codegen.ranges import RangeTable, TokenRange, plan_ranges
from treadle.ir.errors import ArtifactError, ConfigError


def returning(value: int):  # type: ignore[no-untyped-def]
    return lambda arguments: [torch.tensor(value)]


def dispatch(ranges: list[TokenRange]) -> RangeDispatch:
    return RangeDispatch("p", ranges, (0, 0), artifacts={item: returning(index) for index, item in enumerate(ranges)})


def chosen(piece: RangeDispatch, tokens: int) -> int:
    return int(piece([torch.zeros(tokens, 2)])[0])


def test_exact_sizes_come_first_and_one_interval_covers_everything() -> None:
    """C09-07 (R-9.17)"""
    assert plan_ranges(64, (8, 1)) == [TokenRange(1, 1), TokenRange(8, 8), TokenRange(1, 64)]


def test_a_placeholder_among_the_sizes_is_refused() -> None:
    """C09-07 (R-9.18)"""
    with pytest.raises(NotImplementedError, match="capture_sizes"):
        plan_ranges(64, ("capture_sizes",))  # type: ignore[arg-type]


def test_an_exact_size_wins_over_an_interval() -> None:
    """C09-10 (R-9.24)"""
    piece = dispatch([TokenRange(4, 4), TokenRange(1, 64)])
    assert [chosen(piece, tokens) for tokens in (3, 4, 5)] == [1, 0, 1]


def test_a_size_in_no_range_names_size_and_ranges() -> None:
    """C09-10 (R-9.26)"""
    piece = dispatch([TokenRange(4, 4), TokenRange(8, 64)])
    with pytest.raises(ArtifactError, match=r"nothing for 65 tokens; its ranges are 4, 8-64"):
        chosen(piece, 65)


def test_a_static_piece_is_called_directly() -> None:
    """C09-10 (R-9.25)"""
    piece = RangeDispatch("p", [TokenRange(1, 1)], None, artifacts={TokenRange(1, 1): returning(7)})
    assert int(piece([])[0]) == 7


def test_exactly_one_mode() -> None:
    """C09-08 (R-9.19)"""
    with pytest.raises(AssertionError, match="not both or neither"):
        RangeDispatch("p", [TokenRange(1, 2)], (0, 0))
    with pytest.raises(AssertionError, match="not both or neither"):
        RangeDispatch("p", [TokenRange(1, 2)], (0, 0), artifacts={}, compile_range=lambda item: returning(0))


def test_compile_mode_compiles_every_range_before_the_first_call() -> None:
    """C09-08 (R-9.20)"""
    made: list[TokenRange] = []

    def compile_range(item: TokenRange):  # type: ignore[no-untyped-def]
        made.append(item)
        return returning(item.end)

    piece = RangeDispatch("p", plan_ranges(64, (4,)), (0, 0), compile_range=compile_range)
    assert made == [TokenRange(4, 4), TokenRange(1, 64)]
    assert (chosen(piece, 4), chosen(piece, 5)) == (4, 64)


def test_a_missing_artifact_lists_what_there_is() -> None:
    """C09-08 (R-9.23)"""
    with pytest.raises(ArtifactError, match=r"no artifact for 1-64 tokens; there are: 4;"):
        RangeDispatch("p", [TokenRange(4, 4), TokenRange(1, 64)], (0, 0), artifacts={TokenRange(4, 4): returning(0)})


@pytest.mark.parametrize(("start", "end"), [(0, 4), (5, 4), (-1, 3)])
def test_an_empty_range_is_refused(start: int, end: int) -> None:
    with pytest.raises(ConfigError, match="start"):
        TokenRange(start, end)


spans = st.tuples(st.integers(1, 40), st.integers(0, 20)).map(lambda pair: TokenRange(pair[0], pair[0] + pair[1]))


@given(st.sets(spans, max_size=8), st.integers(1, 60))
def test_lookup_finds_the_narrowest_range_that_holds_the_size(ranges: set[TokenRange], tokens: int) -> None:
    """C09-10: against a definition in one line."""
    table = RangeTable("p", {item: item for item in ranges})
    holding = [item for item in ranges if tokens in item]
    if not holding:
        with pytest.raises(ArtifactError, match=str(tokens)):
            table.lookup(tokens)
        return
    assert table.lookup(tokens) == min(holding, key=lambda item: (item.end - item.start, item))
