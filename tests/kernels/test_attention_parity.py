"""Every attention backend against dense attention, and the C++ one against the reference over its whole range."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.attention_case import (
    AttentionCase,
    dense_attention,
    make_batch,
    make_builder,
    make_impl,
    run,
)
from tests.kernels.tolerance import assert_close
from treadle.kernels.attention import ATTENTION_BACKENDS
from treadle.kernels.cpu_features import local_cpu
from treadle.kernels.native import NativeLibrary

# Decode, whole prefills, a chunk in the middle, one token alone, a request without new tokens, lengths around blocks.
MIXED = ((1, 100), (37, 37), (1, 1), (20, 90), (0, 5), (3, 64), (1, 65), (16, 16))
LONG = ((1, 4096), (5, 1500), (70, 1100))

OPTIONS = [
    {},
    {"window": 1},
    {"window": 33},
    {"softcap": 2.0},
    {"causal": False},
    {"causal": False, "window": 20},
    {"sinks": True},
    {"sinks": True, "window": 40, "softcap": 5.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("backend", ATTENTION_BACKENDS.names())
def test_equals_dense_attention(native: NativeLibrary, backend: str, options: dict) -> None:
    """C05-01, C05-06, C05-09: scattered blocks, unused slots full of NaN, masks by R-5.23 and R-5.29."""
    batch = make_batch(AttentionCase(lengths=MIXED, **options), native, backend)
    assert_close(run(batch, native, backend), dense_attention(batch))


@pytest.mark.parametrize("isa", local_cpu().runnable_isas)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("head_size", [1, 32, 40, 64, 72, 80, 96, 128, 256])
def test_head_sizes(native: NativeLibrary, isa: str, dtype: str, head_size: int) -> None:
    """C05-06: widths that fill the vectors and that do not, in every dtype and instruction set this CPU runs."""
    batch = make_batch(AttentionCase(lengths=MIXED, dtype=dtype, head_size=head_size), native)
    assert_close(run(batch, native, "cpu", isa=isa), run(batch, None, "torch"))


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (9, 3), (8, 1), (20, 5), (64, 1)], ids=str)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_group_sizes(native: NativeLibrary, dtype: str, heads: tuple[int, int]) -> None:
    """C05-01: from a KV head for each query head to one for more heads than a tile has rows."""
    num_heads, num_kv_heads = heads
    case = AttentionCase(lengths=MIXED, dtype=dtype, num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=32)
    batch = make_batch(case, native)
    assert_close(run(batch, native, "cpu"), run(batch, None, "torch"))


@pytest.mark.parametrize("block_size", [16, 32, 48, 256])
@pytest.mark.parametrize("layout", ["joined", "token_major", "interleaved"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_block_sizes_and_layouts(native: NativeLibrary, dtype: str, layout: str, block_size: int) -> None:
    """C05-03, C05-06: any strides but the last, written and read by the C++ kernel."""
    case = AttentionCase(lengths=MIXED, dtype=dtype, layout=layout, block_size=block_size, window=50)
    batch = make_batch(case, native, "cpu")
    assert_close(run(batch, native, "cpu"), run(batch, None, "torch"))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("options", [{}, {"window": 700}, {"sinks": True}, {"causal": False}], ids=str)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_long_contexts(native: NativeLibrary, dtype: str, options: dict, threads: int) -> None:
    """C05-06: several chunks, split over threads and not."""
    batch = make_batch(AttentionCase(lengths=LONG, dtype=dtype, **options), native)
    assert_close(run(batch, native, "cpu", threads), run(batch, None, "torch"))


@pytest.mark.parametrize("backend", ATTENTION_BACKENDS.names())
def test_empty_batch(native: NativeLibrary, backend: str) -> None:
    """C05-01: no request, and requests without tokens, write nothing."""
    for lengths in ((), ((0, 3), (0, 0))):
        batch = make_batch(AttentionCase(lengths=lengths), native, backend)
        assert run(batch, native, backend).shape == (0, 6, 64)


@pytest.mark.parametrize("backend", ATTENTION_BACKENDS.names())
def test_strided_queries_and_padding(native: NativeLibrary, backend: str) -> None:
    """C05-01 (R-5.19, R-5.21, R-5.25): q out of a fused projection, output in place, padding rows untouched."""
    batch = make_batch(AttentionCase(lengths=MIXED), native, backend)
    expected = run(batch, native, backend)
    tokens, heads, head_size = batch.q.shape
    fused = torch.full((tokens + 4, heads + 4, head_size), torch.nan)
    fused[:tokens, :heads] = batch.q
    batch.q = fused[:, :heads]
    out = torch.full((tokens + 4, heads, 2 * head_size), 7.0)[..., :head_size]
    metadata = make_builder(backend, batch.metadata, 16).build(batch.metadata)
    returned = make_impl(batch.case, native, backend).forward(batch.q, batch.kv_cache, metadata, out)
    assert returned is out
    assert torch.equal(out[:tokens], expected)
    assert bool((out[tokens:] == 7.0).all())


@pytest.mark.parametrize("backend", ATTENTION_BACKENDS.names())
def test_nan_of_a_query_is_not_lost(native: NativeLibrary, backend: str) -> None:
    """C05-01: a broken activation shows in its own row, over one chunk and over several, and in no other."""
    batch = make_batch(AttentionCase(lengths=((2, 40), (2, 1200))), native, backend)
    batch.q[0], batch.q[3] = torch.nan, torch.nan
    out = run(batch, native, backend)
    assert bool(out[[0, 3]].isnan().all()) and not bool(out[[1, 2]].isnan().any())
