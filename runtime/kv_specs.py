"""KV-cache specs: the immutable floor plan of one layer's cache memory. Imports no torch.

A spec says how many bytes one block of one layer takes and what they hold. Where the bytes lie is the business of
`runtime.kv_layout`; who hands out blocks is the business of `runtime.scheduler`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeVar

from treadle.ir.errors import ConfigError

ELEMENT_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "f8e4m3": 1, "f8e5m2": 1, "i8": 1}
"""Bytes of one element, by the name of its type, for every type a cache may hold."""

QUANTIZED_DTYPES = {"none": None, "fp8": "f8e4m3", "fp8_e5m2": "f8e5m2", "int8": "i8"}
"""Quantisation mode of the cache -> type of the stored elements; None keeps the layer's own type."""

SSM_CACHE_MODES = ("none", "all", "align")
ALIGNED_SSM_STATES = 2  # the state being written and the last one that ended on a block border


def choose(what: str, value: str, choices: Sequence[str]) -> None:
    """Raises ConfigError that lists the choices unless `value` is one of them."""
    if value not in choices:
        raise ConfigError(f"unknown {what} {value!r}; choose one of: {', '.join(choices)}")


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec(ABC):
    """Base of the family; equal by value, hashable. `block_size` is tokens per block."""

    block_size: int

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"block_size must be at least 1, not {self.block_size}")
        states = self.block_size / self.exact_tokens_per_state
        if states.denominator != 1:
            raise ConfigError(
                f"a block of {self.block_size} tokens at {self.exact_tokens_per_state} tokens per state holds {states} "
                f"states, not a whole number; choose a block size that is a multiple of the tokens per state"
            )

    @property
    @abstractmethod
    def num_heads(self) -> int:
        """Heads that each keep their own states."""

    @property
    @abstractmethod
    def exact_tokens_per_state(self) -> Fraction:
        """Above 1: several tokens compressed into one state; below 1: one token gives several states."""

    @property
    @abstractmethod
    def state_content_size_bytes(self) -> int:
        """Bytes of one state of one head."""

    @property
    def num_states_per_block(self) -> int:
        return int(self.block_size / self.exact_tokens_per_state)

    @property
    def dense_page_size_bytes(self) -> int:
        """Bytes of one block of one layer without padding."""
        return self.num_heads * self.num_states_per_block * self.state_content_size_bytes

    @property
    def page_size_bytes(self) -> int:
        """Bytes that one block of one layer takes, padding included."""
        return self.dense_page_size_bytes

    def max_memory_bytes(self, max_model_len: int) -> int:
        """Most bytes that one request of `max_model_len` tokens takes in one layer."""
        return math.ceil(max_model_len / self.block_size) * self.page_size_bytes


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """A layer that keeps states of `head_size` elements for each of its KV heads."""

    num_kv_heads: int
    head_size: int
    dtype: str
    kv_quant_mode: str = "none"
    tokens_per_state: int | Fraction = 1

    def __post_init__(self) -> None:
        choose("KV-cache dtype", self.dtype, list(ELEMENT_BYTES))
        choose("KV quantisation mode", self.kv_quant_mode, list(QUANTIZED_DTYPES))
        if not isinstance(self.tokens_per_state, int | Fraction) or self.tokens_per_state <= 0:
            raise ConfigError(f"tokens_per_state must be a positive integer or Fraction, not {self.tokens_per_state!r}")
        super().__post_init__()

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads

    @property
    def exact_tokens_per_state(self) -> Fraction:
        return Fraction(self.tokens_per_state)

    @property
    def cache_dtype(self) -> str:
        """Name of the element type that the cache stores."""
        return QUANTIZED_DTYPES[self.kv_quant_mode] or self.dtype

    @property
    def value_head_size(self) -> int:
        """Elements of V in a state; K comes first."""
        return self.head_size

    @property
    def state_content_size_bytes(self) -> int:
        return (self.head_size + self.value_head_size) * ELEMENT_BYTES[self.cache_dtype]


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Blocks for all tokens. With `sliding_window` the layer is allocated in full but computed with its window."""

    head_size_v: int | None = None
    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    @property
    def value_head_size(self) -> int:
        return self.head_size if self.head_size_v is None else self.head_size_v


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """Blocks for the window only: a token sees `sliding_window` tokens, itself included."""

    sliding_window: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sliding_window < 1:
            raise ConfigError(f"sliding_window must be at least 1, not {self.sliding_window}")

    def max_memory_bytes(self, max_model_len: int) -> int:
        """As the base, but never more than the window, and one block more as it seldom starts on a block border."""
        window_blocks = math.ceil((self.sliding_window - 1) / self.block_size) + 1
        return min(super().max_memory_bytes(max_model_len), window_blocks * self.page_size_bytes)

    def as_full_attention(self) -> FullAttentionSpec:
        """Returns the spec to allocate by when all layers share one allocator."""
        return FullAttentionSpec(
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=self.dtype,
            kv_quant_mode=self.kv_quant_mode,
            tokens_per_state=self.tokens_per_state,
            sliding_window=self.sliding_window,
        )


@dataclass(frozen=True, kw_only=True)
class MLASpec(FullAttentionSpec):
    """One latent vector a token and no separate V; kernels may ask for an aligned page."""

    head_size_v: int | None = 0
    alignment: int | None = None
    non_causal_multi_token_decode: bool = False

    @property
    def page_size_bytes(self) -> int:
        unit = self.alignment or 1
        return math.ceil(self.dense_page_size_bytes / unit) * unit


@dataclass(frozen=True, kw_only=True)
class SSMSpec(KVCacheSpec):
    """State tensors of fixed size, one set a block, whatever the number of tokens.

    `cache_mode`: `none` keeps one state (and one a draft token), `all` one a block, `align` the two that matter.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    cache_mode: str = "none"
    num_draft_tokens: int = 0

    def __post_init__(self) -> None:
        choose("SSM cache mode", self.cache_mode, SSM_CACHE_MODES)
        for dtype in self.dtypes:
            choose("KV-cache dtype", dtype, list(ELEMENT_BYTES))
        if len(self.shapes) != len(self.dtypes):
            raise ConfigError(f"an SSM spec has {len(self.shapes)} shapes but {len(self.dtypes)} dtypes; give one dtype a shape")
        super().__post_init__()

    @property
    def num_heads(self) -> int:
        return 1

    @property
    def exact_tokens_per_state(self) -> Fraction:
        return Fraction(self.block_size)

    @property
    def state_content_size_bytes(self) -> int:
        return sum(math.prod(s) * ELEMENT_BYTES[d] for s, d in zip(self.shapes, self.dtypes, strict=True))

    def max_memory_bytes(self, max_model_len: int) -> int:
        num_states = {
            "none": 1 + self.num_draft_tokens,
            "all": math.ceil(max_model_len / self.block_size),
            "align": ALIGNED_SSM_STATES + self.num_draft_tokens,
        }
        return num_states[self.cache_mode] * self.page_size_bytes


S = TypeVar("S", bound=KVCacheSpec)


def merge_specs(specs: Sequence[S]) -> S:
    """Returns the one spec of a group. Raises ConfigError unless the members are equal.

    Equality covers every field, so no flag of a member is lost; members that differ in one belong in two groups.
    """
    first = specs[0]
    for spec in specs[1:]:
        if spec != first:
            raise ConfigError(f"layers of one KV-cache group need equal specs, not {first} and {spec}")
    return first


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers that share one block table. `layers` are layer indices in model order."""

    layers: tuple[int, ...]
    spec: KVCacheSpec


def group_layers(specs: Mapping[int, KVCacheSpec], hybrid: bool = True) -> tuple[KVCacheGroup, ...]:
    """Splits the layers (index -> spec) into groups of equal spec and about equal size.

    All groups draw from one pool, and a block has room for one page in each layer of the largest group. So a kind
    that has many more layers than the rarest kind is cut into several groups:

        5 window : 1 full, 12 layers   ->   full [5 11]   window [0 1] [2 3] [4 6] [7 8] [9 10]

    Without `hybrid`, sliding-window layers are allocated as full attention (and still computed with their window).
    """
    if not hybrid:
        specs = {i: s.as_full_attention() if isinstance(s, SlidingWindowSpec) else s for i, s in specs.items()}
        specs = _allocate_alike(specs)
    kinds: dict[KVCacheSpec, list[int]] = {}
    for layer in sorted(specs):
        kinds.setdefault(specs[layer], []).append(layer)
    size = min((len(layers) for layers in kinds.values()), default=0)
    if size and max(len(layers) for layers in kinds.values()) < 1.5 * size:
        size = max(len(layers) for layers in kinds.values())  # 13 and 12 layers: padding one slot beats splitting
    return tuple(
        KVCacheGroup(tuple(layers[i : i + size]), merge_specs([specs[n] for n in layers[i : i + size]]))
        for spec, layers in kinds.items()
        for i in range(0, len(layers), size)
    )


def _allocate_alike(specs: Mapping[int, KVCacheSpec]) -> dict[int, KVCacheSpec]:
    """Full-attention layers that differ only in how much they look at need the same blocks: one group."""
    return {
        i: replace(s, sliding_window=None, attention_chunk_size=None) if isinstance(s, FullAttentionSpec) else s
        for i, s in specs.items()
    }
