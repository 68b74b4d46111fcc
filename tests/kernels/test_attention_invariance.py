"""The C++ kernel gives a row the same bits whatever shares its batch, however it is chunked, on any number of threads."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.attention_case import (
    AttentionBatch,
    AttentionCase,
    make_batch,
    make_builder,
    make_impl,
    run,
)
from treadle.kernels.native import NativeLibrary

OPTIONS = [{}, {"window": 100}, {"softcap": 3.0}, {"sinks": True}, {"num_heads": 9, "num_kv_heads": 3}]


def attend_rows(batch: AttentionBatch, native: NativeLibrary, start: int, stop: int, threads: int = 1) -> torch.Tensor:
    """Rows [start, stop) of a batch of one whole prefill, computed as a chunk of their own."""
    metadata = replace(
        batch.metadata,
        query_start_loc=torch.tensor([0, stop - start], dtype=torch.int32),
        seq_lens=torch.tensor([stop], dtype=torch.int32),
        num_actual_tokens=stop - start,
        slot_mapping=torch.full((stop - start,), -1),
    )
    impl = make_impl(batch.case, native, "cpu", sinks=batch.sinks)
    q = batch.q[start:stop]
    built = make_builder("cpu", metadata, batch.case.block_size, threads).build(metadata)
    return impl.forward(q, batch.kv_cache, built, torch.empty_like(q))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_decode_equals_prefill_bitwise(native: NativeLibrary, options: dict, dtype: str) -> None:
    """C05-06, TRAP-13: every position decoded alone, with and without threads, equals the whole prefill."""
    length = 1100
    batch = make_batch(AttentionCase(lengths=((length, length),), dtype=dtype, **options), native)
    whole = run(batch, native, "cpu")
    for position in (0, 1, 63, 64, 65, 511, 512, 513, 700, 1024, length - 1):
        for threads in (1, 4):
            alone = attend_rows(batch, native, position, position + 1, threads)
            assert torch.equal(alone[0], whole[position]), f"position {position}, {threads} threads"


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_threads_change_no_bit(native: NativeLibrary, options: dict) -> None:
    """C05-05: where work is split depends on threads, what is summed does not."""
    batch = make_batch(AttentionCase(lengths=((1, 3000), (2, 700), (1, 30)), **options), native)
    one = run(batch, native, "cpu", threads=1)
    assert all(torch.equal(run(batch, native, "cpu", threads), one) for threads in (2, 3, 8))


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(1, 699), unique=True, max_size=6), seed=st.integers(0, 1000))
def test_any_chunking_gives_the_same_bits(native: NativeLibrary, cuts: list[int], seed: int) -> None:
    """TRAP-13: chunked prefill cut anywhere equals the whole prefill."""
    batch = make_batch(AttentionCase(lengths=((700, 700),), head_size=16, seed=seed), native)
    edges = [0, *sorted(cuts), 700]
    chunks = [attend_rows(batch, native, a, b) for a, b in pairwise(edges)]
    assert torch.equal(torch.cat(chunks), run(batch, native, "cpu"))


@settings(max_examples=30, deadline=None)
@given(order=st.permutations(range(5)), count=st.integers(1, 5))
def test_neighbours_change_no_bit(native: NativeLibrary, order: list[int], count: int) -> None:
    """TRAP-13: a request alone, or with any others in any order, gets the same output."""
    lengths = ((1, 90), (33, 33), (1, 600), (10, 200), (1, 1))
    full = make_batch(AttentionCase(lengths=lengths), native)
    expected = run(full, native, "cpu").split([q for q, _ in lengths])
    chosen = order[:count]
    queries = full.q.split([q for q, _ in lengths])
    query_lens = [lengths[i][0] for i in chosen]
    metadata = replace(
        full.metadata,
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int(),
        seq_lens=full.metadata.seq_lens[chosen],
        num_actual_tokens=sum(query_lens),
        block_table=full.metadata.block_table[chosen],
        slot_mapping=torch.full((sum(query_lens),), -1),
    )
    part = AttentionBatch(full.case, torch.cat([queries[i] for i in chosen]), [], [], full.kv_cache, metadata, None)
    assert torch.equal(run(part, native, "cpu", threads=2), torch.cat([expected[i] for i in chosen]))
