"""Metadata builders, cache writes and the conventions of `forward`, for every backend."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.attention_case import AttentionCase, make_batch, make_builder, make_cache, make_impl, run
from treadle.kernels.attention import ATTENTION_BACKENDS
from treadle.kernels.attention.interface import CommonMetadata, PersistentMetadata, visible_window
from treadle.kernels.native import NativeLibrary

BACKENDS = ATTENTION_BACKENDS.names()
BIG = AttentionCase(lengths=((5, 70), (1, 130), (3, 3), (1, 40)))


def metadata_of(requests: int, tokens: int, columns: int) -> CommonMetadata:
    return CommonMetadata(
        query_start_loc=torch.tensor([0] * requests + [tokens], dtype=torch.int32),
        seq_lens=torch.full((requests,), 7, dtype=torch.int32),
        num_actual_tokens=tokens,
        max_query_len=tokens,
        max_seq_len=7,
        block_table=torch.full((requests, columns), 9, dtype=torch.int32),
        slot_mapping=torch.full((tokens,), 3),
    )


def test_tails_are_cleared_and_addresses_stay() -> None:
    """C05-04: a smaller batch after a larger one leaves nothing of it, in the same memory."""
    buffers = PersistentMetadata(max_num_seqs=4, max_num_tokens=8, max_blocks_per_seq=5)
    addresses = [t.data_ptr() for t in (buffers.seq_lens, buffers.block_table, buffers.slot_mapping)]
    for shape in ((4, 8, 5), (2, 3, 2), (3, 1, 4), (0, 0, 1)):
        requests, tokens, columns = shape
        filled = buffers.fill(metadata_of(*shape))
        expected_table = torch.zeros(4, 5, dtype=torch.int32)
        expected_table[:requests, :columns] = 9
        assert torch.equal(buffers.block_table, expected_table)
        assert buffers.seq_lens.tolist() == [7] * requests + [0] * (4 - requests)
        assert buffers.slot_mapping.tolist() == [3] * tokens + [-1] * (8 - tokens)
        assert buffers.query_start_loc.tolist() == [0] * requests + [tokens] * (5 - requests)
        assert filled.seq_lens.shape == (requests,) and filled.slot_mapping.shape == (tokens,)
    assert addresses == [t.data_ptr() for t in (buffers.seq_lens, buffers.block_table, buffers.slot_mapping)]


def test_too_large_a_batch_is_our_bug() -> None:
    """C05-04: buffers never grow."""
    buffers = PersistentMetadata(max_num_seqs=2, max_num_tokens=4, max_blocks_per_seq=2)
    for shape in ((3, 1, 1), (1, 5, 1), (1, 1, 3)):
        with pytest.raises(AssertionError, match="exceed the builder's"):
            buffers.fill(metadata_of(*shape))


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_builder_serves_batches_that_shrink(native: NativeLibrary, backend: str) -> None:
    """C05-04: a small batch built after a large one gives what a fresh builder gives."""
    big, small = make_batch(BIG, native), make_batch(AttentionCase(lengths=((2, 20), (1, 1))), native)
    builder = make_builder(backend, big.metadata, 16)
    builder.build(big.metadata)
    built = builder.build(small.metadata)
    impl = make_impl(small.case, native, backend)
    out = impl.forward(small.q, small.kv_cache, built, torch.full_like(small.q, torch.nan))
    assert torch.equal(out, run(small, native, backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_metadata_gives_zeros(native: NativeLibrary, backend: str) -> None:
    """C05-01 (R-5.18): a profiling run."""
    batch = make_batch(BIG, native)
    out = torch.full_like(batch.q, torch.nan)
    assert make_impl(BIG, native, backend).forward(batch.q, batch.kv_cache, None, out) is out
    assert not out.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_no_kernel_does_is_refused(native: NativeLibrary, backend: str) -> None:
    """C05-01, C05-14 (R-5.17, R-5.26): an output scale, a causal flag for each sequence."""
    batch = make_batch(BIG, native)
    builder = make_builder(backend, batch.metadata, 16)
    with pytest.raises(NotImplementedError, match="output scaling"):
        make_impl(BIG, native, backend).forward(
            batch.q, batch.kv_cache, builder.build(batch.metadata), batch.q, output_scale=torch.ones(1)
        )
    with pytest.raises(NotImplementedError, match="causal flag for each sequence"):
        builder.build(replace(batch.metadata, causal=torch.ones(4, dtype=torch.bool)))  # type: ignore[arg-type]


def test_windows() -> None:
    """C05-09 (R-5.23): a window holds to the left in a causal call and to both sides in another."""
    assert visible_window(5, causal=True) == (4, 0)
    assert visible_window(5, causal=False) == (4, 4)
    assert visible_window(None, causal=True) == (None, 0)
    assert visible_window(None, causal=False) == (None, None)


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_of_one_group_keep_their_windows(native: NativeLibrary, backend: str) -> None:
    """C05-09 (R-5.24): windowed and global layers share one batch's metadata, each with its own window."""
    batch = make_batch(BIG, native)
    windowed = run(batch, native, backend)
    batch.case = replace(BIG, window=4)
    builder = make_builder(backend, batch.metadata, 16).build(batch.metadata)
    outs = [
        make_impl(replace(BIG, window=window), native, backend).forward(
            batch.q, batch.kv_cache, builder, torch.empty_like(batch.q)
        )
        for window in (None, 4)
    ]
    assert torch.equal(outs[0], windowed)
    assert not torch.allclose(outs[0], outs[1])


@pytest.mark.parametrize("layout", ["joined", "token_major", "interleaved"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_write_touches_only_its_slots(native: NativeLibrary, backend: str, dtype: str, layout: str) -> None:
    """C05-15 (R-5.33, R-5.34): -1 is skipped, rows beyond the slots are padding, K before V, other slots untouched."""
    case = AttentionCase(lengths=(), dtype=dtype, layout=layout, head_size=8)
    cache = make_cache(case, 3)
    cache.fill_(5)
    k, v = torch.randn(2, 6, 2, 8).to(cache.dtype)
    make_impl(case, native, backend).write_kv(k, v, cache, torch.tensor([20, -1, 0, 47]))
    expected = torch.full((3, 2, 16, 16), 5, dtype=cache.dtype)
    for row, slot in ((0, 20), (2, 0), (3, 47)):
        expected[slot // 16, :, slot % 16] = torch.cat((k[row], v[row]), dim=-1)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_slots_and_blocks_touch_nothing(native: NativeLibrary, backend: str) -> None:
    """C05-15: a slot beyond the cache is refused before anything is written."""
    cache = make_cache(BIG, 2)
    k = torch.zeros(2, 2, 64)
    with pytest.raises(AssertionError, match="a slot lies beyond the cache"):
        make_impl(BIG, native, backend).write_kv(k, k, cache, torch.tensor([0, 32]))
    assert bool(cache.isnan().all())


def test_native_kernel_checks_lengths_and_blocks(native: NativeLibrary) -> None:
    """C05-06: wrong tables end in an error, never in a read out of bounds."""
    batch = make_batch(BIG, native)
    good = batch.metadata
    table = good.block_table.clone()
    table[1, 2] = batch.kv_cache.shape[0]
    for bad, message in (
        (replace(good, block_table=table), "names a block beyond the cache"),
        (replace(good, block_table=-good.block_table - 1), "names a block beyond the cache"),
        (replace(good, seq_lens=good.seq_lens + 1000), "lengths do not fit"),
        (replace(good, seq_lens=good.seq_lens * 0), "lengths do not fit"),
        (replace(good, query_start_loc=good.query_start_loc.flip(0)), "lengths do not fit"),
    ):
        batch.metadata = bad
        with pytest.raises(AssertionError, match=message):
            run(batch, native, "cpu")


def test_native_kernel_checks_layouts(native: NativeLibrary) -> None:
    """C05-01: a wrong layout is an error, not wrong output."""
    batch = make_batch(BIG, native)
    impl = make_impl(BIG, native, "cpu")
    metadata = make_builder("cpu", batch.metadata, 16).build(batch.metadata)
    for cache in (batch.kv_cache.transpose(2, 3), batch.kv_cache.bfloat16(), batch.kv_cache[:, :1]):
        with pytest.raises(AssertionError):
            impl.forward(batch.q, cache, metadata, batch.q)
    with pytest.raises(AssertionError):
        impl.forward(batch.q.bfloat16(), batch.kv_cache, metadata, batch.q)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_implementation_follows_its_cache(native: NativeLibrary, backend: str) -> None:
    """C05-01: a new cache, at another address, is noticed."""
    batch = make_batch(BIG, native)
    impl = make_impl(BIG, native, backend)
    metadata = make_builder(backend, batch.metadata, 16).build(batch.metadata)
    first = impl.forward(batch.q, batch.kv_cache, metadata, torch.empty_like(batch.q))
    twice = torch.cat((batch.kv_cache[..., :64], batch.kv_cache[..., 64:] * 2), dim=-1)
    second = impl.forward(batch.q, twice, metadata, torch.empty_like(batch.q))
    assert torch.equal(second, first * 2)
