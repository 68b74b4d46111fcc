"""The engine's configuration. Every field is runtime-only: none changes generated code. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from treadle.ir.config import RUNTIME, option
from treadle.ir.errors import ConfigError
from treadle.runtime.dispatch import AUTO, GRAPH_SETTINGS


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine; `None` means decided at start, from the bundle or from the machine."""

    bundle: str = option(role=RUNTIME, doc="folder of the bundle that is served")
    level: int | None = option(
        None, role=RUNTIME, doc="optimization level of the engine's defaults; none: the one the bundle was compiled at"
    )
    executor: Any = option(
        "auto", role=RUNTIME, doc="'auto': as many processes as the bundle has ranks; or a name, a class, 'module:Class'"
    )
    max_num_seqs: int = option(256, role=RUNTIME, doc="slots of the model runner: requests in one step")
    max_num_active_seqs: int | None = option(
        None, role=RUNTIME, doc="requests that may run at once; default: max_num_seqs"
    )
    max_num_batched_tokens: int | None = option(
        None, role=RUNTIME, doc="tokens of one step; default: the bundle's limit"
    )
    max_model_len: int | None = option(
        None, role=RUNTIME, doc="tokens of one request, prompt and answer; default: the bundle's limit"
    )
    block_size: int = option(16, role=RUNTIME, doc="tokens in one KV block")
    num_blocks: int | None = option(None, role=RUNTIME, doc="KV blocks of the pool; wins over kv_cache_bytes")
    kv_cache_bytes: int | None = option(None, role=RUNTIME, doc="bytes of KV cache; default: a share of free memory")
    enable_prefix_caching: bool = option(True, role=RUNTIME, doc="reuse KV blocks of equal prefixes")
    prefix_hash: str = option(
        "sha256", role=RUNTIME, doc="hash of the prefix cache", choices=("sha256", "xxhash")
    )
    scheduling_policy: str = option(
        "fcfs", role=RUNTIME, doc="order of waiting requests and victims", choices=("fcfs", "priority")
    )
    enable_chunked_prefill: bool = option(True, role=RUNTIME, doc="let a prompt be computed over several steps")
    long_prefill_token_threshold: int = option(
        0, role=RUNTIME, doc="most tokens of one prompt in a step while others are eligible; 0 is off"
    )
    adaptive_prefill_threshold: bool = option(
        False, role=RUNTIME, doc="raise that threshold to a request's fair share of the step"
    )
    watermark: float = option(0.01, role=RUNTIME, doc="share of blocks that stays free when a request is admitted")
    full_sequence_must_fit: bool = option(
        True, role=RUNTIME, doc="admit a request only when its whole prompt fits into the pool"
    )
    disable_hybrid_allocator: bool = option(
        False, role=RUNTIME, doc="allocate sliding-window layers like full attention"
    )
    attention_backend: str = option("auto", role=RUNTIME, doc="an attention backend, or 'auto' for the first that fits")
    graph_mode: str = option(
        AUTO,
        role=RUNTIME,
        doc="how much of a step runs without Python; 'auto': the most that the model can do",
        choices=(AUTO, *GRAPH_SETTINGS),
    )
    num_threads: int | None = option(None, role=RUNTIME, doc="compute threads; default: the processors allowed to us")
    seed: int = option(0, role=RUNTIME, doc="seed of requests that bring none")
    generation_config: str = option(
        "auto",
        role=RUNTIME,
        doc="'auto': sampling defaults of the model; 'vllm': neutral ones",
        choices=("auto", "vllm"),
    )
    logprobs_mode: str = option(
        "raw_logprobs",
        role=RUNTIME,
        doc="what logprobs show",
        choices=("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"),
    )
    structured_output_backend: str = option(
        "auto", role=RUNTIME, doc="a grammar backend, or 'auto' for the first that can hold a constraint exactly"
    )
    structured_output_timeout: float = option(10.0, role=RUNTIME, doc="seconds that compiling one grammar may take")
    structured_output_max_bytes: int = option(1 << 20, role=RUNTIME, doc="largest source of a grammar")
    structured_output_max_depth: int = option(100, role=RUNTIME, doc="deepest nesting of a JSON schema's text")
    structured_output_max_whitespace: int = option(
        16, role=RUNTIME, doc="most characters of whitespace between the parts of constrained JSON; 0: compact"
    )
    structured_output_cache_bytes: int = option(256 << 20, role=RUNTIME, doc="memory for compiled grammars")
    structured_output_in_reasoning: bool = option(
        False, role=RUNTIME, doc="constrain the reasoning of a model too, not only what follows it"
    )
    reasoning_parser: str = option(
        "auto", role=RUNTIME, doc="how the model marks its reasoning: a name, 'none', or 'auto' for what its chat template shows"
    )
    served_model_name: str | None = option(None, role=RUNTIME, doc="the model's name; default: the bundle's")
    verify_key: str | None = option(None, role=RUNTIME, doc="file of the public key that must have signed the bundle")

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "block_size"):
            _at_least(1, name, getattr(self, name))
        for name in ("max_num_active_seqs", "max_num_batched_tokens", "num_threads", "kv_cache_bytes"):
            _at_least(1, name, getattr(self, name))
        _at_least(2, "max_model_len", self.max_model_len)
        _at_least(2, "num_blocks", self.num_blocks)  # block 0 is the null block
        for name in ("structured_output_max_bytes", "structured_output_max_depth"):
            _at_least(1, name, getattr(self, name))
        for name in ("structured_output_max_whitespace", "structured_output_cache_bytes"):
            _at_least(0, name, getattr(self, name))
        if not self.structured_output_timeout > 0:
            raise ConfigError(f"EngineConfig.structured_output_timeout={self.structured_output_timeout} should be above 0")
        _at_least(0, "long_prefill_token_threshold", self.long_prefill_token_threshold)
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"EngineConfig.watermark={self.watermark} should be a share from 0 to below 1")


def _at_least(low: int, name: str, value: int | None) -> None:
    if value is not None and value < low:
        raise ConfigError(f"EngineConfig.{name}={value} should be at least {low}")
