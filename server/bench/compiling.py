"""Seconds of a compile, stage by stage: with an empty store, and again with the store that it filled."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treadle.codegen.bundle import open_bundle
from treadle.codegen.counters import COUNTERS
from treadle.codegen.progress import Progress

Stages = dict[str, float]


def measure_compile(model: str, settings: Mapping[str, Any], *, warm: bool, progress: Progress | None = None) -> dict[str, Any]:
    """Compiles into a temporary folder, which is removed. `warm` compiles once more from the store of the first time.

    Returns the seconds of each stage as the bundle's manifest records them, artifacts built and found, and bytes.
    """
    with tempfile.TemporaryDirectory(prefix="treadle-bench-") as folder:
        found = {"cold": _compile(model, settings, Path(folder), "cold", progress)}
        if warm:
            found["warm"] = _compile(model, settings, Path(folder), "warm", progress)
        return found


def _compile(model: str, settings: Mapping[str, Any], folder: Path, name: str, progress: Progress | None) -> dict[str, Any]:
    from treadle.codegen.compile import compile

    built, hits = COUNTERS.compilations, COUNTERS.store_hits
    bundle = compile(model, folder / name, store=folder / "store", progress=progress or Progress(), **settings)
    manifest = open_bundle(bundle).manifest
    stages: Stages = {}
    for time in manifest.times:
        stages[time.stage] = round(stages.get(time.stage, 0.0) + time.seconds, 3)
    return {
        "stages_seconds": stages,
        "total_seconds": round(sum(stages.values()), 3),
        "artifacts_compiled": COUNTERS.compilations - built,
        "artifacts_from_store": COUNTERS.store_hits - hits,
        "pieces": len(manifest.pieces),
        "bundle_bytes": sum(entry.size for entry in manifest.files),
    }


def compile_lines(results: Mapping[str, Any]) -> list[str]:
    """What `bench compile` prints: a row for each stage, a column for each compile."""
    names = list(results)
    lines = [f"{'stage':<20}" + "".join(f"{name + ', s':>12}" for name in names)]
    for stage in dict.fromkeys(stage for name in names for stage in results[name]["stages_seconds"]):
        lines.append(f"{stage:<20}" + "".join(f"{results[name]['stages_seconds'].get(stage, 0.0):>12.2f}" for name in names))
    lines.append(f"{'total':<20}" + "".join(f"{results[name]['total_seconds']:>12.2f}" for name in names))
    counts = (f"{name} built {results[name]['artifacts_compiled']}, found {results[name]['artifacts_from_store']}" for name in names)
    return [*lines, "artifacts: " + "; ".join(counts)]
