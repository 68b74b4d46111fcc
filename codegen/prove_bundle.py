"""`treadle verify`: proves the passes and the compiled pieces of a bundle and describes the result as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.codegen.bundle import Bundle, open_bundle
from treadle.codegen.choose_passes import pipeline_options, recorded_config
from treadle.codegen.loader import load_pieces
from treadle.codegen.manifest import Manifest
from treadle.codegen.prove_pieces import prove_pieces
from treadle.codegen.toolchain import treadle_version
from treadle.ir.errors import BundleError, ConfigError
from treadle.ir.text import parse_graph
from treadle.passes.base import STAGES, Pass
from treadle.passes.pipeline import plan_pipeline
from treadle.passes.prove import Check, make_trial, prove_passes
from treadle.passes.split_text import parse_split

REPORT = "reports/verify.json"
DEFAULT_SHAPES = (1, 2, 7, 64)


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Every comparison that was made, on which token counts and from which seed."""

    shapes: tuple[int, ...]
    seed: int
    checks: list[Check]

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if not check.ok]

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": not self.failures,
            "treadle": treadle_version(),
            "seed": self.seed,
            "shapes": list(self.shapes),
            "checks": [check.as_dict() for check in self.checks],
        }


def prove_bundle(path: Path, *, shapes: Sequence[int] | None = None, seed: int = 0) -> Proof:
    """Proves each pass, all passes, each piece and the stitched program.

    `shapes` are token counts; sizes that have an artifact of their own are added. Raises ConfigError for a count that
    the bundle does not serve, BundleError if this treadle's passes are not those that made it.
    """
    bundle = open_bundle(path)
    counts = _token_counts(bundle.manifest, shapes)
    traced = parse_graph(bundle.file(_stage(bundle, "traced")).read_text())
    program = parse_split(bundle.file(_stage(bundle, "unified")).read_text())
    trial = make_trial(traced, counts, seed)
    checks, wanted = prove_passes(traced, _passes(bundle), trial)
    checks += prove_pieces(program, load_pieces(bundle), trial, wanted)
    return Proof(shapes=trial.shapes, seed=seed, checks=checks)


def _passes(bundle: Bundle) -> list[Pass]:
    """The passes of the bundle's compile. Raises BundleError if the pipeline of its settings is another one now."""
    plan = plan_pipeline(pipeline_options(recorded_config(bundle.manifest)))
    steps = [step for stage in STAGES for step in plan[stage]]
    if [step.spec() for step in steps] != bundle.manifest.pipeline:
        raise BundleError(
            f"{bundle.root.name} was made by other passes than this treadle has: it lists "
            f"{', '.join(bundle.manifest.pipeline)}; compile it again, or verify it with the version that made it"
        )
    return steps


def _stage(bundle: Bundle, name: str) -> str:
    for path in bundle.manifest.stages:
        if Path(path).stem.partition("-")[2] == name:
            return path
    raise BundleError(f"{bundle.root.name} holds no IR of the stage {name!r}; compile it again")


def _token_counts(manifest: Manifest, asked: Sequence[int] | None) -> list[int]:
    most = manifest.limits.max_num_batched_tokens
    if asked is not None and (bad := [tokens for tokens in asked if not 1 <= tokens <= most]):
        raise ConfigError(f"shape {bad[0]} must be a token count from 1 to {most}, the most this bundle was compiled for")
    exact = {item.start for piece in manifest.pieces for item in piece.ranges if item.start == item.end}
    wanted = asked if asked is not None else [tokens for tokens in DEFAULT_SHAPES if tokens <= most]
    return sorted({*wanted, *exact})
