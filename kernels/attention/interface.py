"""What an attention backend declares, what it is given, and what it must do. Names no kernel.

Shape legend: T tokens of the step, R requests, H query heads, K key/value heads, D head size, B cache blocks, S block size.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, ClassVar, Protocol

import torch

from treadle.kernels.native import NativeLibrary

TORCH_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
"""The IR's dtype names that attention knows."""


class CaptureSupport(IntEnum):
    """How far a backend can be captured in a graph; an engine takes the minimum over its layers."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


@dataclass(frozen=True, kw_only=True)
class AttentionQuery:
    """Everything one layer asks of a backend. `window` counts visible tokens, the token itself included."""

    dtype: str
    head_size: int
    num_heads: int
    num_kv_heads: int
    block_size: int
    cache_dtype: str | None = None
    device: str = "cpu"
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    mla: bool = False
    cascade: bool = False
    decode_context_parallel: int = 1
    multimodal_prefix: bool = False
    per_sequence_causal: bool = False
    attention_type: str = "decoder"

    @property
    def effective_cache_dtype(self) -> str:
        return self.cache_dtype or self.dtype


@dataclass(frozen=True, kw_only=True)
class Capability:
    """What a backend supports; `unsupported_reason` compares one whole query with it (R-5.4)."""

    dtypes: tuple[str, ...]
    devices: tuple[str, ...] = ("cpu",)
    max_head_size: int = 512
    block_size_multiple: int = 16
    attention_types: tuple[str, ...] = ("decoder",)
    sinks: bool = True

    def unsupported_reason(self, query: AttentionQuery) -> str | None:
        """None when the query fits, otherwise why not, in one sentence that names the value and the choices."""
        return next((reason for fits, reason in self._checks(query) if not fits), None)

    def _checks(self, q: AttentionQuery) -> list[tuple[bool, str]]:
        per_block = self.block_size_multiple
        return [
            (q.device in self.devices, f"runs on {_listed(self.devices)}, not on {q.device}"),
            (q.dtype in self.dtypes, f"activation dtype {q.dtype} is not one of {_listed(self.dtypes)}"),
            (
                q.effective_cache_dtype == q.dtype,
                f"cache dtype {q.effective_cache_dtype} differs from activation dtype {q.dtype}; no cache conversion",
            ),
            (0 < q.head_size <= self.max_head_size, f"head size {q.head_size} is not in 1..{self.max_head_size}"),
            (
                q.num_kv_heads > 0 and q.num_heads % q.num_kv_heads == 0,
                f"{q.num_heads} query heads are not a multiple of {q.num_kv_heads} key/value heads",
            ),
            (
                q.block_size > 0 and q.block_size % per_block == 0,
                f"block size {q.block_size} is not a multiple of {per_block}",
            ),
            (q.window is None or q.window > 0, f"window {q.window} shows no token; it must be at least 1"),
            (q.softcap is None or q.softcap > 0, f"soft cap {q.softcap} is not positive"),
            (self.sinks or not q.sinks, "attention sinks are not implemented"),
            (q.attention_type in self.attention_types, f"attention type {q.attention_type} is not implemented"),
            (not q.alibi, "ALiBi slopes are not implemented"),
            (not q.mla, "multi-head latent attention is not implemented"),
            (not q.cascade, "cascade attention is not implemented"),
            (q.decode_context_parallel == 1, "decode context parallelism is not implemented"),
            (not q.multimodal_prefix, "multimodal-prefix masks are not implemented"),
            (not q.per_sequence_causal, "a causal flag for each sequence is not implemented"),
        ]


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names)


def visible_window(window: int | None, causal: bool) -> tuple[int | None, int | None]:
    """(tokens visible to the left, to the right), the token itself not counted; None is without limit.

    Always from the layer's own window: a cache group may mix windowed and global layers (R-5.24).
    A causal window in a non-causal call holds to both sides (R-5.23).
    """
    reach = None if window is None else window - 1
    return (reach, 0) if causal else (reach, reach)


@dataclass(frozen=True, kw_only=True)
class CommonMetadata:
    """The batch of one step as every backend gets it. Query and KV of a request end at the same position:
    row i of a request stands at position `seq_len - query_len + i` (R-5.29)."""

    query_start_loc: torch.Tensor
    """i32 [R+1], prefix sums of query lengths; the last is `num_actual_tokens`."""
    seq_lens: torch.Tensor
    """i32 [R], tokens with K and V in the cache once this step is written."""
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table: torch.Tensor
    """i32 [R, blocks], physical block of each logical block; columns beyond a request's length are never read."""
    slot_mapping: torch.Tensor
    """i64 [T], `block * block_size + offset` for each new token; -1 is not written."""
    causal: bool = True

    @property
    def num_requests(self) -> int:
        return self.seq_lens.shape[0]


class PersistentMetadata:
    """Maximum-size buffers that a builder owns: `fill` copies a batch in and clears what the last one left (R-5.12, R-5.13).

    Captured graphs hold addresses in these buffers, so they are never reallocated.
    """

    def __init__(self, max_num_seqs: int, max_num_tokens: int, max_blocks_per_seq: int):
        self.query_start_loc = torch.zeros(max_num_seqs + 1, dtype=torch.int32)
        self.seq_lens = torch.zeros(max_num_seqs, dtype=torch.int32)
        self.block_table = torch.zeros(max_num_seqs, max_blocks_per_seq, dtype=torch.int32)
        self.slot_mapping = torch.full((max_num_tokens,), -1, dtype=torch.int64)
        self._requests = 0
        self._columns = 0
        self._slots = 0

    def fill(self, common: CommonMetadata) -> CommonMetadata:
        """The same batch with every tensor a view of these buffers. Beyond it lengths are 0 and slots -1."""
        requests, columns = common.block_table.shape
        slots = common.slot_mapping.shape[0]
        assert requests <= self.seq_lens.shape[0], f"{requests} requests exceed the builder's {self.seq_lens.shape[0]}"
        assert columns <= self.block_table.shape[1], f"{columns} blocks exceed the builder's {self.block_table.shape[1]}"
        assert slots <= self.slot_mapping.shape[0], f"{slots} slots exceed the builder's {self.slot_mapping.shape[0]}"
        self._clear_tails(requests, columns, slots, end=common.num_actual_tokens)
        self.query_start_loc[: requests + 1].copy_(common.query_start_loc)
        self.seq_lens[:requests].copy_(common.seq_lens)
        self.block_table[:requests, :columns].copy_(common.block_table)
        self.slot_mapping[:slots].copy_(common.slot_mapping)
        return replace(
            common,
            query_start_loc=self.query_start_loc[: requests + 1],
            seq_lens=self.seq_lens[:requests],
            block_table=self.block_table[:requests, :columns],
            slot_mapping=self.slot_mapping[:slots],
        )

    def _clear_tails(self, requests: int, columns: int, slots: int, end: int) -> None:
        self.query_start_loc[requests + 1 :].fill_(end)  # prefix sums stay flat: requests beyond are empty
        if requests < self._requests:
            self.seq_lens[requests : self._requests].zero_()
            self.block_table[requests : self._requests].zero_()
        if columns < self._columns:
            self.block_table[:requests, columns : self._columns].zero_()
        if slots < self._slots:
            self.slot_mapping[slots : self._slots].fill_(-1)
        self._requests, self._columns, self._slots = requests, columns, slots


class BoundAttention(ctypes.Structure):
    """One layer's attention as a launch plan calls it (kernels/cpu/launch_plan.h); the pointers outlive the plan."""

    _fields_: ClassVar = [
        ("attend", c_void_p),
        ("write", c_void_p),
        ("layer", c_void_p),
        ("batch", c_void_p),
        ("cache", c_void_p),
        ("slot_mapping", c_void_p),
        ("num_tokens", c_void_p),
        ("num_threads", c_int64),
        ("element", c_int64),
    ]


class MetadataBuilder(Protocol):
    """Turns the batch into a backend's arguments, once a step, without allocating what a graph can see."""

    def build(self, common: CommonMetadata) -> Any:
        """The metadata that this backend's `forward` takes; valid until the next build."""
        ...


class AttentionImpl(Protocol):
    """One layer's attention. Holds no cache: the cache comes with each call."""

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Scatters k, v [>=len(slot_mapping), K, D] into the cache; rows beyond the slots and slots of -1 are left out."""
        ...

    def forward(self, q: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, out: torch.Tensor) -> torch.Tensor:
        """Writes attention of the first `num_actual_tokens` rows of q [T, H, D] into out [T, H, D], and returns out.

        kv_cache is [B, K, S, 2D] with any strides but the last. Metadata None (a profiling run) fills out with zeros.
        """
        ...


class CapturableImpl(AttentionImpl, Protocol):
    """What the implementation of a backend offers whose capture support is not NEVER."""

    def capture(self, kv_cache: torch.Tensor, builder: Any) -> BoundAttention:
        """This layer with its cache and its metadata bound: what a launch plan calls after each `builder.build`."""
        ...


class AttentionBackend(Protocol):
    """A class with these attributes; registered in ATTENTION_BACKENDS. Needs no instance."""

    name: str
    capture_support: CaptureSupport
    block_sizes: str
    """Which cache block sizes it takes, in words."""

    @classmethod
    def unsupported_reason(cls, query: AttentionQuery) -> str | None: ...

    @classmethod
    def make_builder(
        cls,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        max_blocks_per_seq: int,
        block_size: int,
        num_threads: int,
    ) -> MetadataBuilder: ...

    @classmethod
    def make_impl(
        cls,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        dtype: str = "f32",
        native: NativeLibrary | None = None,
        sinks: torch.Tensor | None = None,
    ) -> AttentionImpl: ...


def kv_cache_shape(num_blocks: int, num_kv_heads: int, block_size: int, head_size: int) -> tuple[int, int, int, int]:
    """The canonical cache shape [B, K, S, 2D]: keys in the first half of the last dimension, values in the second."""
    return (num_blocks, num_kv_heads, block_size, 2 * head_size)


def check_forward_support(*, output_scale: torch.Tensor | None = None, causal: bool | torch.Tensor = True) -> None:
    """Refuses what no CPU kernel does, rather than approximate it (R-5.17, R-5.26). Raises NotImplementedError."""
    if output_scale is not None:
        raise NotImplementedError("fused output scaling is not implemented by this attention backend; scale after it")
    if isinstance(causal, torch.Tensor):
        raise NotImplementedError("a causal flag for each sequence is not implemented by this attention backend")
