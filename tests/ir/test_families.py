"""Every architecture traces to a graph that computes what transformers computes (issue: models, acceptance 3)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.ir.families import FAMILIES, VOCAB, save_model
from treadle.ir.graph import Graph
from treadle.ir.interpret import run
from treadle.ir.loader import load_params
from treadle.ir.ops.registry import get_op
from treadle.ir.source import open_source
from treadle.ir.text import parse_graph, print_graph
from treadle.ir.trace import trace, unused_tensors
from treadle.ir.types import StateType
from treadle.ir.verify import verify

pytestmark = pytest.mark.slow


@dataclass
class Traced:
    name: str
    model: Any
    graph: Graph
    params: list[torch.Tensor]
    unused: list[str]

    def logits(self, graph: Graph, ids: torch.Tensor) -> torch.Tensor:
        state = [None for value in graph.inputs if isinstance(value.type, StateType)]
        with torch.no_grad():
            return run(graph, [ids, torch.arange(len(ids)), *state], self.params)[0]


@pytest.fixture(scope="module", params=FAMILIES)
def traced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    folder = tmp_path_factory.mktemp(request.param)
    model = save_model(request.param, folder)
    source = open_source(folder)
    graph = trace(source, max_tokens=64)
    params = [value for _, value in load_params(graph.params, source)]
    yield Traced(request.param, model, graph, params, unused_tensors(graph, source))


def token_ids(count: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("tokens", [1, 7, 33])
def test_logits_equal_transformers(traced: Traced, tokens: int) -> None:
    """Float32 logits within 1e-4 of the model's own, at one token, few, and more than a window."""
    ids = token_ids(tokens)
    with torch.no_grad():
        expected = traced.model(ids[None], use_cache=False).logits[0]
    actual = traced.logits(traced.graph, ids)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))


def test_text_form_round_trips(traced: Traced) -> None:
    """Printing, parsing and printing again changes nothing, and the parsed graph computes the same bits."""
    text = print_graph(traced.graph)
    parsed = parse_graph(text)
    verify(parsed)
    assert print_graph(parsed) == text
    assert [p.recipe for p in parsed.params] == [p.recipe for p in traced.graph.params]
    ids = token_ids(9)
    assert torch.equal(traced.logits(parsed, ids), traced.logits(traced.graph, ids))


def test_graph_has_the_agreed_form(traced: Traced) -> None:
    """Inputs, state, windows; every op known and pure but attention; every node inside a layer has a source."""
    family = FAMILIES[traced.name]
    graph = traced.graph
    layers = len(family.windows)
    assert [v.name for v in graph.inputs] == [
        "input_ids",
        "positions",
        *(f"kv.{i}" for i in range(layers)),
        "batch",
    ]
    attentions = [node for node in graph.nodes if node.op == "attention"]
    assert tuple(node.attrs.get("window") for node in attentions) == family.windows
    assert [node.attrs["layer"] for node in attentions] == list(range(layers))
    assert str(graph.outputs[0].type) == f"f32[T,{VOCAB}]"
    assert all(get_op(node.op).pure for node in graph.nodes if node.op != "attention")
    inside = [node for node in graph.nodes if ".0." in node.source.path]
    assert len(inside) > 20
    lines = {node.source.line for node in inside}
    assert all(re.fullmatch(r"(modeling_\w+|activations|pytorch_utils)\.py:\d+", line) for line in lines), (
        lines
    )


def test_every_checkpoint_tensor_is_used(traced: Traced) -> None:
    """Nothing in the checkpoint is silently left out."""
    assert traced.unused == []
