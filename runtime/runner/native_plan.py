"""The launch plan of kernels/cpu/launch_plan.cpp from Python: build it step by step, then run it without the interpreter.

Knows nothing of models: places are numbers, pieces are C functions with a container, attention is a struct of addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, byref, c_int64, c_void_p
from typing import Any, ClassVar

import torch

from treadle.codegen.ranges import TokenRange
from treadle.codegen.torch_private import NativePiece, shim_address, take_tensor, tensor_handle
from treadle.kernels.attention.interface import BoundAttention
from treadle.kernels.native import NativeLibrary

NATIVE_SOURCE = "launch_plan"
"""The row of kernels.native.NATIVE_SOURCES that a plan needs."""

_SHIM_FUNCTIONS = (
    "aoti_torch_new_tensor_handle",
    "aoti_torch_delete_tensor_object",
    "aoti_torch_get_data_ptr",
    "aoti_torch_get_dim",
    "aoti_torch_get_sizes",
    "aoti_torch_get_strides",
    "aoti_torch_get_dtype",
    "aoti_torch_empty_strided",
)
_ATTENTION_FAILED = 100
_STATUS = {
    1: "no artifact holds this token count",
    2: "no memory for a tensor",
    3: "the compiled piece failed; its message went to standard error",
    4: "a tensor has an unexpected layout",
    5: "a row lies beyond the step's tokens",
}


class _TorchTable(ctypes.Structure):
    _fields_: ClassVar = [(name.removeprefix("aoti_torch_"), c_void_p) for name in _SHIM_FUNCTIONS]


class NativePlan:
    """Steps over `num_values` numbered places. Freed with the object."""

    def __init__(self, library: NativeLibrary, num_values: int):
        self._bind(library)
        self._table = _torch_table()
        self._delete_handle = ctypes.CFUNCTYPE(ctypes.c_int32, c_void_p)(self._table.delete_tensor_object)
        self._plan = self._new(byref(self._table), num_values)
        if not self._plan:
            raise MemoryError("no memory for a launch plan")
        self._kept: list[Any] = []
        self._num_steps = 0

    def _bind(self, library: NativeLibrary) -> None:
        places = POINTER(c_int64)
        bind = library.bind
        self._new = bind("treadle_plan_new", [c_void_p, c_int64], c_void_p)
        self._delete = bind("treadle_plan_delete", [c_void_p], None)
        self._add_piece = bind(
            "treadle_plan_add_piece",
            [c_void_p, places, c_int64, places, c_int64, POINTER(c_void_p), c_int64, c_int64, c_int64],
        )
        self._add_range = bind("treadle_plan_add_range", [c_void_p, c_int64, c_int64, c_void_p, c_void_p], None)
        self._add_attention = bind("treadle_plan_add_attention", [c_void_p, places, c_int64, c_void_p])
        self._add_select = bind("treadle_plan_add_select", [c_void_p, c_int64, c_int64, c_int64, c_int64])
        self._add_dead = bind("treadle_plan_add_dead", [c_void_p, places, c_int64], None)
        self._set = bind("treadle_plan_set", [c_void_p, c_int64, c_void_p], None)
        self._get = bind("treadle_plan_get", [c_void_p, c_int64], c_void_p)
        self._release = bind("treadle_plan_release", [c_void_p, c_int64], None)
        self._run = bind("treadle_plan_run", [c_void_p, c_int64, c_int64, c_void_p])
        self._times = bind("treadle_plan_times", [c_void_p, c_void_p, c_void_p], None)

    def __del__(self) -> None:
        if getattr(self, "_plan", None):
            self._delete(self._plan)

    @property
    def num_steps(self) -> int:
        return self._num_steps

    def add_piece(
        self,
        inputs: Sequence[int],
        outputs: Sequence[int],
        weights: Sequence[torch.Tensor],
        artifacts: Sequence[tuple[TokenRange, NativePiece]],
        tokens_from: tuple[int, int] | None,
    ) -> None:
        """A piece; the size of argument `tokens_from` = (position, axis) picks the first artifact that holds it."""
        handles = (c_void_p * len(weights))(*[tensor_handle(weight) for weight in weights])
        position, axis = tokens_from if tokens_from is not None else (-1, 0)
        added = self._add_piece(
            self._plan, _places(inputs), len(inputs), _places(outputs), len(outputs), handles, len(weights), position, axis
        )
        assert added >= 0, f"a piece with {len(outputs)} outputs is more than a launch plan takes"
        for token_range, native in artifacts:
            self._add_range(self._plan, token_range.start, token_range.end, native.container, native.run)
        self._kept += [list(weights), list(artifacts)]
        self._num_steps += 1

    def add_attention(self, qkv: Sequence[int], output: int, attention: BoundAttention) -> None:
        """Writes k and v to the cache, then gives attention of q in a new tensor; rows of padding are zero."""
        self._add_attention(self._plan, _places(qkv), output, byref(attention))
        self._kept.append(attention)
        self._num_steps += 1

    def add_select(self, x: int, rows: int, output: int, element_size: int) -> None:
        """x [T, ...] at the i64 [S] rows."""
        self._add_select(self._plan, x, rows, output, element_size)
        self._num_steps += 1

    def add_dead(self, places: Sequence[int]) -> None:
        """After the last added step nobody reads these."""
        self._add_dead(self._plan, _places(places), len(places))

    @contextmanager
    def holding(self, values: dict[int, torch.Tensor]) -> Iterator[None]:
        """Puts tensors of the caller into places for the time of the block."""
        handles = {place: tensor_handle(tensor) for place, tensor in values.items()}
        for place, handle in handles.items():
            self._set(self._plan, place, handle)
        try:
            yield
        finally:
            for place, handle in handles.items():
                self._release(self._plan, place)
                self._delete_handle(handle)

    def run(self, first: int, last: int) -> None:
        """Runs steps first to last - 1 with the interpreter lock released. Raises for what a step reports."""
        failed = c_int64(-1)
        status = self._run(self._plan, first, last, byref(failed))
        if status == 2:
            raise MemoryError(f"launch plan, step {failed.value}: {_STATUS[status]}")
        if status:
            reason = _STATUS.get(status) or f"attention reports status {status - _ATTENTION_FAILED}"
            raise RuntimeError(f"launch plan, step {failed.value}: {reason}")

    def value(self, place: int) -> torch.Tensor:
        """The tensor at a place, which stays valid after the plan has let go of it."""
        handle = self._get(self._plan, place)
        assert handle, f"place {place} is empty"
        return take_tensor(handle)

    def release(self, places: Sequence[int]) -> None:
        """Lets go of what the places hold."""
        for place in places:
            self._release(self._plan, place)

    def times(self) -> tuple[float, float]:
        """(seconds in pieces, seconds in attention) since the last call."""
        piece, attention = c_int64(), c_int64()
        self._times(self._plan, byref(piece), byref(attention))
        return piece.value / 1e9, attention.value / 1e9


def _places(numbers: Sequence[int]) -> Any:
    return (c_int64 * len(numbers))(*numbers)


def _torch_table() -> _TorchTable:
    """Addresses in the libtorch that this process runs."""
    return _TorchTable(*[shim_address(name) for name in _SHIM_FUNCTIONS])
