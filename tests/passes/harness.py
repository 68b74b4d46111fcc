"""One way to test any pass: text before and after, counts, a second run, and outputs through the references."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from treadle.ir.graph import Graph, Param
from treadle.ir.interpret import run
from treadle.ir.text import parse_graph
from treadle.ir.tolerance import REWRITE, relative_error
from treadle.ir.types import StateType, TensorType
from treadle.ir.verify import verify
from treadle.ir.weights import Literal, Load, Quantize
from treadle.passes.base import Pass, PassReport
from treadle.passes.split import SplitGraph, run_split

GOLDEN = Path(__file__).parent.parent / "golden"
ARCHITECTURES = (
    "llama mistral qwen2 qwen3 gemma2 gemma3 phi3 gpt2 olmo2 mixtral qwen3_moe "
    "gptj gpt_neox qwen2_moe deepseek_v3".split()
)
TOKENS = 11


@dataclass(frozen=True)
class Case:
    """A pass on a small graph. `before` is its text; the text after stands in `golden/passes/<name>.ir`."""

    name: str
    step: Pass
    counts: dict[str, int]
    before: str

    @property
    def golden(self) -> Path:
        return GOLDEN / "passes" / f"{self.name}.ir"


@dataclass(frozen=True)
class Refusal:
    """A pass on a graph that must not match, and words of the reason it gives (none if it is not even near)."""

    name: str
    step: Pass
    reason: str
    before: str


def apply(step: Pass, text: str) -> tuple[Graph, PassReport]:
    graph = parse_graph(text)
    verify(graph)
    report = step.run(graph)
    verify(graph, after=step.name)
    return graph, report


@cache
def traced_text(architecture: str, dtype: str = "f32") -> str:
    return (GOLDEN / "traced" / f"{architecture}-{dtype}.ir").read_text()


def traced(architecture: str, dtype: str = "f32") -> Graph:
    """A traced graph whose weights are loads under the parameter's own name, so that they can be drawn at random."""
    graph = parse_graph(traced_text(architecture, dtype))
    for param in graph.params:
        if not isinstance(param.recipe, Literal):
            param.recipe = Load(param.name)
    return graph


class Weights:
    """Checkpoint tensors drawn from a seed, of the shapes that `graph` loads."""

    def __init__(self, graph: Graph, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {}
        for param in graph.params:
            if not isinstance(param.type, TensorType):
                continue
            drawn = torch.randn(param.type.at(TOKENS), generator=generator) * 0.1
            if isinstance(param.recipe, Load):
                self.tensors[param.recipe.name] = drawn.to(param.type.dtype.torch)
            elif isinstance(param.recipe, Quantize) and isinstance(param.recipe.of, Load):
                self.tensors[param.recipe.of.name] = drawn

    def of(self, params: list[Param]) -> list[torch.Tensor]:
        return [param.recipe.evaluate(self.tensors.__getitem__) for param in params]


def example_inputs(graph: Graph, seed: int = 1) -> dict[str, Any]:
    """Values for every input by name: small ids for integers, None for state."""
    generator = torch.Generator().manual_seed(seed)
    inputs: dict[str, Any] = {}
    for value in graph.inputs:
        if isinstance(value.type, StateType):
            inputs[value.name] = None
        elif value.type.dtype == "i64":
            inputs[value.name] = torch.arange(TOKENS).expand(value.type.at(TOKENS))
        else:
            drawn = torch.randn(value.type.at(TOKENS), generator=generator)
            inputs[value.name] = drawn.to(value.type.dtype.torch)
    return inputs


def outputs(graph: Graph, weights: Weights, inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    return run(graph, [inputs[value.name] for value in graph.inputs], weights.of(graph.params))


def split_outputs(program: SplitGraph, weights: Weights, inputs: dict[str, Any]) -> torch.Tensor:
    named = {
        param.name: tensor for param, tensor in zip(program.params, weights.of(program.params), strict=True)
    }
    return run_split(program, inputs, named)[0]


def assert_same(wanted: torch.Tensor, given: torch.Tensor, *, exact: bool, dtype: str = "f32") -> None:
    assert wanted.dtype == given.dtype and wanted.shape == given.shape
    if exact:
        assert torch.equal(wanted, given), f"differs by {(wanted.double() - given.double()).abs().max()}"
        return
    error = relative_error(wanted, given)
    assert error <= REWRITE[dtype], f"differs by {error} of the largest output"


def match_counts(reports: list[PassReport]) -> dict[str, dict[str, int]]:
    """Counts by kind of the passes that name or join ops."""
    wanted = ("raise_", "fuse_", "join_", "sink_", "select_", "fold_", "eliminate_no_ops")
    return {r.name: dict(sorted(r.counts.items())) for r in reports if r.name.startswith(wanted) and r.counts}


def golden_json(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text())
