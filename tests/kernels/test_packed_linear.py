"""The C++ kernel for packed weights against torch, on every instruction set that this processor has."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import pytest
import torch

from tests.kernels.tolerance import assert_close
from treadle.ir.packing import pack
from treadle.kernels.cpu_features import local_cpu
from treadle.kernels.native import NativeLibrary, compile_native, load_native, native_sources

PATHS = {"best": 0, "portable": 1, "avx2": 2, "avx512": 3, "avx512_bf16": 4, "amx": 5}
SHAPES = [(0, 8, 16), (1, 1, 1), (1, 576, 960), (3, 64, 17), (5, 33, 40), (6, 100, 300), (7, 31, 16), (33, 576, 200), (70, 96, 33), (300, 70, 50)]
"""(rows, K, N): none, one, odd, larger than a tile, larger than a block of rows."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> NativeLibrary:
    out = tmp_path_factory.mktemp("native") / "cpu_linear.so"
    return load_native(compile_native(native_sources()["cpu_linear"], local_cpu().arch, out))


class Kernel:
    def __init__(self, library: NativeLibrary, path: int):
        self._path = path
        self._run_int8 = library.bind(
            "treadle_packed_int8_linear",
            [c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64, c_int64],
        )
        self._run = library.bind(
            "treadle_packed_linear", [c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64]
        )

    def int8(self, x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, n: int) -> torch.Tensor:
        out = torch.full((x.shape[0], n), torch.nan, dtype=x.dtype)
        assert packed.dtype is torch.int8 and scale.shape[0] == packed.shape[0]
        status = self._run_int8(
            0 if x.dtype is torch.float32 else 1, x.data_ptr(), x.stride(0), packed.data_ptr(), scale.data_ptr(), scale.shape[1],
            out.data_ptr(), x.shape[0], n, x.shape[1], self._path,
        )  # fmt: skip
        assert status == 0
        return out

    def __call__(self, x: torch.Tensor, packed: torch.Tensor, n: int) -> torch.Tensor:
        out = torch.full((x.shape[0], n), torch.nan, dtype=x.dtype)
        dtype = 0 if x.dtype is torch.float32 else 1
        status = self._run(
            dtype, x.data_ptr(), x.stride(0), packed.data_ptr(), out.data_ptr(), x.shape[0], n, x.shape[1], self._path
        )
        assert status == 0
        return out


@pytest.fixture(params=PATHS, ids=list(PATHS))
def kernel(request: pytest.FixtureRequest, library: NativeLibrary) -> Kernel:
    path = PATHS[request.param]
    if path > library.bind("treadle_best_path", [])():
        pytest.skip(f"this processor has no {request.param}")
    return Kernel(library, path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("rows", "size", "n"), SHAPES)
def test_equals_torch(kernel: Kernel, dtype: torch.dtype, rows: int, size: int, n: int) -> None:
    """Within the table of float64 products; the result is written whole."""
    x, weight = torch.randn(rows, size).to(dtype), (torch.randn(n, size) / size**0.5).to(dtype)
    assert_close(kernel(x, pack(weight), n), (x.double() @ weight.double().T).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_a_row_does_not_depend_on_its_batch(kernel: Kernel, dtype: torch.dtype) -> None:
    """Bit for bit the same alone, in any batch, with one thread and with two: seeds and prefix caching rest on it."""
    x, weight = torch.randn(67, 96).to(dtype), torch.randn(2000, 96).to(dtype)
    packed = pack(weight)
    whole = kernel(x, packed, 2000)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for rows in (1, 2, 5, 16, 33):
                for start in (0, 20):
                    part = kernel(x[start : start + rows].contiguous(), packed, 2000)
                    assert torch.equal(part, whole[start : start + rows]), (count, rows, start)
    finally:
        torch.set_num_threads(threads)


def quantized(weight: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """int8 values, scales [N, groups], and what they stand for in float64."""
    parts = weight.reshape(weight.shape[0], groups, -1)
    scale = parts.abs().amax(-1).clamp(min=1e-6) / 127
    values = (parts / scale.unsqueeze(-1)).round().to(torch.int8)
    return values.flatten(1), scale, (values.double() * scale.double().unsqueeze(-1)).flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("rows", "size", "n", "groups"), [(*shape, 1) for shape in SHAPES] + [(1, 576, 960, 9), (5, 64, 40, 2), (33, 192, 33, 3)])
def test_int8_equals_torch(kernel: Kernel, dtype: torch.dtype, rows: int, size: int, n: int, groups: int) -> None:
    """Sums of exact products, then the scale: within the table of float64 products of what the weight stands for."""
    x = torch.randn(rows, size).to(dtype)
    values, scale, meant = quantized(torch.randn(n, size) / size**0.5, groups)
    assert_close(kernel.int8(x, pack(values), pack(scale), n), (x.double() @ meant.T).to(dtype))


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_a_row_of_int8_does_not_depend_on_its_batch(kernel: Kernel, dtype: torch.dtype, groups: int) -> None:
    """Few rows and many go different ways, to the same bits."""
    x = torch.randn(67, 96).to(dtype)
    values, scale, _ = quantized(torch.randn(2000, 96), groups)
    whole = kernel.int8(x, pack(values), pack(scale), 2000)
    for rows in (1, 2, 5, 6, 7, 16, 33):
        part = kernel.int8(x[20 : 20 + rows].contiguous(), pack(values), pack(scale), 2000)
        assert torch.equal(part, whole[20 : 20 + rows]), rows


def test_rows_may_lie_apart(kernel: Kernel) -> None:
    """x as a slice of a wider tensor, as the split of a joint projection gives it."""
    wide = torch.randn(9, 200).bfloat16()
    weight = torch.randn(50, 64).bfloat16()
    part = wide[:, 100:164]
    assert torch.equal(kernel(part, pack(weight), 50), kernel(part.contiguous(), pack(weight), 50))


def test_what_this_processor_lacks_is_refused(library: NativeLibrary) -> None:
    """C05-02: a path beyond the best is a status, not an illegal instruction."""
    run = library.bind("treadle_packed_linear", [c_int64] + [c_void_p] * 4 + [c_int64] * 4)
    assert run(0, None, None, None, None, 1, 1, 1, 99) != 0


def test_the_shim_refuses_what_it_cannot_take(library: NativeLibrary) -> None:
    """Another dtype, or another number of dimensions, is an error code to the compiled piece."""
    from treadle.codegen.torch_private import tensor_handle

    shim = library.bind("aoti_torch_cpu_packed_linear_v1", [c_void_p, c_void_p, c_int64, c_void_p], ctypes.c_int32)
    result = c_void_p()
    packed = tensor_handle(pack(torch.randn(16, 8)))
    for x in (torch.randn(2, 8).half(), torch.randn(2, 2, 8), torch.randn(8, 2).T.half()):
        assert shim(tensor_handle(x), packed, 16, ctypes.byref(result)) == 1
