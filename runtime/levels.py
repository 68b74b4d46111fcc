"""What an optimization level means for an engine: defaults that anything set explicitly overrides. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.codegen.bundle import Bundle, open_bundle
from treadle.codegen.manifest import Manifest
from treadle.ir.config import Resolved, resolve
from treadle.ir.errors import ConfigError
from treadle.runtime.config import EngineConfig
from treadle.runtime.dispatch import AUTO, GraphMode

ENGINE_DEFAULTS: Mapping[int, Mapping[str, Any]] = {
    0: {"graph_mode": "none"},
    1: {"graph_mode": "piecewise"},
    2: {"graph_mode": AUTO},
    3: {"graph_mode": AUTO},
}


def resolve_engine(asked: Mapping[str, Any]) -> Resolved[EngineConfig]:
    """The settings of an engine on `asked["bundle"]`: what was asked for, then the level's defaults, then field defaults.

    The level is the bundle's unless one is asked for. Raises ConfigError for a setting, BundleError for the bundle.
    """
    level = asked.get("level")
    bundled = level is None
    if bundled:
        level = bundle_level(_open(asked).manifest)
    if level not in ENGINE_DEFAULTS:
        raise ConfigError(f"EngineConfig.level={level!r} is not one of: {', '.join(map(str, ENGINE_DEFAULTS))}")
    layers = [("bundle", {"level": level})] if bundled else []
    return resolve(EngineConfig, asked, *layers, (f"level {level}", ENGINE_DEFAULTS[level]))


def bundle_level(manifest: Manifest) -> int:
    """The level that a bundle was compiled at."""
    return int(manifest.options.get("level", 2))


def _open(asked: Mapping[str, Any]) -> Bundle:
    return open_bundle(asked["bundle"], verify_key=asked.get("verify_key"), for_loading=False)


def settle_engine(resolved: Resolved[EngineConfig], manifest: Manifest) -> Resolved[EngineConfig]:
    """Fills in what the bundle decides and lowers what it cannot do, each with the reason; loads no piece and no weight.

    What depends on the memory of the machine stays None: it is decided at start.
    """
    from treadle.runtime.bundle_modes import bundle_attention
    from treadle.runtime.executor.selection import chosen_executor

    config, limits = resolved.config, manifest.limits
    for name in ("max_num_batched_tokens", "max_model_len"):
        if getattr(config, name) is None:
            resolved = resolved.override("bundle", "the limit it was compiled with", **{name: getattr(limits, name)})
    if config.executor == "auto":
        reason = f"the bundle has {manifest.num_ranks} rank{'s' if manifest.num_ranks > 1 else ''}"
        resolved = resolved.override("bundle", reason, executor=chosen_executor(config))
    attention = bundle_attention(manifest, config)
    if config.attention_backend == AUTO and attention.backend_names:
        passed = "; ".join(f"not {name}: {reason}" for name, reason in attention.passed_over.items())
        resolved = resolved.override("bundle", passed or "the first that fits", attention_backend="+".join(attention.backend_names))
    modes, reason = _modes(manifest, config)
    if reason or config.graph_mode == AUTO:
        resolved = resolved.override("bundle", reason or "the most that the model can do", graph_mode=modes)
    return resolved


def _modes(manifest: Manifest, config: EngineConfig) -> tuple[str, str]:
    """The modes of steps in words, and what lowered them, if anything did."""
    from treadle.runtime.bundle_modes import bundle_capabilities
    from treadle.runtime.runner.load_bundle import graph_keys

    able = bundle_capabilities(manifest, config)
    decode, mixed = able.decode.name.lower(), able.mixed.name.lower()
    words = decode if decode == mixed else f"{decode} for decode steps, {mixed} for others"
    reasons = [able.reason] if able.reason else []
    if GraphMode.PIECEWISE in (able.decode, able.mixed) and not graph_keys(manifest):
        reasons.append("no token count has artifacts of its own, so piecewise steps run unpadded, as in none")
    return words, "; ".join(reasons)
