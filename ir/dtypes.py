"""Names of element types and what torch calls them. Apart from the other types so that loading needs no sympy."""

from __future__ import annotations

import torch

TorchDType = torch.dtype


class DType(str):
    """The name of an element type; prints bare in the text form."""

    __slots__ = ()

    @property
    def torch(self) -> TorchDType:
        return _TO_TORCH[str(self)]

    @staticmethod
    def of(dtype: TorchDType) -> DType:
        return _FROM_TORCH[dtype]


_TO_TORCH: dict[str, torch.dtype] = {
    "f32": torch.float32,
    "f64": torch.float64,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
    "c64": torch.complex64,
}
_FROM_TORCH = {torch_dtype: DType(name) for name, torch_dtype in _TO_TORCH.items()}
DTYPES = {name: DType(name) for name in _TO_TORCH}
