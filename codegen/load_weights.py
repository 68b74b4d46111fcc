"""Maps the stored weights of a bundle into memory: read-only safetensors, no copy, no transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from treadle.codegen.bundle import Bundle
from treadle.codegen.manifest import WeightEntry
from treadle.ir.errors import BundleError

if TYPE_CHECKING:
    import torch


def map_weights(bundle: Bundle, rank: int = 0) -> dict[str, torch.Tensor]:
    """Name -> tensor for everything the program's steps name in `params`. Tensors share mapped memory.

    Files are verified first. Raises BundleError if a tensor is not as listed.
    """
    weights = bundle.manifest.weights_of(rank)
    assert weights.stored, "load_weights chooses"
    bundle.verify(bundle.weight_files(rank))
    opened = {path: _open(bundle, path) for path in bundle.weight_files(rank)}
    return {entry.name: _tensor(bundle, entry, opened) for entry in weights.tensors}


def read_weights(bundle: Bundle, checkpoint: str | None = None, rank: int = 0) -> dict[str, torch.Tensor]:
    """The weights of a bundle that does not store them, made from `checkpoint` (default: where it was compiled from).

    Raises BundleError if the checkpoint is not the one the bundle was compiled from. Imports transformers.
    """
    from treadle.ir.graph import Param
    from treadle.ir.loader import load_params
    from treadle.ir.source import open_source
    from treadle.ir.types import tensor
    from treadle.ir.weights import parse_recipe

    where = checkpoint or bundle.manifest.weights.source
    if where is None:
        raise BundleError(f"{bundle.root.name} holds no weights and does not say where they are; name the model")
    source = open_source(where)
    if source.fingerprint != bundle.manifest.model.fingerprint:
        raise BundleError(f"{where} is not the model that {bundle.root.name} was compiled from; compile it again")
    params = [
        Param(entry.name, tensor(entry.dtype, entry.shape), recipe=parse_recipe(entry.recipe))
        for entry in bundle.manifest.weights_of(rank).tensors
    ]
    return dict(load_params(params, source))


def load_weights(bundle: Bundle, rank: int = 0) -> dict[str, torch.Tensor]:
    """A rank's weights, mapped if the bundle stores them, otherwise made from the checkpoint."""
    return map_weights(bundle, rank) if bundle.manifest.weights.stored else read_weights(bundle, rank=rank)


def _open(bundle: Bundle, path: str) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(bundle.file(path), framework="pt")
    except SafetensorError as error:
        raise BundleError(f"{bundle.root.name}: {path} is no safetensors file ({error})") from error


def _tensor(bundle: Bundle, entry: WeightEntry, opened: Mapping[str, Any]) -> torch.Tensor:
    from safetensors import SafetensorError

    from treadle.ir.dtypes import DTYPES

    assert entry.file is not None, f"{entry.name} is said to be stored, without a file"
    try:
        value = opened[entry.file].get_tensor(entry.stored_as or entry.name)
    except SafetensorError as error:
        raise BundleError(f"{bundle.root.name}: {entry.file} has no tensor {entry.stored_as or entry.name}") from error
    if list(value.shape) != entry.shape or value.dtype != DTYPES[entry.dtype].torch:
        raise BundleError(f"{bundle.root.name}: tensor {entry.name} is not the {entry.dtype}{entry.shape} it is listed as")
    return value
