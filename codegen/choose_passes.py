"""From settings to the pipeline: which passes a compile adds and leaves out, checked before anything else happens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treadle.codegen import backends
from treadle.codegen.config import CompileConfig, resolve_compile
from treadle.codegen.manifest import Manifest
from treadle.ir.config import Resolved
from treadle.ir.errors import ConfigError

if TYPE_CHECKING:
    from treadle.passes.pipeline import PipelineOptions


def with_passes(settings: Mapping[str, Any], passes: str | Sequence[str]) -> dict[str, Any]:
    """The settings with `passes` (one text or several) as `extra_passes`. Raises ConfigError if both are given."""
    if not passes:
        return dict(settings)
    if settings.get("extra_passes"):
        raise ConfigError("passes and extra_passes mean the same; give one of them")
    return {**settings, "extra_passes": (passes,) if isinstance(passes, str) else tuple(passes)}


def settle_passes(resolved: Resolved[CompileConfig]) -> Resolved[CompileConfig]:
    """Writes the extra passes in their one spelling, so that equal compiles record equal settings.

    Raises ConfigError for passes that are unknown or cannot be ordered, PluginError for a plugin that has the name of
    a pass, op or backend of treadle's own.
    """
    from treadle.ir.ops.registry import plugin_ops
    from treadle.passes.pipeline import PipelineOptions, extra_passes, plan_pipeline
    from treadle.passes.registry import PASSES

    for names in (PASSES.names, backends.BACKENDS.names, plugin_ops):
        names()  # looks up what plugins offer, and so finds a clash
    plan_pipeline(pipeline_options(resolved.config))
    asked = PipelineOptions(extra_passes=resolved.config.extra_passes)  # without those of a quantization scheme
    specs = tuple(step.spec() for step in extra_passes(asked))
    return dataclasses.replace(resolved, config=dataclasses.replace(resolved.config, extra_passes=specs))


def recorded_config(manifest: Manifest, changes: Mapping[str, Any] | None = None) -> CompileConfig:
    """The settings that a bundle was compiled with, and `changes` to them. Raises ConfigError for what is no setting now."""
    recorded = {name: tuple(value) if isinstance(value, list) else value for name, value in manifest.options.items()}
    recorded["target"] = manifest.target.name
    changes = changes or {}
    if "level" in changes:
        of_level = {row.field for row in manifest.settings if row.source.startswith("level ")}
        recorded = {name: value for name, value in recorded.items() if name not in of_level}
    resolved = resolve_compile({**recorded, **changes})
    return (settle_passes(resolved) if {"extra_passes", "disabled_passes"} & set(changes) else resolved).config


FUSIONS: Mapping[str, tuple[str, ...]] = {
    "fuse_norm_quant": ("fuse_rms_norm_quant", "fuse_add_rms_norm_quant", "fuse_all_reduce_rms_norm_quant"),
    "fuse_act_quant": ("fuse_gated_act_quant",),
    "fuse_all_reduce_norm": ("fuse_all_reduce_rms_norm", "fuse_all_reduce_rms_norm_quant"),
}
"""Setting -> the passes of the pipeline and of quantization schemes that it turns off."""


def pipeline_options(config: CompileConfig) -> PipelineOptions:
    """What the pipeline needs to know of the settings."""
    from treadle.passes.pipeline import PipelineOptions, known_passes
    from treadle.passes.quant.schemes import scheme_passes

    off = {name for setting, names in FUSIONS.items() if not getattr(config, setting) for name in names}
    scheme = [text for text in scheme_passes(config.quantization) if text not in off]
    return PipelineOptions(
        level=config.level,
        without=(*config.disabled_passes, *(name for name in known_passes() if name in off)),
        extra_passes=(*scheme, *config.extra_passes),
        tensor_parallel=config.tensor_parallel_size,
        pack=getattr(backends.BACKENDS.get(config.backend), "calls_kernels", False),
    )
