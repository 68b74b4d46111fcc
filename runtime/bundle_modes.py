"""What the dispatcher of an engine on a bundle would answer, worked out from the manifest: no piece or weight is loaded."""

from __future__ import annotations

from treadle.codegen.manifest import Manifest
from treadle.runtime.config import EngineConfig
from treadle.runtime.dispatch import Capabilities
from treadle.runtime.dispatch_table import Row, dispatch_table
from treadle.runtime.graph_setting import resolve_capabilities
from treadle.runtime.runner.attention_layers import AttentionLayers
from treadle.runtime.runner.launch_plan import obstacle
from treadle.runtime.runner.load_bundle import graph_keys
from treadle.runtime.runner.model import attention_shape

NATIVE_FORMATS = ("aoti",)
"""Artifact formats that a launch plan can call."""


def bundle_capabilities(manifest: Manifest, config: EngineConfig) -> Capabilities:
    """The modes that steps would run in. Raises ConfigError if no attention backend takes the model."""
    native = [entry.name for entry in manifest.native]
    return resolve_capabilities(
        config.graph_mode,
        bundle_attention(manifest, config).capture_support,
        obstacle=obstacle(manifest.program, native) or _python_piece(manifest),
        any_shape=config.max_num_batched_tokens or manifest.limits.max_num_batched_tokens,
    )


def bundle_attention(manifest: Manifest, config: EngineConfig) -> AttentionLayers:
    """The attention backends that layers would get. Raises ConfigError if none takes the model."""
    steps = [step for step in manifest.program.steps if step.op == "attention"]
    return AttentionLayers(
        [attention_shape(step) for step in steps],
        dtype=manifest.model.dtype,
        native={entry.name: None for entry in manifest.native},
        backend=config.attention_backend,
        block_size=config.block_size,
    )


def bundle_dispatch(manifest: Manifest, config: EngineConfig) -> list[Row]:
    """The whole table for the bundle's limits and the engine's number of requests."""
    return dispatch_table(
        bundle_capabilities(manifest, config),
        graph_keys(manifest),
        max_tokens=config.max_num_batched_tokens or manifest.limits.max_num_batched_tokens,
        max_reqs=config.max_num_seqs,
    )


def _python_piece(manifest: Manifest) -> str:
    for piece in manifest.pieces:
        if any(entry.format not in NATIVE_FORMATS for entry in piece.ranges):
            return f"piece {piece.name} is called through Python"
    return ""
