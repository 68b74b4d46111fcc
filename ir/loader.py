"""Runs weight recipes over a model source, one parameter at a time, and writes results as mappable safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from treadle.ir.errors import ModelError
from treadle.ir.graph import Param
from treadle.ir.source import ModelSource
from treadle.ir.types import TensorType
from treadle.ir.weights import Recipe

_ALIGN = 64  # bytes; a mapped tensor starts where vector loads like it
_DTYPE_NAMES = {
    "f32": "F32",
    "bf16": "BF16",
    "f16": "F16",
    "f64": "F64",
    "i64": "I64",
    "i32": "I32",
    "i16": "I16",
}
_DTYPE_NAMES |= {"i8": "I8", "u8": "U8", "bool": "BOOL", "f8e4m3": "F8_E4M3", "f8e5m2": "F8_E5M2"}


def load_params(params: Iterable[Param], source: ModelSource) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) for each parameter, contiguous and in the parameter's dtype.

    Holds one result at a time; what the caller keeps is the caller's memory. A tensor may share the checkpoint's
    mapped memory: treat it as read-only. Raises ModelError where a recipe gives another shape than the graph wants.
    """
    for param in params:
        yield param.name, load_param(param, source)


def load_param(param: Param, source: ModelSource) -> torch.Tensor:
    """The tensor of one parameter. Raises ModelError naming both shapes if they differ."""
    kind = param.type
    assert isinstance(kind, TensorType), f"parameter {param.name} is not a tensor"
    try:
        value = param.recipe.evaluate(source.read)
    except RuntimeError as error:
        raise ModelError(
            f"{source.location}: {param.name} = {param.recipe} cannot be computed: {error}"
        ) from error
    if tuple(value.shape) != kind.shape:
        raise ModelError(
            f"{source.location}: parameter {param.name} must be {kind}, but {param.recipe} gives "
            f"[{','.join(map(str, value.shape))}]; the checkpoint does not fit its config.json"
        )
    return value.to(kind.dtype.torch).contiguous()


def write_weights(
    params: Iterable[Param], source: ModelSource, folder: Path, *, shard_bytes: int = 2 << 30
) -> dict[str, str]:
    """Writes every parameter as `weights-<n>.safetensors` in `folder`; returns parameter name -> file name.

    Data is aligned to 64 bytes, so that a reader can map it. Parameters with equal recipes and types are written
    once, under the first one's name; the map `aliases` in each file's metadata says which others it stands for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}
    for number, group in enumerate(_shards(_unique(params), shard_bytes)):
        file = folder / f"weights-{number:05d}.safetensors"
        _write_file(file, group, source)
        index.update({name: file.name for _, names in group for name in names})
    return index


Group = list[tuple[Param, list[str]]]


def _unique(params: Iterable[Param]) -> Group:
    """Parameters with distinct contents, each with all names that stand for it."""
    found: dict[tuple[Recipe, str], tuple[Param, list[str]]] = {}
    for param in params:
        found.setdefault((param.recipe, str(param.type)), (param, []))[1].append(param.name)
    return list(found.values())


def _shards(params: Group, limit: int) -> Iterator[Group]:
    shard: Group = []
    total = 0
    for param, names in params:
        size = _num_bytes(param)
        if shard and total + size > limit:
            yield shard
            shard, total = [], 0
        shard.append((param, names))
        total += size
    if shard:
        yield shard


def _num_bytes(param: Param) -> int:
    assert isinstance(param.type, TensorType)
    count = 1
    for size in param.type.at(1):
        count *= size
    return count * param.type.dtype.torch.itemsize


def _write_file(file: Path, group: Group, source: ModelSource) -> None:
    """One safetensors file, written front to back: the sizes are known before any weight is read."""
    entries: dict[str, object] = {
        "__metadata__": {"aliases": json.dumps({p.name: names[1:] for p, names in group if names[1:]})}
    }
    offset = 0
    padded = []
    for param, _ in group:
        assert isinstance(param.type, TensorType)
        size = _num_bytes(param)
        shape = list(param.type.at(1))
        entries[param.name] = {
            "dtype": _DTYPE_NAMES[str(param.type.dtype)],
            "shape": shape,
            "data_offsets": [offset, offset + size],
        }
        filler = -size % _ALIGN
        if filler:
            entries[f"__pad__.{len(padded)}"] = {
                "dtype": "U8",
                "shape": [filler],
                "data_offsets": [offset + size, offset + size + filler],
            }
        padded.append(filler)
        offset += size + filler
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % _ALIGN)
    with file.open("wb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        for (param, _), filler in zip(group, padded, strict=True):
            value = load_param(param, source)
            out.write(value.reshape(-1).view(torch.uint8).numpy().data)
            out.write(b"\0" * filler)


__all__ = ["load_param", "load_params", "write_weights"]
