"""Fills a bundle with what a compile produced and describes it in the manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.codegen.compile_pieces import CompiledPiece
from treadle.codegen.config import IR_DTYPES, CompileConfig
from treadle.codegen.manifest import (
    SCHEMA_VERSION,
    Limits,
    Manifest,
    ModelEntry,
    NativeEntry,
    PieceEntry,
    PluginEntry,
    RangeEntry,
    SettingRow,
    TargetEntry,
    WeightEntry,
    WeightsEntry,
)
from treadle.codegen.profit import REPORT as PROFIT_REPORT
from treadle.codegen.profit import Profit
from treadle.codegen.program import KVLayer, Program, Step
from treadle.codegen.store import StoredObject
from treadle.codegen.target import Target
from treadle.codegen.write_bundle import BundleWriter
from treadle.ir.config import KEY, Resolved
from treadle.ir.graph import Param
from treadle.ir.text import print_graph
from treadle.ir.types import TensorType

STORAGE_REPORT = "reports/storage.json"

if TYPE_CHECKING:
    from treadle.ir.source import ModelSource
    from treadle.passes.pipeline import CompiledStages
    from treadle.passes.split import SplitGraph

_NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version")


@dataclass(frozen=True, kw_only=True)
class CompiledModel:
    """Everything a bundle is made of."""

    source: ModelSource
    stages: CompiledStages
    pieces: Sequence[CompiledPiece]
    plugins: Sequence[PluginEntry]
    natives: Mapping[str, StoredObject]
    weights: WeightsEntry
    rank_weights: Sequence[WeightsEntry] = ()
    resolved: Resolved[CompileConfig]
    target: Target
    toolchain: Mapping[str, str]
    profit: Profit | None = None


def fill_bundle(writer: BundleWriter, compiled: CompiledModel) -> Manifest:
    """Writes every file but the weights and returns the manifest, still without the list of files and the times."""
    config, unified = compiled.resolved.config, compiled.stages.unified
    stages = [
        writer.add_bytes(f"ir/{number:02d}-{name}.ir", text.encode())
        for number, (name, text) in enumerate(compiled.stages.texts().items())
    ]
    reports = json.dumps([report.as_dict() for report in compiled.stages.reports], indent=1, default=str)
    program = make_program(unified)
    return Manifest(
        schema=SCHEMA_VERSION,
        model=_model_entry(compiled, program),
        target=TargetEntry(name=compiled.target.name, features=list(compiled.target.features)),
        toolchain=dict(compiled.toolchain),
        pipeline=list(compiled.stages.pipeline()),
        options=_options(config),
        limits=Limits(
            max_num_batched_tokens=config.max_num_batched_tokens, max_model_len=config.max_model_len or 1
        ),
        pieces=[_add_piece(writer, piece, _served_layers(program, piece.name)) for piece in compiled.pieces],
        program=program,
        weights=compiled.weights,
        rank_weights=list(compiled.rank_weights),
        native=[
            NativeEntry(
                name=name, file=writer.add_file(f"native/{name}.so", made.path, made.sha256), key=made.digest
            )
            for name, made in compiled.natives.items()
        ],
        tokenizer=_add_tokenizer(writer, compiled.source),
        stages=stages,
        reports=[
            writer.add_bytes("reports/passes.json", reports.encode()),
            writer.add_bytes(STORAGE_REPORT, _storage(compiled.stages.unified)),
            *_add_profit(writer, compiled.profit),
        ],
        settings=setting_rows(compiled.resolved),
        times=[],
        files=[],
        plugins=list(compiled.plugins),
    )


def _storage(unified: SplitGraph) -> bytes:
    """The checked storage plans; plans belong to the passes, which are imported only to compile."""
    from treadle.passes.storage_report import storage_report

    return json.dumps(storage_report(unified), indent=1).encode()


def _add_profit(writer: BundleWriter, profit: Profit | None) -> list[str]:
    """The measured choices of level 3; other levels have none."""
    if profit is None:
        return []
    return [writer.add_bytes(PROFIT_REPORT, json.dumps(profit.as_dict(), indent=1).encode())]


def make_program(unified: SplitGraph) -> Program:
    """The stitched program of a split graph."""
    from treadle.passes.steps import kv_layers, program_inputs, program_steps

    return Program(
        inputs=program_inputs(unified),
        outputs=[value.name for value in unified.outputs],
        steps=[Step(**vars(step)) for step in program_steps(unified)],
        kv_layers=[KVLayer(**asdict(layer)) for layer in kv_layers(unified)],
    )


def used_params(unified: SplitGraph) -> list[Param]:
    """The parameters that some step passes on, each once, in order of first use."""
    from treadle.passes.steps import program_steps

    names = dict.fromkeys(name for step in program_steps(unified) for name in step.params)
    by_name = {param.name: param for param in unified.params}
    return [by_name[name] for name in names]


def setting_rows(resolved: Resolved[CompileConfig]) -> list[SettingRow]:
    """The effective settings. Files of the signer and the compiler are named without their folders."""
    rows = []
    for row in resolved.rows():
        for field in ("value", "asked"):
            if row["field"] in ("sign", "compiler") and row[field]:
                row[field] = Path(row[field]).name
            if isinstance(row[field], tuple):
                row[field] = list(row[field])
        rows.append(SettingRow(**row))
    return rows


def _options(config: CompileConfig) -> dict[str, Any]:
    """The settings that may change generated code."""
    import dataclasses

    keyed = [field.name for field in dataclasses.fields(config) if field.metadata["role"] is KEY]
    values = {name: getattr(config, name) for name in keyed}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _model_entry(compiled: CompiledModel, program: Program) -> ModelEntry:
    source = compiled.source
    config = source.config.to_dict() if hasattr(source.config, "to_dict") else {}
    plain = json.loads(json.dumps(config, default=str))
    logits = compiled.stages.unified.outputs[0].type
    assert isinstance(logits, TensorType), "logits are a tensor"
    text = source.config.get_text_config() if hasattr(source.config, "get_text_config") else source.config
    return ModelEntry(
        name=Path(source.location).name.removesuffix(".gguf"),
        architecture=source.architecture,
        fingerprint=source.fingerprint,
        dtype=IR_DTYPES[compiled.resolved.config.dtype],
        vocab_size=int(logits.shape[-1]),  # type: ignore[arg-type]
        hidden_size=int(getattr(text, "hidden_size", 0) or 0),
        num_layers=len(program.kv_layers),
        config={name: value for name, value in plain.items() if name not in _NOT_OF_THE_MODEL},
    )


def _served_layers(program: Program, piece: str) -> list[int]:
    """The attention layers whose result a call of `piece` consumes: those it comes right after."""
    layers: list[int] = []
    last: int | None = None
    for step in program.steps:
        if step.op == "attention":
            last = step.attrs["layer"]
        elif step.kind == "op":
            last = None
        elif step.piece == piece and last is not None:
            layers.append(last)
    return layers


def _add_piece(writer: BundleWriter, piece: CompiledPiece, layers: list[int]) -> PieceEntry:
    ranges = []
    for token_range, stored in piece.artifacts.items():
        path = f"pieces/{piece.name}-{token_range}{piece.suffix}"
        writer.add_file(path, stored.path, stored.sha256)
        ranges.append(
            RangeEntry(
                start=token_range.start, end=token_range.end, file=path, key=stored.digest, format=piece.format
            )
        )
    return PieceEntry(
        name=piece.name,
        key=piece.ir_hash,
        layers=layers,
        ranges=ranges,
        ir=writer.add_bytes(f"ir/pieces/{piece.name}.ir", print_graph(piece.graph).encode()),
        tokens_from=piece.tokens_from,
        num_inputs=len(piece.graph.inputs),
        num_params=len(piece.graph.params),
        num_outputs=len(piece.graph.outputs),
    )


def add_rank_weights(
    writer: BundleWriter, params: Sequence[Param], source: ModelSource, stored: bool, world: int
) -> list[WeightsEntry]:
    """One set of weights for each rank, in rank order: in `weights`, or in `weights/rank0`, ... for several ranks."""
    from treadle.ir.weights import bind_rank

    if world == 1:
        return [add_weights(writer, params, source, stored)]
    entries = []
    for rank in range(world):
        own = [Param(param.name, param.type, recipe=bind_rank(param.recipe, rank)) for param in params]
        entries.append(add_weights(writer, own, source, stored, f"weights/rank{rank}"))
    return entries


def add_weights(
    writer: BundleWriter, params: Sequence[Param], source: ModelSource, stored: bool, where: str = "weights"
) -> WeightsEntry:
    """Runs the recipes and writes the results into the bundle, if they are to be stored; describes them either way."""
    from treadle.ir.loader import write_weights

    files: dict[str, str] = {}
    aliases: dict[str, str] = {}
    if stored and params:
        folder = writer.place(f"{where}/first").parent
        files = {name: f"{where}/{file}" for name, file in write_weights(params, source, folder).items()}
        for path in dict.fromkeys(files.values()):
            aliases |= _aliases(folder / Path(path).name)
            writer.seal(path)
    tensors = []
    for param in params:
        assert isinstance(param.type, TensorType), f"weight {param.name} is a tensor"
        tensors.append(
            WeightEntry(
                name=param.name,
                dtype=str(param.type.dtype),
                shape=list(param.type.at(1)),
                recipe=str(param.recipe),
                file=files.get(param.name),
                stored_as=aliases.get(param.name),
            )
        )
    return WeightsEntry(stored=stored, tensors=tensors, source=None if stored else str(Path(source.location).absolute()))


def _aliases(file: Path) -> dict[str, str]:
    """Other name -> name in the file, from the metadata that the weight writer left."""
    from safetensors import safe_open

    metadata = safe_open(file, framework="pt").metadata() or {}
    table = json.loads(metadata.get("aliases", "{}"))
    return {other: name for name, others in table.items() for other in others}


def _add_tokenizer(writer: BundleWriter, source: ModelSource) -> list[str]:
    folder = writer.place("tokenizer/first").parent
    names = source.write_tokenizer(folder)
    for name in names:
        writer.seal(f"tokenizer/{name}")
    return [f"tokenizer/{name}" for name in names]
