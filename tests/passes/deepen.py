"""Makes a traced graph deeper by repeating its second layer, so that depth can be tested without tracing again."""

from __future__ import annotations

import re

from treadle.ir.graph import Graph, Node, Param, Value
from treadle.ir.types import StateType
from treadle.ir.weights import Load

LAYER = "model.layers.1"


def deepen(graph: Graph, layers: int) -> Graph:
    """A copy of a three-layer graph with `layers` layers (at least 3): the second layer repeated, with own weights."""
    twin = graph.copy()
    block = [node for node in twin.nodes if re.match(rf"{re.escape(LAYER)}(\.|$)", node.source.path)]
    begin = next(i for i, node in enumerate(twin.nodes) if node is block[0])
    assert twin.nodes[begin : begin + len(block)] == block, "the layer's nodes do not stand together"
    made = {value for node in block for value in node.results}
    later = twin.nodes[begin + len(block) :]
    (leaves,) = {value for node in later for value in node.inputs() if value in made}
    enters = twin.nodes[begin - 1].result
    copies: list[Node] = []
    current = leaves
    for extra in range(3, layers):
        nodes, current = _repeat(twin, block, {enters: current}, leaves, extra)
        copies += nodes
    for node in later:
        node.replace_operands(lambda value: current if value is leaves else value)
    twin.nodes[begin + len(block) : begin + len(block)] = copies
    return twin


def _repeat(
    graph: Graph, block: list[Node], twins: dict[Value, Value], leaves: Value, index: int
) -> tuple[list[Node], Value]:
    """The block once more as layer `index`, with its entry swapped by `twins`."""

    def twin(value: Value) -> Value:
        if value not in twins and isinstance(value, Param) and LAYER in value.name:
            name = value.name.replace(LAYER, f"model.layers.{index}")
            twins[value] = Param(name, value.type, recipe=Load(name))
            graph.params.append(twins[value])  # type: ignore[arg-type]
        if value not in twins and isinstance(value.type, StateType) and value.name.startswith("kv."):
            twins[value] = Value(f"kv.{index}", value.type)
            graph.inputs.append(twins[value])
        return twins.get(value, value)

    nodes = []
    for node in block:
        copied = Node(node.op, dict(node.operands), dict(node.attrs), source=node.source)
        copied.replace_operands(twin)
        if "layer" in copied.attrs:
            copied.attrs["layer"] = index
        copied.results = tuple(Value(f"{value.name}.of{index}", value.type, copied) for value in node.results)
        twins.update(zip(node.results, copied.results, strict=True))
        nodes.append(copied)
    return nodes, twins[leaves]
