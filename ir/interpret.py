"""Runs a graph op by op through the eager references: the meaning that every backend must reproduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from treadle.ir.errors import VerifyError
from treadle.ir.graph import Graph, Node, Value
from treadle.ir.group import Group
from treadle.ir.ops.registry import get_op
from treadle.ir.types import DType, T, TensorType, evaluate


def run(
    graph: Graph, inputs: Sequence[Any], params: Sequence[torch.Tensor], group: Group | None = None
) -> tuple[Any, ...]:
    """Evaluates `graph`. State inputs (KV cache, batch) may be None: attention then sees one sequence.

    A graph with collectives is one rank's: `group` reaches the others (see ir/group.py).
    """
    if len(inputs) != len(graph.inputs) or len(params) != len(graph.params):
        raise VerifyError(
            f"graph {graph.name} takes {len(graph.inputs)} inputs and {len(graph.params)} params, "
            f"got {len(inputs)} and {len(params)}"
        )
    values: dict[Value, Any] = dict(zip(graph.inputs, inputs, strict=True))
    values.update(zip(graph.params, params, strict=True))
    tokens = token_count(graph, inputs)
    for node in graph.nodes:
        results = call(node, values, tokens, group)
        values.update(zip(node.results, results, strict=True))
    return tuple(values[value] for value in graph.outputs)


def call(node: Node, values: dict[Value, Any], tokens: Any, group: Group | None = None) -> tuple[Any, ...]:
    """Evaluates one node through its reference."""
    op = get_op(node.op)
    arguments: dict[str, Any] = {}
    for name, operand in node.operands.items():
        arguments[name] = [values[v] for v in operand] if isinstance(operand, tuple) else values[operand]
    for name, attr in node.attrs.items():
        arguments[name] = concrete(attr, tokens)
    if op.collective:
        arguments["group"] = group
    out = op.reference(**arguments)
    return tuple(out) if isinstance(out, tuple | list) else (out,)


def concrete(attr: Any, tokens: Any) -> Any:
    """An attribute as torch takes it: dtypes as torch.dtype, expressions over T as numbers."""
    if isinstance(attr, DType):
        return attr.torch
    if isinstance(attr, sympy.Expr):
        return evaluate(attr, tokens)
    if isinstance(attr, list | tuple):
        return [concrete(item, tokens) for item in attr]
    return attr


def token_count(graph: Graph, inputs: Sequence[Any]) -> Any:
    """T as the inputs have it (an int, or a SymInt while tracing); 0 for a graph without a symbolic input."""
    for value, given in zip(graph.inputs, inputs, strict=True):
        if isinstance(value.type, TensorType):
            for axis, dim in enumerate(value.type.shape):
                if dim == T:
                    return given.shape[axis]
    return 0


class GraphModule(torch.nn.Module):
    """A graph as a module: `forward(*inputs, *params)` returns a tuple. torch.export can trace it."""

    def __init__(self, graph: Graph):
        super().__init__()
        self.graph = graph

    def forward(self, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = len(self.graph.inputs)
        return run(self.graph, arguments[:count], arguments[count:])


def as_module(graph: Graph) -> GraphModule:
    return GraphModule(graph)
