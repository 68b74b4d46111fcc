"""What a front end knows of the engine it talks to. Crosses the process border as plain data. Imports no torch."""

from __future__ import annotations

from typing import Any

import msgspec


class ModelInfo(msgspec.Struct, kw_only=True, frozen=True):
    """The served model and the effective sizes of its engine. Lengths in tokens, `kv_cache_bytes` in bytes."""

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    dtype: str
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    kv_cache_bytes: int
    kv_cache_reason: str
    attention_backends: list[str]
    capture_support: str
    num_threads: int
    executor: str
    tasks: list[str]
    enable_prefix_caching: bool
    notes: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for `EngineReady.info`."""
        return msgspec.to_builtins(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelInfo:
        """The reverse of `as_dict`."""
        return msgspec.convert(data, cls)
