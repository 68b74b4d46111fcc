"""The pass on a small graph: what it makes of it, that outputs agree, and when it leaves a graph alone."""

from __future__ import annotations

import pytest
import torch
from treadle_example_pass.fuse_swiglu_mlp import FuseSwigluMlp

from treadle.ir.interpret import run
from treadle.ir.text import parse_graph, print_graph
from treadle.ir.verify import verify

BEFORE = """graph @case(T in 1..64) {
  input %x: f32[T,8]
  param %gate_up: f32[12,8] = load("gate_up")
  param %down: f32[8,6] = load("down")
  %p: f32[T,12] = linear(%x, %gate_up)
  %g, %u: f32[T,6], f32[T,6] = split(%p, sizes=[6, 6])
  %a: f32[T,6] = gated_act(%g, %u, act='silu')
  %y: f32[T,8] = linear(%a, %down)
  return %y
}
"""
AFTER = """graph @case(T in 1..64) {
  input %x: f32[T,8]
  param %gate_up: f32[12,8] = load("gate_up")
  param %down: f32[8,6] = load("down")
  %swiglu_mlp: f32[T,8] = swiglu_mlp(%x, %gate_up, %down, slices=2)
  return %swiglu_mlp
}
"""


def test_text_counts_and_second_run() -> None:
    graph = parse_graph(BEFORE)
    report = FuseSwigluMlp().run(graph)
    verify(graph, after=report.name)
    assert report.counts == {"swiglu_mlp": 1}
    assert print_graph(graph) == AFTER
    assert FuseSwigluMlp().run(graph).matched == 0


@pytest.mark.parametrize("slices", [1, 2, 3])
def test_outputs_agree(slices: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, gate_up, down = (torch.randn(shape, generator=generator) for shape in ((5, 8), (12, 8), (8, 6)))
    graph = parse_graph(BEFORE)
    (wanted,) = run(graph, [x], [gate_up, down])
    FuseSwigluMlp(slices=slices).run(graph)
    (given,) = run(graph, [x], [gate_up, down])
    torch.testing.assert_close(given, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("old", "new", "slices", "reason"),
    [
        ("'silu'", "'gelu'", 2, "act must be 'silu', is 'gelu'"),
        ("", "", 4, "divide into 4 slices"),
    ],
)
def test_a_near_miss_says_why(old: str, new: str, slices: int, reason: str) -> None:
    report = FuseSwigluMlp(slices=slices).run(parse_graph(BEFORE.replace(old, new)))
    assert report.matched == 0 and reason in report.near_misses[0].predicate
