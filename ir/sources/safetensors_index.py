"""Which safetensors file holds which tensor of a folder. The index file is the authority when there is one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from treadle.ir.errors import ModelError
from treadle.ir.types import DTYPES, TensorType, tensor

_DTYPES = {
    "F64": "f64",
    "F32": "f32",
    "BF16": "bf16",
    "F16": "f16",
    "I64": "i64",
    "I32": "i32",
    "I16": "i16",
    "I8": "i8",
    "U8": "u8",
    "BOOL": "bool",
    "F8_E4M3": "f8e4m3",
    "F8_E5M2": "f8e5m2",
}


@dataclass(frozen=True)
class Located:
    """A tensor's file and type."""

    file: Path
    type: TensorType


def locate_tensors(folder: Path) -> dict[str, Located]:
    """Tensor name -> file and type. A shard's tensors that the index gives to another file are ignored.

    Raises ModelError for a listed file or tensor that is missing, a damaged header, or no safetensors at all.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return _from_index(folder, index)
    single = folder / "model.safetensors"
    if single.is_file():
        return {name: Located(single, kind) for name, kind in read_header(single).items()}
    raise ModelError(
        f"{folder}: no model.safetensors and no model.safetensors.index.json. Pickled weights (pytorch_model.bin) "
        "are never read; save the model with transformers' save_pretrained to get safetensors"
    )


def _from_index(folder: Path, index: Path) -> dict[str, Located]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ModelError(f"{index}: not a safetensors index with a weight_map ({error!r})") from error
    headers: dict[str, dict[str, TensorType]] = {}
    located = {}
    for name, file in weight_map.items():
        if file not in headers:
            if Path(file).name != file or not (folder / file).is_file():
                raise ModelError(
                    f"{index} lists {file} for tensor {name}, but {folder / file} does not exist"
                )
            headers[file] = read_header(folder / file)
        if name not in headers[file]:
            raise ModelError(f"{index} says that tensor {name} is in {file}, but that file does not hold it")
        located[name] = Located(folder / file, headers[file][name])
    return located


def read_header(file: Path) -> dict[str, TensorType]:
    """Tensor types from a file's header (format: 8 bytes of length, then JSON). Checks the size of the file."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise ModelError(
                f"{file}: not a safetensors file, or truncated ({size} bytes, header of {length})"
            )
        try:
            header = json.loads(stream.read(length))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ModelError(f"{file}: the safetensors header is damaged ({error})") from error
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if 8 + length + end != size:
        raise ModelError(
            f"{file}: truncated or damaged, {size} bytes where the header describes {8 + length + end}"
        )
    return {name: _type_of(file, name, entry) for name, entry in header.items()}


def _type_of(file: Path, name: str, entry: dict) -> TensorType:
    if entry["dtype"] not in _DTYPES:
        raise ModelError(f"{file}: tensor {name} has dtype {entry['dtype']}; readable: {', '.join(_DTYPES)}")
    return tensor(DTYPES[_DTYPES[entry["dtype"]]], entry["shape"])
