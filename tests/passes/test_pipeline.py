"""The pipeline's options, its observer, and canonical form as a property."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.passes.harness import traced
from treadle.ir.build import make_node
from treadle.ir.errors import ConfigError, VerifyError
from treadle.ir.graph import Graph, Value
from treadle.ir.interpret import run
from treadle.ir.text import print_graph
from treadle.ir.types import T, tensor
from treadle.ir.verify import verify
from treadle.passes.base import Pass, PassReport, Tier, run_passes
from treadle.passes.library.canonicalise import Canonicalise
from treadle.passes.pipeline import PipelineOptions, known_passes, run_pipeline


def test_the_traced_graph_stays_as_it_is() -> None:
    """Passes work on copies; the traced stage still prints as before."""
    graph = traced("llama")
    text = print_graph(graph)
    assert run_pipeline(graph).texts()["traced"] == text == print_graph(graph)


def test_level_zero_only_cleans_and_selects() -> None:
    """At level 0 nothing is raised or fused, yet the pieces are shared."""
    stages = run_pipeline(traced("llama"), PipelineOptions(level=0))
    assert not [r.name for r in stages.reports if r.name.startswith(("raise", "fuse"))]
    assert any(node.op == "aten.rsqrt.default" for node in stages.fused.nodes)
    assert list(stages.unified.pieces) == ["first", "layer", "last", "logits"]


def test_a_pass_can_be_left_out() -> None:
    """`without` drops a pass everywhere; an unknown name is refused with the list of names."""
    stages = run_pipeline(traced("llama"), PipelineOptions(without=("fuse_qkv",)))
    assert "fuse_qkv" not in [r.name for r in stages.reports]
    assert not any("qkv" in param.name for param in stages.fused.params)
    with pytest.raises(ConfigError, match=r"unknown pass 'fuse_everything'.*raise_rope"):
        run_pipeline(traced("llama"), PipelineOptions(without=("fuse_everything",)))
    with pytest.raises(ConfigError, match=r"'select_logit_rows' cannot be left out"):
        run_pipeline(traced("llama"), PipelineOptions(without=("select_logit_rows",)))


def test_the_observer_sees_every_change() -> None:
    """It is called with the graph after each pass that matched, in order."""
    seen: list[tuple[str, str]] = []
    run_pipeline(traced("llama"), observe=lambda name, graph: seen.append((name, print_graph(graph))))
    assert [name for name, _ in seen][:2] == ["canonicalise", "drop_batch_dim"]
    assert all(one != other for (_, one), (_, other) in pairwise(seen))
    assert {name for name, _ in seen} <= set(known_passes())


class _Breaks(Pass):
    """Gives a result a type it does not have."""

    name: ClassVar[str] = "breaks"
    tier: ClassVar[Tier] = "exact"

    def run(self, graph: Graph) -> PassReport:
        graph.nodes[-1].results[0].type = tensor("f32", (T, 3))
        report = self.report()
        report.count("broken")
        return report


def test_a_pass_that_breaks_a_rule_is_named() -> None:
    """The verifier runs after each pass and says which one it was."""
    with pytest.raises(VerifyError, match="after breaks"):
        run_passes(traced("llama"), [_Breaks()])


_MOVES = st.sampled_from(["transpose", "unsqueeze", "squeeze", "flatten", "split", "cast", "slice", "one"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(_MOVES, st.integers(0, 3), st.integers(0, 3)), max_size=10))
def test_canonical_form_keeps_every_bit(moves: list[tuple[str, int, int]]) -> None:
    """Any chain of views: equal outputs, nothing left for a second run, no two views in a row of one kind."""
    graph = _chain(moves)
    x = torch.arange(5 * 24, dtype=torch.float32).reshape(5, 2, 12)
    (before,) = run(graph, [x], [])
    Canonicalise().run(graph)
    verify(graph, after="canonicalise")
    (after,) = run(graph, [x], [])
    assert torch.equal(before, after)
    assert Canonicalise().run(graph).matched == 0
    for node in graph.nodes:
        above = next(node.inputs()).producer
        assert above is None or above.op != node.op or node.op == "aten.slice.Tensor"


def _chain(moves: list[tuple[str, int, int]]) -> Graph:
    """A graph of one view after another on f32[T,2,12]; moves that do not apply are left out."""
    x = Value("x", tensor("f32", (T, 2, 12)))
    graph = Graph("chain", [x], outputs=[x])
    for kind, a, b in moves:
        value = graph.outputs[0]
        shape = value.type.shape  # type: ignore[union-attr]
        rank = len(shape)
        a, b = a % rank, b % rank
        calls = {
            "transpose": ("aten.transpose.int", {"dim0": a, "dim1": b}),
            "unsqueeze": ("aten.unsqueeze.default", {"dim": a}),
            "squeeze": ("aten.squeeze.dim", {"dim": a}),
            "flatten": ("aten.flatten.using_ints", {"start_dim": min(a, b), "end_dim": max(a, b)}),
            "split": ("aten.unflatten.int", {"dim": a, "sizes": [2, -1]}),
            "cast": ("aten.to.dtype", {"dtype": value.type.dtype}),  # type: ignore[union-attr]
            "slice": ("aten.slice.Tensor", {"dim": a, "start": 0, "end": 9223372036854775807}),
            "one": ("aten.mul.Tensor", {"other": 1}),
        }
        name, attrs = calls[kind]
        symbolic = [axis for axis, dim in enumerate(shape) if not isinstance(dim, int)]
        if kind == "split" and (not isinstance(shape[a], int) or shape[a] % 2):
            continue
        if kind == "flatten" and any(min(a, b) <= axis <= max(a, b) for axis in symbolic):
            continue
        node = make_node(graph, name, value, **attrs)
        graph.nodes.append(node)
        graph.outputs = [node.result]
    return graph
