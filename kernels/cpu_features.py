"""Which vector instructions a CPU has, and which of our instruction-set levels that gives. Imports no torch."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")

ISA_REQUIREMENTS: dict[str, frozenset[str]] = {
    "avx512": frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma", "f16c"}),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "portable": frozenset(),
}
"""Level -> flags (as /proc/cpuinfo spells them) it needs, best level first. kernels/cpu/dispatch.cpp decides the same way."""

_ARCH_ALIASES = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True, kw_only=True)
class CpuFeatures:
    """Architecture (`x86_64`, `aarch64`, ...) and instruction-set flags of one CPU."""

    arch: str
    flags: frozenset[str]

    @property
    def isa(self) -> str:
        """The best of our levels this CPU can run: `avx512`, `avx2` or `portable`."""
        return next(level for level, needed in ISA_REQUIREMENTS.items() if needed <= self.flags)

    @property
    def runnable_isas(self) -> tuple[str, ...]:
        """Every level this CPU can run, best first."""
        return tuple(level for level, needed in ISA_REQUIREMENTS.items() if needed <= self.flags)


def normalize_arch(machine: str) -> str:
    """One spelling for an architecture: `AMD64` -> `x86_64`, `arm64` -> `aarch64`."""
    machine = machine.lower()
    return _ARCH_ALIASES.get(machine, machine)


def parse_cpuinfo(text: str) -> frozenset[str]:
    """Flags of the first processor in the text of /proc/cpuinfo (`flags` on x86, `Features` on ARM)."""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


@cache
def local_cpu() -> CpuFeatures:
    """The CPU this process runs on; without /proc/cpuinfo it counts as one with no extensions."""
    flags = parse_cpuinfo(CPUINFO.read_text()) if CPUINFO.exists() else frozenset()
    return CpuFeatures(arch=normalize_arch(platform.machine()), flags=flags)
