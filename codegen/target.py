"""What machine code is made for, and whether a processor can run it. This module imports no torch.

A target is a name such as `cpu:x86-64-avx2` and the processor features its code may execute, spelled as in
/proc/cpuinfo. Code for fewer features than the host has is fine; code for more is refused by name.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from treadle.ir.errors import ConfigError
from treadle.kernels.cpu_features import ISA_REQUIREMENTS, CpuFeatures, local_cpu

_ARCH_SPELLING = {"x86_64": "x86-64", "aarch64": "aarch64"}
_VECTOR_BITS = {"portable": 0, "avx2": 256, "avx512": 512}


@dataclass(frozen=True, kw_only=True)
class Target:
    """`arch` as `uname -m` has it; `isa` one of the levels of kernels/cpu_features; `features` sorted."""

    name: str
    arch: str
    isa: str
    features: tuple[str, ...]

    @property
    def vector_bits(self) -> int:
        """Width of the vector registers the code uses; 0 for scalar code."""
        return _VECTOR_BITS[self.isa]


def _targets() -> dict[str, Target]:
    table = {}
    for arch, spelling in _ARCH_SPELLING.items():
        for isa, needed in ISA_REQUIREMENTS.items():
            if isa != "portable" and arch != "x86_64":
                continue
            name = f"cpu:{spelling}" + ("" if isa == "portable" else f"-{isa}")
            table[name] = Target(name=name, arch=arch, isa=isa, features=tuple(sorted(needed)))
    return table


TARGETS = _targets()


def resolve_target(name: str, host: CpuFeatures | None = None) -> Target:
    """The target called `name`; "cpu" means the best one `host` (default: this machine) can run.

    Raises ConfigError that lists the targets for an unknown name.
    """
    if name == "cpu":
        host = host or local_cpu()
        for target in TARGETS.values():
            if target.arch == host.arch and target.isa == host.isa:
                return target
        raise ConfigError(f"no target for a {host.arch} processor; choose one of: {', '.join(TARGETS)}")
    if name not in TARGETS:
        raise ConfigError(f"unknown target {name!r}; choose one of: cpu, {', '.join(TARGETS)}")
    return TARGETS[name]


def can_run(name: str, features: Collection[str], host: CpuFeatures | None = None) -> str | None:
    """None if `host` (default: this machine) can run code made for `name` with `features`, else the reason.

    The reason names the architecture or each missing feature.
    """
    host = host or local_cpu()
    arch = TARGETS[name].arch if name in TARGETS else None
    if arch is None:
        return f"target {name!r} is not one this treadle knows: {', '.join(TARGETS)}"
    if arch != host.arch:
        return f"it was compiled for {arch} processors and this one is {host.arch}"
    required = set(features) | set(TARGETS[name].features)
    if missing := sorted(required - host.flags):
        return f"it was compiled for {name} and this processor lacks {', '.join(missing)}"
    return None
