"""Canonical form and structural hash: equal for graphs that compute the same up to names, weights and sources."""

from __future__ import annotations

import hashlib

from treadle.ir.graph import Graph, Param, Value
from treadle.ir.text import print_graph
from treadle.ir.weights import Load


def canonical(graph: Graph) -> Graph:
    """A copy with positional names, no sources and anonymous weights, in the same program order."""
    twin = graph.copy()
    twin.name = "piece"
    for index, value in enumerate(twin.inputs):
        value.name = f"in{index}"
    for index, param in enumerate(twin.params):
        param.name, param.recipe = f"w{index}", Load(f"w{index}")
    number = 0
    for node in twin.nodes:
        for value in node.results:
            value.name, number = f"v{number}", number + 1
    return twin


def structural_hash(graph: Graph) -> str:
    """SHA-256 over the canonical text, as hex."""
    return hashlib.sha256(canonical_text(graph).encode()).hexdigest()


def canonical_text(graph: Graph) -> str:
    return print_graph(canonical(graph), sources=False)


__all__ = ["Param", "Value", "canonical", "canonical_text", "structural_hash"]
