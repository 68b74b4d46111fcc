"""Builds one attention batch, in either cache layout, and runs it through a backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from treadle.kernels.attention import ATTENTION_BACKENDS
from treadle.kernels.attention.interface import TORCH_DTYPES, CommonMetadata, kv_cache_shape
from treadle.kernels.native import NativeLibrary


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """`lengths` are (new tokens, all tokens) of each request."""

    lengths: tuple[tuple[int, int], ...]
    dtype: str = "f32"
    head_size: int = 64
    num_heads: int = 6
    num_kv_heads: int = 2
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    causal: bool = True
    sinks: bool = False
    layout: str = "joined"
    seed: int = 0


@dataclass
class AttentionBatch:
    """Tensors of a case: every slot that no request has filled holds NaN."""

    case: AttentionCase
    q: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    kv_cache: torch.Tensor
    metadata: CommonMetadata
    sinks: torch.Tensor | None


def make_cache(case: AttentionCase, num_blocks: int) -> torch.Tensor:
    """A cache full of NaN: `joined` is dense, `token_major` has [B, S, K, 2D] in memory, `interleaved` is one layer's
    view of a buffer in which each block holds three layers."""
    dtype = TORCH_DTYPES[case.dtype]
    blocks, heads, size, joined = kv_cache_shape(num_blocks, case.num_kv_heads, case.block_size, case.head_size)
    if case.layout == "joined":
        return torch.full((blocks, heads, size, joined), torch.nan, dtype=dtype)
    if case.layout == "token_major":
        return torch.full((blocks, size, heads, joined), torch.nan, dtype=dtype).transpose(1, 2)
    assert case.layout == "interleaved", case.layout
    return torch.full((blocks, 3, heads, size, joined), torch.nan, dtype=dtype)[:, 1]


def make_batch(case: AttentionCase, native: NativeLibrary | None, backend: str = "torch") -> AttentionBatch:
    """Random activations; keys and values written through `backend` into shuffled blocks."""
    random = torch.Generator().manual_seed(case.seed)
    dtype = TORCH_DTYPES[case.dtype]
    columns = max((-(-seq_len // case.block_size) for _, seq_len in case.lengths), default=0) or 1
    requests = len(case.lengths)
    num_blocks = requests * columns + 2
    table = torch.randperm(num_blocks, generator=random)[: requests * columns].view(requests, columns).int()
    kv_cache = make_cache(case, num_blocks)
    writer = make_impl(case, native, backend)
    keys, values = [], []
    for row, (_, seq_len) in zip(table, case.lengths, strict=True):
        k, v = torch.randn(2, seq_len, case.num_kv_heads, case.head_size, generator=random).to(dtype)
        positions = torch.arange(seq_len)
        slots = row[positions // case.block_size].long() * case.block_size + positions % case.block_size
        writer.write_kv(k, v, kv_cache, slots)
        keys.append(k)
        values.append(v)
    query_lens = [query_len for query_len, _ in case.lengths]
    tokens = sum(query_lens)
    metadata = CommonMetadata(
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int(),
        seq_lens=torch.tensor([seq_len for _, seq_len in case.lengths], dtype=torch.int32),
        num_actual_tokens=tokens,
        max_query_len=max(query_lens, default=0),
        max_seq_len=max((seq_len for _, seq_len in case.lengths), default=0),
        block_table=table,
        slot_mapping=torch.full((tokens,), -1),
        causal=case.causal,
    )
    q = torch.randn(tokens, case.num_heads, case.head_size, generator=random).to(dtype)
    sinks = torch.randn(case.num_heads, generator=random) if case.sinks else None
    return AttentionBatch(case, q, keys, values, kv_cache, metadata, sinks)


def make_impl(case: AttentionCase, native: NativeLibrary | None, backend: str, **options: Any) -> Any:
    return ATTENTION_BACKENDS.get(backend).make_impl(
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_size=case.head_size,
        scale=case.head_size**-0.5,
        window=case.window,
        softcap=case.softcap,
        dtype=case.dtype,
        native=native,
        **options,
    )


def make_builder(backend: str, metadata: CommonMetadata, block_size: int, threads: int = 1) -> Any:
    """A builder with room to spare, so that its tails matter."""
    return ATTENTION_BACKENDS.get(backend).make_builder(
        max_num_seqs=metadata.num_requests + 3,
        max_num_tokens=metadata.num_actual_tokens + 5,
        max_blocks_per_seq=metadata.block_table.shape[1] + 2,
        block_size=block_size,
        num_threads=threads,
    )


def run(batch: AttentionBatch, native: NativeLibrary | None, backend: str, threads: int = 1, **options: Any) -> torch.Tensor:
    """Attention of the batch, written over an output full of NaN."""
    impl = make_impl(batch.case, native, backend, sinks=batch.sinks, **options)
    metadata = make_builder(backend, batch.metadata, batch.case.block_size, threads).build(batch.metadata)
    return impl.forward(batch.q, batch.kv_cache, metadata, torch.full_like(batch.q, torch.nan))


def dense_attention(batch: AttentionBatch) -> torch.Tensor:
    """The same from the keys and values themselves, by one loop over rows: shares no code with any backend."""
    case, group = batch.case, batch.case.num_heads // batch.case.num_kv_heads
    rows = []
    starts = batch.metadata.query_start_loc.tolist()
    for index, (query_len, seq_len) in enumerate(case.lengths):
        k, v = batch.keys[index].double(), batch.values[index].double()
        for offset in range(query_len):
            position = seq_len - query_len + offset
            seen = [
                j
                for j in range(seq_len)
                if (not case.causal or j <= position) and (case.window is None or abs(position - j) < case.window)
            ]
            for head in range(case.num_heads):
                scores = k[seen, head // group] @ batch.q[starts[index] + offset, head].double() * case.head_size**-0.5
                if case.softcap is not None:
                    scores = case.softcap * torch.tanh(scores / case.softcap)
                if batch.sinks is not None:
                    scores = torch.cat((scores, batch.sinks[head : head + 1].double()))
                weights = torch.softmax(scores, dim=0)[: len(seen)]
                rows.append(weights @ v[seen, head // group])
    if not rows:
        return batch.q.float()
    return torch.stack(rows).view(batch.q.shape).float()
