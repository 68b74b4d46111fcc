"""Settings of a compile. KEY fields may change generated code; RUNTIME fields only what is written where.

Only what a piece's code depends on enters its artifact key, through codegen/key.py; a KEY role here means that a
change may lead to other artifacts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from treadle.codegen.backends import BACKEND_OF_LEVEL, BACKENDS
from treadle.ir.config import KEY, RUNTIME, Resolved, option, resolve
from treadle.ir.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
IR_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
LEVELS = (0, 1, 2, 3)
MAX_TOKENS_OF_A_STEP = 1 << 20

_FUSIONS_OF_LEVEL = {0: False, 1: False, 2: True, 3: True}
"""At level 1 the code generator's own fusion is left to itself: no kernel of ours computes either side of these."""

LEVEL_DEFAULTS: Mapping[int, Mapping[str, Any]] = {
    level: {
        "backend": BACKEND_OF_LEVEL[level],
        "fuse_norm_quant": _FUSIONS_OF_LEVEL[level],
        "fuse_act_quant": _FUSIONS_OF_LEVEL[level],
        "fuse_all_reduce_norm": _FUSIONS_OF_LEVEL[level],
    }
    for level in LEVELS
}


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """What to compile and how. Token counts are per step; lengths are of one request, prompt and answer."""

    dtype: str = option("auto", role=KEY, choices=DTYPES, doc="element type of weights and activations; auto: the model's own")
    target: str = option("cpu", role=KEY, doc="what to compile for, for example cpu:x86-64-avx2; cpu: this machine")
    level: int = option(2, role=KEY, choices=LEVELS, doc="optimization level, a set of defaults for the other settings")
    backend: str = option(BACKEND_OF_LEVEL[2], role=KEY, doc=f"code generator for the pieces: {', '.join(BACKENDS)}")
    max_num_batched_tokens: int = option(2048, role=KEY, doc="most tokens in one step; the artifacts cover 1 up to this")
    exact_sizes: tuple[int, ...] = option((), role=KEY, doc="token counts that get an artifact of their own")
    tensor_parallel_size: int = option(1, role=KEY, doc="ranks the model is cut over; each gets weights of its own")
    fuse_norm_quant: bool = option(True, role=KEY, doc="join norms with the quantization of what they give")
    fuse_act_quant: bool = option(True, role=KEY, doc="join gated activations with the quantization of what they give")
    fuse_all_reduce_norm: bool = option(True, role=KEY, doc="join sums over ranks with the norm that follows")
    disabled_passes: tuple[str, ...] = option((), role=KEY, doc="passes to leave out")
    extra_passes: tuple[str, ...] = option((), role=KEY, doc="passes to add to the pipeline, each as name or name{opt=1}")
    quantization: str | None = option(None, role=KEY, doc="int8, int8_weight_only, fp8, fp8_weight_only or a plugin's scheme; none: as the checkpoint is")
    max_model_len: int | None = option(None, role=RUNTIME, doc="longest request in tokens; none: what the model states")
    compiler: str | None = option(None, role=RUNTIME, doc="C++ compiler to call; none: g++. Its version enters the key")
    store_weights: bool = option(True, role=RUNTIME, doc="write transformed weights into the bundle")
    jobs: int | None = option(None, role=RUNTIME, doc="compile this many pieces at once; none: one for each core")
    force: bool = option(False, role=RUNTIME, doc="replace a bundle that is already at the output path")
    sign: str | None = option(None, role=RUNTIME, doc="file with an ed25519 private key (PEM) to sign the manifest with")


def resolve_compile(asked: Mapping[str, Any]) -> Resolved[CompileConfig]:
    """The effective settings: what was asked for, then the level's defaults, then field defaults."""
    level = asked.get("level", 2)
    layer = LEVEL_DEFAULTS.get(level, {}) if isinstance(level, int) else {}
    resolved = resolve(CompileConfig, asked, (f"level {level}", layer))
    _check(resolved.config)
    return resolved


def _check(config: CompileConfig) -> None:
    if not 1 <= config.max_num_batched_tokens <= MAX_TOKENS_OF_A_STEP:
        raise ConfigError(
            f"max_num_batched_tokens={config.max_num_batched_tokens} must be from 1 to {MAX_TOKENS_OF_A_STEP}"
        )
    if config.max_model_len is not None and config.max_model_len < 1:
        raise ConfigError(f"max_model_len={config.max_model_len} must be at least 1")
    if config.tensor_parallel_size < 1:
        raise ConfigError(f"tensor_parallel_size={config.tensor_parallel_size} must be at least 1")
    if config.jobs is not None and config.jobs < 1:
        raise ConfigError(f"jobs={config.jobs} must be at least 1")
    for size in config.exact_sizes:
        if not isinstance(size, int) or not 1 <= size <= config.max_num_batched_tokens:
            raise ConfigError(
                f"exact_sizes has {size!r}; each must be a token count from 1 to max_num_batched_tokens="
                f"{config.max_num_batched_tokens}"
            )
