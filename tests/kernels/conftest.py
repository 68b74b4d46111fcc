"""The native library, built once for the session."""

from __future__ import annotations

import pytest

from treadle.kernels.attention.cpu import NATIVE_SOURCE
from treadle.kernels.cpu_features import local_cpu
from treadle.kernels.native import NativeLibrary, compile_native, load_native, native_sources


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> NativeLibrary:
    out_path = tmp_path_factory.mktemp("native") / "attention.so"
    return load_native(compile_native(native_sources()[NATIVE_SOURCE], local_cpu().arch, out_path))
