"""Runs any rewritten form of one graph on the same seeded weights and inputs, and says how far outputs are apart."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from treadle.ir.errors import VerifyError
from treadle.ir.graph import Graph, Value
from treadle.ir.interpret import call, run, token_count
from treadle.ir.tolerance import REWRITE, relative_error
from treadle.ir.types import TensorType
from treadle.passes.seeded import SeededWeights, pick, seeded_inputs

TOKENS = 11
_LOOKUPS = ("embedding", "aten.embedding.default")


@dataclass(frozen=True)
class Difference:
    """The output that differs most: its name, largest absolute difference and that relative to its largest element."""

    output: str
    max_abs: float
    relative: float
    bitwise: bool

    def __str__(self) -> str:
        if self.bitwise:
            return "bitwise equal"
        return f"%{self.output} differs by {self.max_abs:.3g} (relative to its largest element: {self.relative:.3g})"


class SeededRun:
    """What every form of `graph` is run on: weights seeded by recipe and shape, inputs by name, for a token count."""

    def __init__(self, graph: Graph, *, tokens: int = TOKENS, seed: int = 0):
        low, high = graph.tokens
        if not low <= tokens <= high:
            raise VerifyError(f"{tokens} tokens are outside the graph's range; choose from {low} to {high}")
        self._weights = SeededWeights(graph, seed)
        self._tokens = tokens
        self._seed = seed
        self._vocabulary = _smallest_table(graph) or tokens

    def outputs(self, graph: Graph) -> tuple[torch.Tensor, ...]:
        """The graph's outputs. Logits are asked for of every row."""
        return run(graph, self._inputs(graph), self._weights.of(graph.params))

    def values(self, graph: Graph) -> dict[str, torch.Tensor]:
        """Every value that a node makes, by name, in order."""
        inputs = self._inputs(graph)
        known: dict[Value, Any] = dict(zip(graph.inputs, inputs, strict=True))
        known.update(zip(graph.params, self._weights.of(graph.params), strict=True))
        tokens = token_count(graph, inputs)
        for node in graph.nodes:
            known.update(zip(node.results, call(node, known, tokens), strict=True))
        return {value.name: known[value] for node in graph.nodes for value in node.results}

    def _inputs(self, graph: Graph) -> list[Any]:
        return pick(seeded_inputs(graph.inputs, self._tokens, self._vocabulary, self._seed), graph.inputs)


def _smallest_table(graph: Graph) -> int | None:
    """Rows of the smallest table that ids are looked up in."""
    tables = [next(node.inputs()).type for node in graph.nodes if node.op in _LOOKUPS]
    return min((kind.at(1)[0] for kind in tables if isinstance(kind, TensorType)), default=None)


def compare(
    graph: Graph, wanted: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
) -> Difference:
    """The largest difference of `given`, outputs of `graph`, to `wanted`. Another number of outputs is infinite."""
    if len(wanted) != len(given):
        return Difference(f"({len(given)} outputs for {len(wanted)})", float("inf"), float("inf"), False)
    found = [
        Difference(value.name, _max_abs(a, b), relative_error(a, b), _same_bits(a, b))
        for value, a, b in zip(graph.outputs, wanted, given, strict=True)
    ]
    return max(found, key=lambda item: (not item.bitwise, item.relative))


def tolerance_of(graph: Graph) -> float:
    """The table's relative tolerance for the coarsest element type among the outputs; 0 for whole numbers."""
    kinds = [value.type.dtype for value in graph.outputs if isinstance(value.type, TensorType)]
    return max((REWRITE.get(str(kind), 0.0) for kind in kinds), default=0.0)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8)) if a.numel() else True


def _max_abs(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if _same_bits(a, b):
        return 0.0
    error = (a.double() - b.double()).abs().max().item()
    return error if error == error else float("inf")


def describe(name: str, tensor: torch.Tensor) -> str:
    """One line: shape, a digest of the bytes, and smallest, mean and largest element."""
    kind = str(tensor.dtype).removeprefix("torch.")
    digest = hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:12]
    wide = tensor.double()
    numbers = f"min {wide.min():.4g}, mean {wide.mean():.4g}, max {wide.max():.4g}" if tensor.numel() else "empty"
    return f"%{name}: {kind}{list(tensor.shape)}  sha256 {digest}  {numbers}"
