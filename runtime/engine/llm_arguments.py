"""Sorts the arguments of `LLM` into those of the engine and those of a compile, and knows vLLM's names for them."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from treadle.codegen.config import CompileConfig
from treadle.ir.errors import ConfigError
from treadle.runtime.config import EngineConfig

logger = logging.getLogger(__name__)

RENAMED = {
    "num_gpu_blocks_override": "num_blocks",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "optimization_level": "level",
    "distributed_executor_backend": "executor",
    "guided_decoding_backend": "structured_output_backend",
}
"""vLLM's name -> ours."""

WITHOUT_EFFECT = {
    "tokenizer": (None,),
    "tokenizer_mode": ("auto",),
    "load_format": ("auto",),
    "skip_tokenizer_init": (False,),
    "trust_remote_code": (False,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "enable_lora": (False,),
    "speculative_config": (None,),
    "kv_cache_dtype": ("auto",),
    "enforce_eager": (False,),
    "runner": ("auto", "generate"),
    "task": ("auto", "generate"),
    "disable_log_stats": (True, False, None),
    "swap_space": (0, None),
}
"""vLLM's arguments that are accepted with these values only: they ask for what happens anyway."""


NOTED = {"gpu_memory_utilization": "a CPU's KV pool is a share of free memory; set kv_cache_bytes or num_blocks to choose it"}
"""vLLM's arguments that say nothing here, and what to use instead; one that is given is noted in the log."""


def split_arguments(arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(fields of EngineConfig, arguments of `compile`); None means not asked for. Raises ConfigError."""
    engine_fields = {field.name for field in dataclasses.fields(EngineConfig)} - {"bundle"}
    compile_fields = {field.name for field in dataclasses.fields(CompileConfig)} | {"store", "output", "passes"}
    engine: dict[str, Any] = {}
    compiling: dict[str, Any] = {}
    for asked, value in arguments.items():
        name = RENAMED.get(asked, asked)
        if name in WITHOUT_EFFECT:
            _check_neutral(name, value)
            continue
        if name in NOTED:
            if value is not None:
                logger.warning("%s=%r has no effect: %s", name, value, NOTED[name])
            continue
        if name not in engine_fields | compile_fields and value is not None:
            known = sorted(engine_fields | compile_fields | set(RENAMED))
            raise ConfigError(f"LLM has no argument {asked!r}; it takes: {', '.join(known)}")
        if value is None:
            continue  # not asked for, under whatever name
        if name in engine_fields:
            engine[name] = value
        if name in compile_fields and not _serve_time_only(name):
            compiling[name] = value
    return engine, compiling


def _serve_time_only(name: str) -> bool:
    """A budget below the bundle's is chosen at start; compiling for it would only make another bundle."""
    return name == "max_num_batched_tokens"


def _check_neutral(name: str, value: Any) -> None:
    if value not in WITHOUT_EFFECT[name]:
        choices = ", ".join(map(repr, WITHOUT_EFFECT[name]))
        raise ConfigError(f"{name}={value!r} is not available in this version; leave it out or use {choices}")
