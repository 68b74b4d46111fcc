"""The whole pipeline on traced graphs of every architecture the main job promises (acceptance 3)."""

from __future__ import annotations

from functools import cache

import msgspec
import pytest
import torch

from tests.passes.harness import (
    ARCHITECTURES,
    TOKENS,
    Weights,
    assert_same,
    example_inputs,
    golden_json,
    match_counts,
    outputs,
    split_outputs,
    traced,
)
from treadle.codegen.program import Program, check_program
from treadle.ir.verify import verify
from treadle.passes.pipeline import (
    CompiledStages,
    PipelineOptions,
    clean_passes,
    fuse_passes,
    last_passes,
    raise_passes,
    run_pipeline,
)
from treadle.passes.steps import kv_layers, program_inputs, program_steps

BF16 = ("llama", "gemma3", "olmo2", "qwen3_moe")


@cache
def compiled(architecture: str, dtype: str = "f32", level: int = 2) -> CompiledStages:
    return run_pipeline(traced(architecture, dtype), PipelineOptions(level=level))


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_program_equals_traced_graph(architecture: str, level: int) -> None:
    """Pieces and op steps give the traced graph's logits, for all rows and for a choice of rows."""
    stages = compiled(architecture, level=level)
    weights, inputs = Weights(stages.traced), example_inputs(stages.traced)
    (wanted,) = outputs(stages.traced, weights, inputs)
    for rows in (torch.arange(TOKENS), torch.tensor([TOKENS - 1, 2])):
        given = split_outputs(stages.unified, weights, {**inputs, "logit_rows": rows})
        assert_same(wanted[rows], given, exact=False)


@pytest.mark.parametrize("architecture", BF16)
def test_bfloat16(architecture: str) -> None:
    """In bfloat16 the same patterns match (casts are in other places) and the logits agree within tolerance."""
    stages = compiled(architecture, "bf16")
    names = (
        "raise_rms_norm",
        "raise_rope",
        "raise_gated_act",
        "fuse_add_rms_norm",
        "fuse_qkv",
        "fuse_gate_up",
    )
    wanted = {r.name: r.matched for r in compiled(architecture).reports if r.name in names}
    assert {r.name: r.matched for r in stages.reports if r.name in names} == wanted
    weights, inputs = Weights(stages.traced), example_inputs(stages.traced)
    (logits,) = outputs(stages.traced, weights, inputs)
    given = split_outputs(stages.unified, weights, {**inputs, "logit_rows": torch.arange(TOKENS)})
    assert_same(logits, given, exact=False, dtype="bf16")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_match_counts_and_pieces(architecture: str) -> None:
    """What each pass finds in three layers, and the unique pieces, stand in `golden/match_counts.json`."""
    stages = compiled(architecture)
    given = {"pieces": list(stages.unified.pieces), "matches": match_counts(stages.reports)}
    assert given == golden_json("match_counts.json")[architecture]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_pass_keeps_outputs(architecture: str) -> None:
    """Every pass of the pipeline in turn: bitwise for exact ones, within tolerance for the others."""
    graph = traced(architecture)
    weights, inputs = Weights(graph), {**example_inputs(graph), "logit_rows": torch.arange(TOKENS)}
    (before,) = outputs(graph, weights, inputs)
    for step in [*clean_passes(), *raise_passes(), *fuse_passes(), *last_passes()]:
        if step.run(graph).matched:
            verify(graph, after=step.name)
            (after,) = outputs(graph, weights, inputs)
            assert_same(before, after, exact=step.tier == "exact")
            before = after


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_steps_fit_the_stored_program(architecture: str) -> None:
    """The plain steps convert one to one to the stored program, which checks out."""
    unified = compiled(architecture).unified
    program = msgspec.convert(
        {
            "inputs": program_inputs(unified),
            "outputs": [value.name for value in unified.outputs],
            "steps": [vars(step) for step in program_steps(unified)],
            "kv_layers": [vars(layer) for layer in kv_layers(unified)],
        },
        Program,
    )
    check_program(program)
    assert msgspec.json.decode(msgspec.json.encode(program), type=Program) == program
    assert program.inputs == ["input_ids", "positions", "logit_rows"]
    assert set(program.piece_names()) == set(unified.pieces)
    assert len(program.kv_layers) == 3


def test_windows_and_soft_caps_reach_the_steps() -> None:
    """Gemma 2 alternates windows and caps its scores; both stand in the attention steps and KV layers."""
    unified = compiled("gemma2").unified
    steps = [step for step in program_steps(unified) if step.op == "attention"]
    assert [layer.window for layer in kv_layers(unified)] == [8, None, 8]
    assert {step.attrs["softcap"] for step in steps} == {5.0}
    assert {(s.attrs["num_heads"], s.attrs["num_kv_heads"], s.attrs["head_size"]) for s in steps} == {
        (4, 2, 32)
    }


def test_operands_of_other_op_steps_are_named() -> None:
    """An op step that is neither attention nor select_rows says which operand each value is."""
    step = next(step for step in program_steps(compiled("mixtral").unified) if step.op == "moe")
    assert step.attrs["operands"] == ["x", "router", "gate_up", "down"]
    assert len(step.inputs) == 1 and len(step.params) == 3 and step.attrs["act"] == "silu"
