"""Opens a bundle and starts hashing its weights before torch is imported, so that the two overlap. Imports no torch."""

from __future__ import annotations

from concurrent.futures import Future

from treadle.codegen.bundle import Bundle, open_bundle
from treadle.runtime.config import EngineConfig
from treadle.runtime.start_phases import phase_ended

_opened: dict[tuple[str, str | None], tuple[Bundle, Future[None]]] = {}


def open_early(config: EngineConfig) -> Bundle:
    """Begins, and returns the bundle; whoever calls `take_opened` gets both. Raises BundleError for what the manifest shows."""
    opened = _opened[config.bundle, config.verify_key] = _open(config)
    phase_ended("open bundle")
    return opened[0]


def take_opened(config: EngineConfig, rank: int = 0) -> tuple[Bundle, Future[None]]:
    """The configuration's bundle and the verification of a rank's weights, begun early or now. Given out once."""
    return _opened.pop((config.bundle, config.verify_key), None) or _open(config, rank)


def _open(config: EngineConfig, rank: int = 0) -> tuple[Bundle, Future[None]]:
    bundle = open_bundle(config.bundle, verify_key=config.verify_key)
    return bundle, bundle.verify_in_background(bundle.weight_files(rank))


def forget_opened(config: EngineConfig) -> None:
    """Drops what nobody took, as after a start that failed: the files may be others by the next one."""
    _opened.pop((config.bundle, config.verify_key), None)
