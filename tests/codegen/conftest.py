"""Small things the codegen tests share: a key, a program, a manifest and a bundle that needs no compiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from treadle.codegen.key import ArtifactKey, pairs
from treadle.codegen.manifest import (
    SCHEMA_VERSION,
    Limits,
    Manifest,
    ModelEntry,
    NativeEntry,
    PieceEntry,
    RangeEntry,
    TargetEntry,
    WeightEntry,
    WeightsEntry,
)
from treadle.codegen.program import KVLayer, Program, Step
from treadle.codegen.target import resolve_target
from treadle.codegen.toolchain import torch_version
from treadle.codegen.write_bundle import BundleWriter, writing_bundle

PIECE_IR = """graph @piece(T in 1..64) {
  input %in0: f32[T,8]
  param %w0: f32[8,8] = load("w0")
  %v0: f32[T,8] = linear(%in0, %w0)
  return %v0
}
"""


def make_key(**changes: object) -> ArtifactKey:
    fields: dict[str, object] = {
        "kind": "piece",
        "ir": "ab" * 32,
        "start": 1,
        "end": 64,
        "backend": "eager",
        "pipeline": ("canonicalise", "split"),
        "options": pairs({"simdlen": 256, "march": ""}),
        "target": "cpu:x86-64-avx2",
        "features": ("avx2", "fma"),
        "toolchain": pairs({"torch": "2.13.0", "compiler": "12.2.0"}),
    }
    return ArtifactKey(**{**fields, **changes})  # type: ignore[arg-type]


def make_manifest(writer: BundleWriter) -> Manifest:
    target = resolve_target("cpu")
    return Manifest(
        schema=SCHEMA_VERSION,
        model=ModelEntry(
            name="tiny", architecture="Tiny", fingerprint="f", dtype="f32", vocab_size=8, hidden_size=8,
            num_layers=1, config={},
        ),  # fmt: skip
        target=TargetEntry(name=target.name, features=list(target.features)),
        toolchain={"torch": torch_version(), "compiler": "12", "codegen": "1"},
        pipeline=["split"],
        options={"dtype": "float32"},
        limits=Limits(max_num_batched_tokens=64, max_model_len=128),
        pieces=[
            PieceEntry(
                name="only", key="ab" * 32, layers=[0], ir=writer.add_bytes("ir/pieces/only.ir", PIECE_IR.encode()),
                ranges=[
                    RangeEntry(
                        start=1, end=64, key="cd" * 32, format="ir",
                        file=writer.add_bytes("pieces/only-1-64.ir", PIECE_IR.encode()),
                    )
                ],
                tokens_from=(0, 0), num_inputs=1, num_params=1, num_outputs=1,
            )
        ],  # fmt: skip
        program=Program(
            inputs=["x"],
            outputs=["y"],
            steps=[
                Step(kind="op", op="attention", inputs=["x"], outputs=["a"], attrs={"layer": 0}),
                Step(kind="piece", piece="only", inputs=["a"], params=["w"], outputs=["y"]),
            ],
            kv_layers=[KVLayer(layer=0, num_kv_heads=1, head_size=8)],
        ),
        weights=WeightsEntry(
            stored=True,
            tensors=[
                WeightEntry(
                    name="w", dtype="f32", shape=[8, 8], recipe='load("w")',
                    file=writer.add_bytes("weights/weights-00000.safetensors", b"weights of no format"),
                )
            ],
        ),  # fmt: skip
        native=[NativeEntry(name="lib", file=writer.add_bytes("native/lib.so", b"machine code"), key="ef" * 32)],
        tokenizer=[writer.add_bytes("tokenizer/tokenizer.json", b"{}")],
        stages=[writer.add_bytes("ir/00-traced.ir", PIECE_IR.encode())],
        reports=[writer.add_bytes("reports/passes.json", b"[]")],
        settings=[],
        times=[],
        files=[],
    )


MakeBundle = Callable[..., Path]


@pytest.fixture
def make_bundle(tmp_path: Path) -> MakeBundle:
    """Writes a small bundle whose one piece is IR text."""

    def make(
        name: str = "tiny.bundle", *, change: Callable[[Manifest], None] | None = None, sign: Path | None = None,
        force: bool = False,
    ) -> Path:  # fmt: skip
        with writing_bundle(tmp_path / name, force=force) as writer:
            manifest = make_manifest(writer)
            if change is not None:
                change(manifest)
            return writer.finish(manifest, sign)

    return make
