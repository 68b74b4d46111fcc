"""Last steps of a trace: dead code goes, and every attention gets its KV cache and the batch as graph inputs."""

from __future__ import annotations

from treadle.ir.graph import Graph, Value
from treadle.ir.ops.registry import get_op
from treadle.ir.types import StateType, TensorType


def drop_dead(graph: Graph) -> None:
    """Removes nodes and params that neither an output nor a node with effects needs."""
    needed = set(graph.outputs)
    kept = []
    for node in reversed(graph.nodes):
        if needed.intersection(node.results) or not get_op(node.op).pure:
            kept.append(node)
            needed.update(node.inputs())
    graph.nodes = kept[::-1]
    graph.params = [param for param in graph.params if param in needed]


def add_state(graph: Graph) -> None:
    """Adds inputs `kv.<layer>` (heads, key size, and value size if it differs) and `batch`, and binds them."""
    attentions = [node for node in graph.nodes if node.op == "attention"]
    batch = Value(graph.fresh_name("batch"), StateType("batch"))
    for node in attentions:
        key, value = node.operand("k"), node.operand("v")
        assert key is not None and value is not None
        assert isinstance(key.type, TensorType) and isinstance(value.type, TensorType)
        _, heads, key_size = key.type.at(1)
        value_size = value.type.at(1)[2]
        sizes = (heads, key_size) if value_size == key_size else (heads, key_size, value_size)
        cache = Value(graph.fresh_name(f"kv.{node.attrs['layer']}"), StateType("kv", sizes))
        graph.inputs.append(cache)
        given = node.operands | {"cache": cache, "batch": batch}
        node.operands = {name: given[name] for name in get_op("attention").tensors if name in given}
    if attentions:
        graph.inputs.append(batch)
