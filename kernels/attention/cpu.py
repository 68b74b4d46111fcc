"""The C++ backend for CPUs: paged attention of kernels/cpu/, called through ctypes with arguments prepared ahead.

A batch's arguments are packed into one C struct once a step, a layer's and its cache's once in their life, so that a
call passes three pointers and the addresses of its activations. Results of a row do not depend on the rest of the batch,
on chunking or on the number of threads: kernels/cpu/paged_attention.h says why.
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import c_float, c_int64, c_void_p
from typing import Any, ClassVar

import torch

from treadle.ir.errors import ArtifactError, ConfigError
from treadle.kernels.attention.interface import (
    TORCH_DTYPES,
    AttentionQuery,
    BoundAttention,
    Capability,
    CaptureSupport,
    CommonMetadata,
    PersistentMetadata,
    check_forward_support,
)
from treadle.kernels.native import NativeLibrary

NATIVE_SOURCE = "cpu_attention"
"""The row of kernels.native.NATIVE_SOURCES this backend needs."""

_DTYPE_CODES = {"f32": 0, "bf16": 1, "f16": 2}
ISA_CODES = {"auto": 0, "portable": 1, "avx2": 2, "avx512": 3}
_STATUS = {
    1: "a slot lies beyond the cache",
    2: "a block table names a block beyond the cache",
    3: "a request's lengths do not fit: query_len <= seq_len <= max_blocks * block_size, query_start_loc ascending",
    4: "no memory for scratch buffers",
    5: "this CPU lacks the instruction set that was asked for",
}


_NO_MEMORY = 4


def _failure(status: int) -> Exception:
    """What a non-zero status means; all but want of memory are bugs of the caller."""
    return MemoryError(_STATUS[status]) if status == _NO_MEMORY else AssertionError(_STATUS[status])


class _Layer(ctypes.Structure):
    _fields_: ClassVar = [
        ("dtype", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_size", c_int64),
        ("window", c_int64),
        ("isa", c_int64),
        ("sinks", c_void_p),
        ("scale", c_float),
        ("softcap", c_float),
    ]


class _Batch(ctypes.Structure):
    _fields_: ClassVar = [
        ("query_start_loc", c_void_p),
        ("seq_lens", c_void_p),
        ("block_table", c_void_p),
        ("block_table_stride", c_int64),
        ("max_blocks", c_int64),
        ("num_requests", c_int64),
        ("num_tokens", c_int64),
        ("causal", c_int64),
        ("num_threads", c_int64),
    ]


class _Cache(ctypes.Structure):
    _fields_: ClassVar = [
        ("data", c_void_p),
        ("num_blocks", c_int64),
        ("block_size", c_int64),
        ("block_stride", c_int64),
        ("head_stride", c_int64),
        ("token_stride", c_int64),
    ]


class CpuMetadata:
    """One step's arguments; refilled by the next build, so it is valid until then."""

    def __init__(self, num_threads: int):
        self.struct = _Batch(num_threads=num_threads)
        self.pointer = ctypes.byref(self.struct)
        self.common: CommonMetadata | None = None

    @property
    def slot_mapping(self) -> torch.Tensor:
        """i64 [T] for `write_kv`, a view of the builder's buffer."""
        assert self.common is not None, "metadata was never built"
        return self.common.slot_mapping

    @property
    def num_actual_tokens(self) -> int:
        assert self.common is not None, "metadata was never built"
        return self.common.num_actual_tokens


class CpuMetadataBuilder:
    """Owns the buffers that the C struct points to; their addresses never change."""

    def __init__(self, max_num_seqs: int, max_num_tokens: int, max_blocks_per_seq: int, num_threads: int):
        self._buffers = PersistentMetadata(max_num_seqs, max_num_tokens, max_blocks_per_seq)
        self._metadata = CpuMetadata(num_threads)
        struct = self._metadata.struct
        struct.query_start_loc = self._buffers.query_start_loc.data_ptr()
        struct.seq_lens = self._buffers.seq_lens.data_ptr()
        struct.block_table = self._buffers.block_table.data_ptr()
        struct.block_table_stride = self._buffers.block_table.stride(0)

    @property
    def struct(self) -> _Batch:
        """The C struct that every build refills."""
        return self._metadata.struct

    @property
    def slot_mapping_address(self) -> int:
        """Where the slots of a build's tokens stand, i64."""
        return self._buffers.slot_mapping.data_ptr()

    def build(self, common: CommonMetadata) -> CpuMetadata:
        """Copies the batch and packs it. Returns the same object each time, valid until the next build."""
        check_forward_support(causal=common.causal)
        metadata = self._metadata
        metadata.common = self._buffers.fill(common)
        struct = metadata.struct
        struct.num_requests, struct.max_blocks = common.block_table.shape
        struct.num_tokens = common.num_actual_tokens
        struct.causal = common.causal
        return metadata


class CpuAttentionImpl:
    """Attention of one layer through the native library."""

    def __init__(
        self,
        library: NativeLibrary,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        scale: float,
        window: int | None,
        softcap: float | None,
        dtype: str,
        sinks: torch.Tensor | None,
        isa: str = "auto",
    ):
        self._torch_dtype = TORCH_DTYPES[dtype]
        self._num_heads, self._num_kv_heads, self._head_size = num_heads, num_kv_heads, head_size
        self._sinks = None if sinks is None else sinks.float().contiguous()
        self._layer = _Layer(
            dtype=_DTYPE_CODES[dtype],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            window=window or 0,
            isa=ISA_CODES[isa],
            sinks=None if self._sinks is None else self._sinks.data_ptr(),
            scale=scale,
            softcap=softcap or 0.0,
        )
        self._layer_pointer = ctypes.byref(self._layer)
        self._cache = _Cache()
        self._cache_pointer = ctypes.byref(self._cache)
        self._bound: Any = lambda: None  # weak reference to the cache that self._cache describes
        rows = [c_void_p, c_int64, c_int64]
        self._attend = library.bind("treadle_paged_attention", [c_void_p, c_void_p, c_void_p, *rows, *rows])
        self._write = library.bind(
            "treadle_write_kv", [c_void_p, c_void_p, c_void_p, c_int64, *rows, *rows, c_int64]
        )

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        num_threads: int | None = None,
    ) -> None:
        """Scatters k, v [T, K, D] into the cache; rows beyond the slots and slots of -1 are left out.

        Large copies use `num_threads` (default: torch's setting). Touches nothing when a slot lies beyond the cache.
        """
        if self._bound() is not kv_cache:
            self._bind_cache(kv_cache)
        k_token, k_head, k_last = k.stride()
        v_token, v_head, v_last = v.stride()
        assert k_last == 1 and v_last == 1, "the head dimension of k and v must be dense"
        assert k.dtype is self._torch_dtype and v.dtype is self._torch_dtype, f"k and v are not {self._torch_dtype}"
        status = self._write(
            self._layer_pointer, self._cache_pointer, slot_mapping.data_ptr(), slot_mapping.shape[0],
            k.data_ptr(), k_token, k_head, v.data_ptr(), v_token, v_head,
            num_threads or torch.get_num_threads(),
        )  # fmt: skip
        if status != 0:
            raise _failure(status)

    def forward(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: CpuMetadata | None,
        out: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes attention of q [T, H, D] over the pages into out [T, H, D]; zeros when metadata is None.

        q and out may have any strides but the last, which is dense. Raises NotImplementedError for an output scale.
        """
        if output_scale is not None:
            check_forward_support(output_scale=output_scale)
        if metadata is None:
            return out.zero_()
        if self._bound() is not kv_cache:
            self._bind_cache(kv_cache)
        q_token, q_head, q_last = q.stride()
        out_token, out_head, out_last = out.stride()
        assert q_last == 1 and out_last == 1, "the head dimension of q and out must be dense"
        assert q.dtype is self._torch_dtype and out.dtype is self._torch_dtype, f"q and out are not {self._torch_dtype}"
        status = self._attend(
            self._layer_pointer, metadata.pointer, self._cache_pointer,
            q.data_ptr(), q_token, q_head, out.data_ptr(), out_token, out_head,
        )  # fmt: skip
        if status != 0:
            raise _failure(status)
        return out

    def capture(self, kv_cache: torch.Tensor, builder: CpuMetadataBuilder) -> BoundAttention:
        """See CapturableImpl."""
        self._bind_cache(kv_cache)
        batch = builder.struct
        return BoundAttention(
            attend=ctypes.cast(self._attend, c_void_p),
            write=ctypes.cast(self._write, c_void_p),
            layer=ctypes.addressof(self._layer),
            batch=ctypes.addressof(batch),
            cache=ctypes.addressof(self._cache),
            slot_mapping=builder.slot_mapping_address,
            num_tokens=ctypes.addressof(batch) + _Batch.num_tokens.offset,
            num_threads=batch.num_threads,
            element=self._torch_dtype.itemsize,
        )

    def _bind_cache(self, kv_cache: torch.Tensor) -> None:
        """Describes a cache [B, K, S, 2D] once, after checking it: a wrong layout would be wrong output, not a crash."""
        blocks, heads, block_size, joined = kv_cache.shape
        assert kv_cache.dtype is self._torch_dtype, f"cache is {kv_cache.dtype}, layer is {self._torch_dtype}"
        assert (heads, joined) == (self._num_kv_heads, 2 * self._head_size), f"cache shape {tuple(kv_cache.shape)}"
        assert kv_cache.stride(3) == 1, "the last dimension of the cache must be dense"
        cache = self._cache
        cache.data = kv_cache.data_ptr()
        cache.num_blocks, cache.block_size = blocks, block_size
        cache.block_stride, cache.head_stride, cache.token_stride = kv_cache.stride()[:3]
        self._bound = weakref.ref(kv_cache)


class CpuAttentionBackend:
    """See the module's docstring."""

    name: ClassVar[str] = "cpu"
    capture_support: ClassVar[CaptureSupport] = CaptureSupport.ALWAYS
    block_sizes: ClassVar[str] = "multiples of 16"
    capability: ClassVar[Capability] = Capability(dtypes=tuple(_DTYPE_CODES), attention_types=("decoder", "encoder_only"))

    @classmethod
    def unsupported_reason(cls, query: AttentionQuery) -> str | None:
        return cls.capability.unsupported_reason(query)

    @classmethod
    def make_builder(
        cls, *, max_num_seqs: int, max_num_tokens: int, max_blocks_per_seq: int, block_size: int, num_threads: int
    ) -> CpuMetadataBuilder:
        return CpuMetadataBuilder(max_num_seqs, max_num_tokens, max_blocks_per_seq, num_threads)

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
        isa: str = "auto",
    ) -> CpuAttentionImpl:
        """`isa` forces one instruction-set level, for tests. Raises ArtifactError without the native library."""
        if native is None:
            raise ArtifactError(f"attention backend 'cpu' needs the native library {NATIVE_SOURCE!r}; compile it first")
        if dtype not in _DTYPE_CODES:
            raise ConfigError(f"attention dtype {dtype!r} is not one of {', '.join(_DTYPE_CODES)}")
        return CpuAttentionImpl(
            native,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            scale=scale,
            window=window,
            softcap=softcap,
            dtype=dtype,
            sinks=sinks,
            isa=isa,
        )
