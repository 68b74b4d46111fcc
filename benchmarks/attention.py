"""Paged CPU attention against torch's SDPA on contiguous keys and values, alternated in one run; prints ratios.

python -m benchmarks.attention [--threads N] [--dtype bf16] [--repeats 20]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from treadle.kernels.attention.cpu import NATIVE_SOURCE, CpuAttentionBackend
from treadle.kernels.attention.interface import TORCH_DTYPES, CommonMetadata, kv_cache_shape
from treadle.kernels.cpu_features import local_cpu
from treadle.kernels.native import NativeLibrary, compile_native, load_native, native_sources

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 9, 3, 64, 16
PYTHON_COST_CALLS = 2000
WARM_UP = 2


@dataclass(frozen=True)
class Case:
    """`requests` requests, each with `query_len` new tokens at the end of `seq_len`."""

    name: str
    requests: int
    query_len: int
    seq_len: int

    @property
    def flops(self) -> float:
        """Multiplications and additions of the visible pairs, two products."""
        seen = self.query_len * self.seq_len - self.query_len * (self.query_len - 1) / 2
        return 4.0 * self.requests * HEADS * HEAD_SIZE * seen


CASES = (
    Case("decode 16 x 512", 16, 1, 512),
    Case("decode 1 x 4096", 1, 1, 4096),
    Case("prefill 8 x 1024", 8, 1024, 1024),
    Case("chunk 1 x 256 of 1024", 1, 256, 1024),
)


def paged_call(case: Case, dtype: str, library: NativeLibrary, threads: int) -> Callable[[], object]:
    """A call of the C++ kernel over shuffled blocks."""
    torch_dtype = TORCH_DTYPES[dtype]
    blocks = case.seq_len // BLOCK_SIZE
    cache = torch.randn(kv_cache_shape(case.requests * blocks, KV_HEADS, BLOCK_SIZE, HEAD_SIZE)).to(torch_dtype)
    tokens = case.requests * case.query_len
    common = CommonMetadata(
        query_start_loc=torch.arange(0, tokens + 1, case.query_len, dtype=torch.int32),
        seq_lens=torch.full((case.requests,), case.seq_len, dtype=torch.int32),
        num_actual_tokens=tokens,
        max_query_len=case.query_len,
        max_seq_len=case.seq_len,
        block_table=torch.randperm(case.requests * blocks).int().view(case.requests, blocks),
        slot_mapping=torch.full((tokens,), -1),
    )
    builder = CpuAttentionBackend.make_builder(
        max_num_seqs=case.requests,
        max_num_tokens=tokens,
        max_blocks_per_seq=blocks,
        block_size=BLOCK_SIZE,
        num_threads=threads,
    )
    impl = CpuAttentionBackend.make_impl(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_size=HEAD_SIZE,
        scale=HEAD_SIZE**-0.5,
        dtype=dtype,
        native=library,
    )
    metadata = builder.build(common)
    q = torch.randn(tokens, HEADS, HEAD_SIZE).to(torch_dtype)
    out = torch.empty_like(q)
    return lambda: impl.forward(q, cache, metadata, out)


def sdpa_call(case: Case, dtype: str) -> Callable[[], object]:
    """torch's SDPA over contiguous keys and values; a chunk inside a sequence gets the mask it needs."""
    torch_dtype = TORCH_DTYPES[dtype]
    q = torch.randn(case.requests, HEADS, case.query_len, HEAD_SIZE).to(torch_dtype)
    k, v = torch.randn(2, case.requests, KV_HEADS, case.seq_len, HEAD_SIZE).to(torch_dtype)
    causal = case.query_len == case.seq_len
    mask = None
    if not causal and case.query_len > 1:
        mask = torch.ones(case.query_len, case.seq_len, dtype=torch.bool).tril(case.seq_len - case.query_len)
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)


def alternate(calls: list[Callable[[], object]], repeats: int, clock: Callable[[], float]) -> list[float]:
    """Least seconds of each call, the calls taking turns: the reading that other work on the machine disturbed least."""
    times: list[list[float]] = [[] for _ in calls]
    for repeat in range(repeats + WARM_UP):
        for call, seen in zip(calls, times, strict=True):
            start = clock()
            call()
            if repeat >= WARM_UP:
                seen.append(clock() - start)
    return [min(seen) for seen in times]


def python_cost(library: NativeLibrary, dtype: str) -> float:
    """Seconds of one forward call whose batch is empty: everything but the computation."""
    call = paged_call(Case("empty", 1, 1, BLOCK_SIZE), dtype, library, threads=1)
    start = time.perf_counter()
    for _ in range(PYTHON_COST_CALLS):
        call()
    return (time.perf_counter() - start) / PYTHON_COST_CALLS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=list(TORCH_DTYPES), default="bf16")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--library", type=Path, help="an already built library")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        path = args.library or compile_native(
            native_sources()[NATIVE_SOURCE], local_cpu().arch, Path(folder) / "attention.so"
        )
        library = load_native(path)
        # One thread is timed by its own CPU clock, which other processes do not disturb.
        clock = time.thread_time if args.threads == 1 else time.perf_counter
        print(f"{local_cpu().arch} {local_cpu().isa}, {args.threads} threads, {args.dtype}, torch {torch.__version__}")
        for case in CASES:
            calls = [paged_call(case, args.dtype, library, args.threads), sdpa_call(case, args.dtype)]
            ours, torchs = alternate(calls, args.repeats, clock)
            print(
                f"{case.name:24s} ours {ours * 1e6:9.0f} us  sdpa {torchs * 1e6:9.0f} us  "
                f"sdpa/ours {torchs / ours:5.2f}  {case.flops / ours / 1e9:6.1f} GFLOP/s"
            )
        print(f"one call over 16 keys, all costs: {python_cost(library, args.dtype) * 1e6:.1f} us")


if __name__ == "__main__":
    main()
