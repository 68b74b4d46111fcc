"""Makes nodes with inferred result types, so that a pass writes `call("rms_norm", x, w, eps=1e-5)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.ir.graph import Graph, Node, Operand, Source, Value
from treadle.ir.infer import infer
from treadle.ir.ops.registry import get_op

NO_SOURCE = Source()


def make_node(
    graph: Graph,
    op: str,
    *operands: Operand | Sequence[Value] | None,
    source: Source = NO_SOURCE,
    names: Sequence[str] = (),
    **attrs: Any,
) -> Node:
    """A node that is not yet in `graph`. Operands follow the schema's order; None leaves one out.

    Keyword arguments that name a tensor of the schema are operands too. `names` suggests the results' names.
    """
    row = get_op(op)
    bound: dict[str, Operand] = {}
    for name, operand in zip(row.tensors, operands, strict=False):
        if operand is not None:
            bound[name] = operand if isinstance(operand, Value) else tuple(operand)
    for name in row.tensors:
        if isinstance(attrs.get(name), Value | tuple):
            bound[name] = attrs.pop(name)
        elif name in attrs and attrs[name] is None:
            attrs.pop(name)
    ordered = {name: bound[name] for name in row.tensors if name in bound}
    node = Node(op, ordered, normal_attrs(op, attrs), source=source)
    types = infer(op, ordered, node.attrs)
    hints = list(names) or [op.split(".")[1] if op.startswith("aten.") else op]
    hints += [hints[-1]] * (len(types) - len(hints))
    taken = {value.name for value in graph.values()}
    results = []
    for hint, kind in zip(hints, types, strict=True):
        name, number = hint, 0
        while name in taken:
            number += 1
            name = f"{hint}.{number}"
        taken.add(name)
        results.append(Value(name, kind, node))
    node.results = tuple(results)
    return node


def normal_attrs(op: str, attrs: dict[str, Any]) -> dict[str, Any]:
    """Attributes in schema order, without those that equal the schema's default; tuples become lists."""
    row = get_op(op)
    order = {name: position for position, name in enumerate((*row.attributes, *row.tensors))}
    kept = {}
    for name in sorted(attrs, key=lambda item: order.get(item, len(order))):
        value = attrs[name]
        value = list(value) if isinstance(value, tuple) else value
        if name in row.defaults and row.defaults[name] == value and type(row.defaults[name]) is type(value):
            continue
        kept[name] = value
    return kept
