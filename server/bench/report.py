"""What every result says beside its numbers: the machine, versions, settings, and when; written as JSON."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import treadle
from treadle.ir.errors import ConfigError
from treadle.kernels.cpu_features import CPUINFO, local_cpu

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "uvloop", "httptools", "msgspec")
_TELLING = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")


def make_report(benchmark: str, settings: Mapping[str, Any], results: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """A result with everything needed to judge it and to run it again. `more` is put before the results."""
    return {
        "benchmark": benchmark,
        "command": shlex.join(["treadle", *(_without_folder(word) for word in sys.argv[1:])]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions(),
        "settings": dict(settings),
        **more,
        "results": dict(results),
    }


def write_report(report: Mapping[str, Any], output: Path | None) -> None:
    """Writes the report where it was asked for."""
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n")


def check_writable(*outputs: Path | None) -> None:
    """Raises ConfigError for a file that could not be written, before anything is measured for it."""
    for output in outputs:
        if output is not None and not output.absolute().parent.is_dir():
            raise ConfigError(f"{output} cannot be written: its folder does not exist; make it or choose another path")


def hardware() -> dict[str, Any]:
    """The processor, how much of it this process may use, memory, and what else runs."""
    cpu = local_cpu()
    return {
        "processor": _processor_name(),
        "arch": cpu.arch,
        "isa": cpu.isa,
        "flags": [flag for flag in _TELLING if flag in cpu.flags],
        "usable_processors": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.release()}",
    }


def versions() -> dict[str, str]:
    """treadle, Python and the packages that the numbers depend on."""
    found = {"treadle": treadle.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _without_folder(word: str) -> str:
    """A path says where it lies on one machine; only its name helps to repeat a run."""
    return Path(word).name if word.startswith("/") else word


def _processor_name() -> str:
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
