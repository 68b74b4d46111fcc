"""The graph: values in SSA form, nodes that call ops, parameters with weight recipes.

A graph is functional: no node changes a tensor. State (KV cache, batch) enters as inputs of their own types.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from treadle.ir.types import Type
from treadle.ir.weights import Recipe


@dataclass(frozen=True)
class Source:
    """Where a node came from: module path in the model and line of model source."""

    path: str = ""
    line: str = ""

    def __str__(self) -> str:
        return " | ".join(part for part in (self.path, self.line) if part)


@dataclass(eq=False)
class Value:
    """One SSA value. Identity is the object; the name is for people."""

    name: str
    type: Type
    producer: Node | None = field(default=None, repr=False)


@dataclass(eq=False)
class Param(Value):
    """A weight of the graph: what it is made of in the checkpoint."""

    recipe: Recipe = field(default=None, repr=False)  # type: ignore[assignment]


Operand = Value | tuple[Value, ...]


@dataclass(eq=False)
class Node:
    """One call of an op. Operands and attributes are keyed by the names in the op's schema, in schema order."""

    op: str
    operands: dict[str, Operand]
    attrs: dict[str, Any]
    results: tuple[Value, ...] = ()
    source: Source = Source()

    def inputs(self) -> Iterator[Value]:
        """Every value this node reads, lists flattened."""
        for operand in self.operands.values():
            if isinstance(operand, tuple):
                yield from operand
            else:
                yield operand

    @property
    def result(self) -> Value:
        """The only result."""
        assert len(self.results) == 1, f"{self.op} has {len(self.results)} results"
        return self.results[0]

    def operand(self, name: str) -> Value | None:
        """The single value bound to `name`, or None if the call leaves it out."""
        value = self.operands.get(name)
        assert not isinstance(value, tuple), f"operand {name} of {self.op} is a list"
        return value

    def replace_operands(self, swap: Callable[[Value], Value]) -> None:
        for name, operand in self.operands.items():
            self.operands[name] = tuple(map(swap, operand)) if isinstance(operand, tuple) else swap(operand)


@dataclass(eq=False)
class Graph:
    """Inputs, parameters, nodes in program order, outputs. `tokens` is the closed range that T may take."""

    name: str
    inputs: list[Value] = field(default_factory=list)
    params: list[Param] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    tokens: tuple[int, int] = (1, 8192)

    def values(self) -> Iterator[Value]:
        yield from self.inputs
        yield from self.params
        for node in self.nodes:
            yield from node.results

    def users(self) -> dict[Value, list[Node]]:
        """Which nodes read each value; a node that reads it twice is listed once. Outputs are not users."""
        users: dict[Value, list[Node]] = defaultdict(list)
        for node in self.nodes:
            for value in dict.fromkeys(node.inputs()):
                users[value].append(node)
        return users

    def fresh_name(self, hint: str) -> str:
        """A name no value has yet, starting with `hint`."""
        taken = {value.name for value in self.values()}
        if hint not in taken:
            return hint
        number = 1
        while f"{hint}.{number}" in taken:
            number += 1
        return f"{hint}.{number}"

    def replace_uses(self, swaps: dict[Value, Value]) -> None:
        """Rewrites every operand and output by the map (chains are followed)."""

        def follow(value: Value) -> Value:
            while value in swaps:
                value = swaps[value]
            return value

        for node in self.nodes:
            node.replace_operands(follow)
        self.outputs = [follow(value) for value in self.outputs]

    def erase(self, dead: Iterable[Node]) -> None:
        """Removes nodes; the caller has made sure that nothing reads them."""
        gone = set(map(id, dead))
        self.nodes = [node for node in self.nodes if id(node) not in gone]

    def insert_before(self, anchor: Node, new: Sequence[Node]) -> None:
        index = next(i for i, node in enumerate(self.nodes) if node is anchor)
        self.nodes[index:index] = new

    def copy(self) -> Graph:
        """A deep copy: new values and nodes, same recipes and attributes."""
        twins: dict[Value, Value] = {}

        def twin(value: Value) -> Value:
            return twins[value]

        for value in self.inputs:
            twins[value] = Value(value.name, value.type)
        for param in self.params:
            twins[param] = Param(param.name, param.type, recipe=param.recipe)
        nodes = []
        for node in self.nodes:
            copied = Node(node.op, dict(node.operands), dict(node.attrs), source=node.source)
            copied.replace_operands(twin)
            copied.results = tuple(Value(value.name, value.type, copied) for value in node.results)
            twins.update(zip(node.results, copied.results, strict=True))
            nodes.append(copied)
        params = [twins[param] for param in self.params]
        return Graph(
            self.name,
            [twins[value] for value in self.inputs],
            params,  # type: ignore[arg-type]
            nodes,
            [twins[value] for value in self.outputs],
            self.tokens,
        )
