"""Splitting and sharing of pieces: their number does not grow with depth (acceptance 4)."""

from __future__ import annotations

import time

import pytest

from tests.passes.deepen import deepen
from tests.passes.harness import Weights, assert_same, example_inputs, outputs, split_outputs, traced
from treadle.ir.errors import VerifyError
from treadle.ir.hashing import structural_hash
from treadle.ir.text import parse_graph
from treadle.passes.pipeline import PipelineOptions, run_pipeline
from treadle.passes.split import OpCall, SplitGraph, split, verify_split
from treadle.passes.split_text import parse_split, print_split
from treadle.passes.unify import unify


def _unified(layers: int, level: int = 2) -> SplitGraph:
    return run_pipeline(deepen(traced("llama"), layers), PipelineOptions(level=level)).unified


@pytest.mark.parametrize("level", [0, 2])
def test_unique_pieces_do_not_grow_with_depth(level: int) -> None:
    """Four pieces, the same ones, for 3, 30 and 60 layers."""
    hashes = []
    for layers in (3, 30, 60):
        unified = _unified(layers, level)
        assert list(unified.pieces) == ["first", "layer", "last", "logits"]
        assert sum(call.piece == "layer" for call in unified.calls()) == layers - 1
        hashes.append({name: structural_hash(piece) for name, piece in unified.pieces.items()})
    assert hashes[0] == hashes[1] == hashes[2]


def test_deep_graph_keeps_outputs() -> None:
    """Each call of the shared piece passes its own layer's weights."""
    graph = deepen(traced("llama"), 6)
    weights, inputs = Weights(graph), example_inputs(graph)
    (wanted,) = outputs(graph, weights, inputs)
    rows = {**inputs, "logit_rows": inputs["positions"]}
    assert_same(wanted, split_outputs(run_pipeline(graph).unified, weights, rows), exact=False)


def test_pipeline_time_is_linear() -> None:
    """Forty-five layers take less than six times what fifteen take (a quadratic pass would make it nine)."""

    def seconds(layers: int) -> float:
        graph = deepen(traced("llama"), layers)
        begin = time.process_time()
        run_pipeline(graph)
        return time.process_time() - begin

    seconds(3)
    shallow, deep = min(seconds(15) for _ in range(2)), min(seconds(45) for _ in range(2))
    assert deep < 6 * shallow, (shallow, deep)
    assert seconds(30) < 3


def test_angles_are_computed_once() -> None:
    """cos and sin are made in the first piece and passed to the others."""
    unified = _unified(4)
    having = [
        name for name, piece in unified.pieces.items() if any(n.op == "aten.cos.default" for n in piece.nodes)
    ]
    assert having == ["first"]


def test_norms_differ_pieces_differ() -> None:
    """One layer with another epsilon is another piece: equality is structural, not by position."""
    graph = deepen(traced("llama"), 5)
    path = "model.layers.1.post_attention_layernorm"
    next(n for n in graph.nodes if n.source.path == path and n.op == "aten.add.Tensor").attrs["other"] = 1e-3
    assert list(run_pipeline(graph).unified.pieces) == ["first", "layer", "layer_2", "last", "logits"]


_TWO = """graph @two(T in 1..64) {
  input %x: f32[T,2,4]
  param %a: f32[4] = load("a")
  param %b: f32[4] = load("b")
  %m: f32[T,2,4] = aten.mul.Tensor(%x, %a)
  %o: f32[T,2,4] = attention(%m, %m, %m, layer=0, scale=0.5)
  %n: f32[T,2,4] = aten.mul.Tensor(%o, %b)
  %p: f32[T,2,4] = attention(%n, %n, %m, layer=1, scale=0.5)
  return %p, %m
}
"""


def test_split_of_a_small_graph() -> None:
    """Values that cross become outputs and inputs, each piece holds its own weights, no piece is empty."""
    program = split(parse_graph(_TWO))
    assert [s.node.op if isinstance(s, OpCall) else s.piece for s in program.steps] == [
        "piece0",
        "attention",
        "piece1",
        "attention",
    ]
    first, second = program.calls()
    assert [v.name for v in first.outputs] == ["m"] and [p.name for p in first.params] == ["a"]
    assert [v.name for v in second.inputs] == ["o"] and [p.name for p in second.params] == ["b"]
    unified = unify(program)
    assert list(unified.pieces) == ["first"], "equal pieces share one definition wherever they stand"
    verify_split(unified)


def test_text_of_a_program() -> None:
    """A shared piece prints once, with arguments for weights; the calls say what they pass."""
    text = print_split(unify(split(parse_graph(_TWO))))
    assert text.count("graph @first") == 1 and "param %a: f32[4] = argument(position=0)" in text
    assert "%n: f32[T,2,4] = piece first(%o; %b)" in text
    assert print_split(parse_split(text)) == text


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("piece first(%o; %b)", "piece second(%o; %b)", "second"),
        ("piece first(%o; %b)", "piece first(%z; %b)", "z"),
        ("program @two", "programme @two", "expected `program"),
    ],
)
def test_damaged_text_is_refused(old: str, new: str, reason: str) -> None:
    """A program that names an unknown piece or value does not parse."""
    text = print_split(unify(split(parse_graph(_TWO))))
    with pytest.raises(VerifyError, match=reason):
        parse_split(text.replace(old, new))


def test_a_call_that_does_not_fit_is_refused() -> None:
    """The verifier compares each call with its piece."""
    program = unify(split(parse_graph(_TWO)))
    next(program.calls()).inputs.append(program.inputs[0])
    with pytest.raises(VerifyError, match="has inputs"):
        verify_split(program)
