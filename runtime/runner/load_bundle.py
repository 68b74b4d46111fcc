"""From a bundle to a loaded model: pieces, native libraries and mapped weights. Compiles nothing."""

from __future__ import annotations

from collections.abc import Mapping

from treadle.codegen.bundle import Bundle
from treadle.codegen.load_weights import load_weights
from treadle.codegen.loader import load_natives, load_pieces
from treadle.codegen.manifest import Manifest
from treadle.ir.errors import ConfigError
from treadle.ir.group import Group
from treadle.runtime.config import EngineConfig
from treadle.runtime.dispatch import BatchDescriptor, GraphKeys, GraphMode
from treadle.runtime.executor.early_open import take_opened
from treadle.runtime.runner.model import LoadedModel, ModelSpec, Piece
from treadle.runtime.start_phases import phase_ended


def load_bundle(config: EngineConfig, group: Group | None = None) -> LoadedModel:
    """Opens the configuration's bundle and loads all of it, for a bundle cut over ranks those of `group`'s rank.

    Raises BundleError or ArtifactError naming the file, ConfigError if bundle and group are of different sizes.
    """
    rank, world = (group.rank, group.world) if group is not None else (0, 1)
    bundle, weights_verified = take_opened(config, rank)  # hashing overlaps with loading pieces
    if bundle.manifest.num_ranks != world:
        raise ConfigError(
            f"{bundle.root.name} is cut over {bundle.manifest.num_ranks} ranks, and {world} runs here; "
            "leave executor out, then one process is started for each"
        )
    native = load_natives(bundle)
    phase_ended("load kernels")
    pieces: Mapping[str, Piece] = load_pieces(bundle)
    phase_ended("load pieces")
    weights_verified.result()
    phase_ended("verify weights")
    weights = load_weights(bundle, rank)
    phase_ended("load weights")
    return LoadedModel(_spec(bundle), bundle.manifest.program, pieces, weights, native, graph_keys(bundle.manifest), group)


def _spec(bundle: Bundle) -> ModelSpec:
    manifest = bundle.manifest
    return ModelSpec(
        name=manifest.model.name,
        vocab_size=manifest.model.vocab_size,
        max_model_len=manifest.limits.max_model_len,
        max_num_batched_tokens=manifest.limits.max_num_batched_tokens,
        dtype=manifest.model.dtype,
        architecture=manifest.model.architecture,
    )


def graph_keys(manifest: Manifest) -> GraphKeys:
    """A piecewise key for each token count for which every piece has an artifact of its own."""
    exact = [{r.start for r in piece.ranges if r.start == r.end} for piece in manifest.pieces if piece.tokens_from]
    sizes = set.intersection(*exact) if exact else set()
    return frozenset((GraphMode.PIECEWISE, BatchDescriptor(num_tokens=size)) for size in sizes)
