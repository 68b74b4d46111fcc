"""Packed weights in the whole pipeline: every linear of every architecture, with the graph and the weight plan together."""

from __future__ import annotations

import pytest
import torch

from tests.passes.harness import ARCHITECTURES, Weights, assert_same, example_inputs, outputs, traced
from treadle.ir.packing import pack, packed_shape, unpack
from treadle.ir.weights import parse_recipe
from treadle.passes.pipeline import PipelineOptions, run_pipeline

SIZES = [(1, 1), (16, 32), (17, 33), (40, 24), (100, 64), (48, 31)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "size"), SIZES)
def test_packing_loses_nothing(dtype: torch.dtype, rows: int, size: int) -> None:
    """A weight comes back bit for bit, and what fills the panels up is zero."""
    weight = torch.randn(rows, size).to(dtype)
    packed = pack(weight)
    assert tuple(packed.shape) == packed_shape("f32" if dtype is torch.float32 else "bf16", rows, size)
    assert packed.is_contiguous() and torch.equal(unpack(packed, rows, size), weight)
    assert packed.count_nonzero() == weight.count_nonzero()


def test_a_recipe_rounds_before_it_packs() -> None:
    """The text form reads back; float32 of a checkpoint is rounded to the dtype of the layout."""
    recipe = parse_recipe('pack(load("w"), dtype=bf16)')
    assert str(recipe) == 'pack(load("w"), dtype=bf16)'
    weight = torch.randn(20, 40)
    assert torch.equal(unpack(recipe.evaluate({"w": weight}.__getitem__), 20, 40), weight.bfloat16())
    with pytest.raises(ValueError, match="f16 cannot be packed"):
        pack(weight.half())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_linear_of_an_architecture_is_packed(name: str) -> None:
    """Every linear of a [T, K] input, and the program computes the same within the table."""
    plain = run_pipeline(traced(name)).fused
    stages = run_pipeline(traced(name), PipelineOptions(pack=True))
    report = next(report for report in stages.reports if report.name == "prepack_weights")
    linears = [node for node in plain.nodes if node.op == "linear"]
    assert report.matched + len(report.near_misses) == len(linears) and report.matched > 0
    assert bool(report.near_misses) == (name == "deepseek_v3")  # whose latents have another shape
    assert sum(node.op == "linear" for node in stages.fused.nodes) == len(report.near_misses)
    weights, inputs = Weights(traced(name)), example_inputs(plain)
    for one, other in zip(outputs(plain, weights, inputs), outputs(stages.fused, weights, inputs), strict=True):
        assert_same(one, other, exact=False)


def test_level_0_and_a_pass_left_out_pack_nothing() -> None:
    """`pack` asks for it; level 0 and --disable-pass say no."""
    for options in (PipelineOptions(pack=True, level=0), PipelineOptions(pack=True, without=("prepack_weights",))):
        assert not any(node.op == "packed_linear" for node in run_pipeline(traced("llama"), options).fused.nodes)
