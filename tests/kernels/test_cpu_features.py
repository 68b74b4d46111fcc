"""Instruction sets read from /proc/cpuinfo."""

from __future__ import annotations

import subprocess
import sys

import pytest

from treadle.kernels.cpu_features import CpuFeatures, normalize_arch, parse_cpuinfo

AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}


@pytest.mark.parametrize(
    ("flags", "isa"),
    [(set(), "portable"), (AVX2, "avx2"), (AVX2 - {"fma"}, "portable"), (AVX512, "avx512"), (AVX512 - {"avx512vl"}, "avx2")],
)
def test_best_level(flags: set[str], isa: str) -> None:
    """C05-02: a level needs all of its flags."""
    cpu = CpuFeatures(arch="x86_64", flags=frozenset(flags))
    assert cpu.isa == isa
    assert cpu.runnable_isas[0] == isa and cpu.runnable_isas[-1] == "portable"


def test_parse_cpuinfo() -> None:
    assert parse_cpuinfo("model name\t: X\nflags\t\t: avx2 fma\n\nflags\t\t: other\n") == {"avx2", "fma"}
    assert parse_cpuinfo("Features\t: asimd fp\n") == {"asimd", "fp"}
    assert parse_cpuinfo("") == frozenset()


def test_one_spelling_for_an_architecture() -> None:
    assert [normalize_arch(name) for name in ("AMD64", "x86_64", "arm64")] == ["x86_64", "x86_64", "aarch64"]


def test_imports_no_torch() -> None:
    """The compiler's front end asks for the target before it pays for torch."""
    code = "import sys, treadle.kernels.cpu_features; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
