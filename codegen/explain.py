"""Says which artifacts of a bundle's compile, repeated with changed settings, the store would have, and why not.

Works from the bundle alone: keys are rebuilt from its manifest and the IR of its pieces, nothing is traced. A change
that alters the IR itself (dtype, level, passes) is a miss against this bundle's artifact by definition.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from treadle.codegen.backends import BACKENDS, Backend
from treadle.codegen.bundle import Bundle, open_bundle
from treadle.codegen.choose_passes import FUSIONS, recorded_config
from treadle.codegen.compile_pieces import KeyContext, piece_key, tokens_from
from treadle.codegen.config import CompileConfig
from treadle.codegen.key import ArtifactKey, Difference, Pairs, explain
from treadle.codegen.manifest import Manifest
from treadle.codegen.ranges import TokenRange, plan_ranges
from treadle.codegen.store import Store
from treadle.codegen.target import resolve_target
from treadle.codegen.toolchain import toolchain
from treadle.codegen.used_plugins import installed, key_pairs
from treadle.ir.config import KEY
from treadle.ir.errors import ArtifactError
from treadle.ir.hashing import structural_hash
from treadle.ir.text import parse_graph

_RETRACED = ("dtype", "level", "disabled_passes", "extra_passes", "quantization", "tensor_parallel_size", *FUSIONS)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """For one artifact: a hit, or the reason of the miss and the fields on which its key differs from the bundle's."""

    label: str
    hit: bool
    reason: str
    differences: list[Difference]
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def explain_compile(bundle_path: Path, changes: Mapping[str, Any], store: Store) -> list[Answer]:
    """One answer for each piece and range of the compile that made the bundle, with `changes` to its settings.

    Raises ConfigError for an unknown setting or value, BundleError for a bundle that cannot be read.
    """
    bundle = open_bundle(bundle_path, for_loading=False)
    config = recorded_config(bundle.manifest, changes)
    notes = _notes(changes)
    retraced = [f"{name} changes the IR of the pieces" for name in _RETRACED if _differs(bundle, config, name)]
    answers = []
    for name, old, new in _keys(bundle, config):
        label = f"piece {name} for {TokenRange(new.start, new.end)} tokens"
        differences = explain(old, new) if old is not None else []
        if retraced:
            answers.append(
                Answer(label=label, hit=False, reason="; ".join(retraced), differences=differences, notes=notes)
            )
        else:
            hit, reason = _look_up(store, new)
            answers.append(Answer(label=label, hit=hit, reason=reason, differences=differences, notes=notes))
    return answers


def _look_up(store: Store, key: ArtifactKey) -> tuple[bool, str]:
    try:
        if store.lookup(key) is not None:
            return True, ""
    except ArtifactError as error:
        return False, str(error)
    return False, "the store has no object with this key"


def _notes(changes: Mapping[str, Any]) -> list[str]:
    """Says of each changed setting that it cannot matter to a key, if so."""
    roles = {field.name: field.metadata["role"] for field in dataclasses.fields(CompileConfig)}
    idle = [name for name in changes if roles[name] is not KEY]
    return [f"{name} enters no key" for name in idle]


def _differs(bundle: Bundle, config: CompileConfig, name: str) -> bool:
    value = getattr(config, name)
    old = bundle.manifest.options.get(name)
    if name == "dtype" and value == "auto":
        return False  # what auto gave for this model is what the bundle recorded
    if name == "level":
        return bool(value) != bool(old)  # levels above 0 differ in settings of their own only
    if name in FUSIONS and config.quantization is None and config.tensor_parallel_size == 1:
        return False  # there is nothing to join
    return list(value) != list(old or ()) if isinstance(value, tuple) else value != old


def _keys(bundle: Bundle, config: CompileConfig) -> list[tuple[str, ArtifactKey | None, ArtifactKey]]:
    """(piece, key it has in the bundle if there is such a range, key it would have)."""
    manifest = bundle.manifest
    target = resolve_target(config.target)
    before = KeyContext(
        pipeline=tuple(manifest.pipeline),
        target=resolve_target(manifest.target.name),
        toolchain=_piece_toolchain(manifest.toolchain, str(manifest.options["backend"])),
        plugins=key_pairs(manifest.plugins),
    )
    with tempfile.TemporaryDirectory() as scratch:
        old_backend = _options_only(str(manifest.options["backend"]), before, Path(scratch))
        after = KeyContext(pipeline=before.pipeline, target=target, toolchain={}, plugins=_plugins_now(manifest))
        new_backend = _options_only(config.backend, after, Path(scratch))
        after = dataclasses.replace(
            after, toolchain=toolchain(config.compiler, with_compiler=new_backend.needs_compiler)
        )
        found: list[tuple[str, ArtifactKey | None, ArtifactKey]] = []
        for piece in manifest.pieces:
            graph = parse_graph(bundle.file(piece.ir).read_text())
            if graph.tokens[1] == manifest.limits.max_num_batched_tokens:
                graph.tokens = (graph.tokens[0], config.max_num_batched_tokens)
            ranges = plan_ranges(config.max_num_batched_tokens, config.exact_sizes)
            if tokens_from(graph) is None:
                ranges = [TokenRange(1, 1)]
            had = {TokenRange(item.start, item.end) for item in piece.ranges}
            for wanted in ranges:
                old_range = wanted if wanted in had else max(had, key=lambda item: item.end, default=None)
                old = piece_key(piece.key, old_range, old_backend, before) if old_range is not None else None
                found.append((piece.name, old, piece_key(structural_hash(graph), wanted, new_backend, after)))
        return found


def _plugins_now(manifest: Manifest) -> Pairs:
    """The bundle's plugins as they are installed here; one that is missing is left out, and so differs."""
    return key_pairs(here for entry in manifest.plugins if (here := installed(entry)) is not None)


def _piece_toolchain(recorded: Mapping[str, str], backend: str) -> dict[str, str]:
    from treadle.codegen.toolchain import NO_COMPILER

    entered = {name: version for name, version in recorded.items() if name != "treadle"}
    needs = BACKENDS.get(backend).needs_compiler
    return {**entered, **({} if needs else {"compiler": NO_COMPILER})}


def _options_only(name: str, context: KeyContext, scratch: Path) -> Backend:
    """A backend that is asked for its options and never started."""
    return BACKENDS.get(name)(target=context.target, scratch=scratch, jobs=1, compiler=None)
