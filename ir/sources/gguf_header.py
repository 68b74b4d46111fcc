"""Reads the header of a GGUF file (little-endian, versions 2 and 3) and maps its tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. gguf-py's own reader builds numpy parts for each
of the hundred thousand strings of a vocabulary, which takes seconds.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from treadle.ir.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor's bytes are. `shape` is outermost first, as torch has it."""

    kind: Any  # gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    data: np.ndarray  # uint8 [..., bytes of a row], mapped


@dataclass(frozen=True)
class GgufHeader:
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_gguf(file: Path) -> GgufHeader:
    """Metadata and mapped tensors. Raises ModelError for a file that is damaged, truncated or of another version."""
    blob = np.memmap(file, dtype=np.uint8, mode="r") if file.stat().st_size else np.zeros(0, np.uint8)
    try:
        return _read(file, blob)
    except (struct.error, UnicodeDecodeError, ValueError, KeyError, OverflowError, MemoryError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{file}: damaged or truncated GGUF file ({error})") from error


def _read(file: Path, blob: np.ndarray) -> GgufHeader:
    cursor = _Cursor(blob.data)
    magic, version, num_tensors, num_fields = cursor.unpack("4sIQQ")
    if magic != b"GGUF" or version not in (2, 3):
        raise ModelError(f"{file}: not a GGUF file of version 2 or 3 (magic {magic!r}, version {version})")
    metadata = {}
    for _ in range(num_fields):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    entries = [cursor.tensor() for _ in range(num_tensors)]
    alignment = int(metadata.get("general.alignment", 32))
    start = -(-cursor.at // alignment) * alignment
    return GgufHeader(metadata, {entry[0]: _mapped(file, blob, start, *entry) for entry in entries})


def _mapped(
    file: Path, blob: np.ndarray, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int
) -> StoredTensor:
    import gguf

    quantization = gguf.GGMLQuantizationType(kind)
    block, size = gguf.GGML_QUANT_SIZES[quantization]
    row_bytes = shape[-1] // block * size
    rows = int(np.prod(shape[:-1], dtype=np.int64))
    data = blob[start + offset : start + offset + rows * row_bytes]
    if data.size != rows * row_bytes:
        raise ModelError(f"{file}: truncated, tensor {name} ends at byte {start + offset + rows * row_bytes}")
    return StoredTensor(quantization, shape, data.reshape(*shape[:-1], row_bytes))


class _Cursor:
    """Reads typed values one after another."""

    def __init__(self, data: memoryview):
        self.data, self.at = data, 0

    def unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{layout}", self.data, self.at)
        self.at += struct.calcsize(f"<{layout}")
        return values

    def scalar(self, layout: str) -> Any:
        return self.unpack(layout)[0]

    def string(self) -> str:
        length = self.scalar("Q")
        if self.at + length > len(self.data):
            raise ValueError("a string runs past the end of the file")
        text = bytes(self.data[self.at : self.at + length]).decode()
        self.at += length
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        item, count = self.unpack("IQ")
        if item in _SCALARS:
            return list(self.unpack(f"{count}{_SCALARS[item]}"))
        return [self.value(item) for _ in range(count)]

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        dims = self.unpack(f"{self.scalar('I')}Q")
        kind, offset = self.unpack("IQ")
        return name, tuple(reversed(dims)), kind, offset
