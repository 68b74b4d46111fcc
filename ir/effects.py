"""What a graph does besides computing its outputs: which states its nodes read and write, and its collectives.

A rewrite must not lose an effect or do one twice; the verifier asks here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from treadle.ir.errors import VerifyError
from treadle.ir.graph import Graph, Node, Value
from treadle.ir.ops.registry import Op, get_op
from treadle.ir.types import StateType


@dataclass(frozen=True)
class Effects:
    """Names of the states that some node reads and writes, and the number of collectives."""

    reads: frozenset[str]
    writes: frozenset[str]
    collectives: int

    def lost(self, after: Effects) -> str | None:
        """What this graph does that the rewritten one does not, in words; None if nothing is lost."""
        for verb, before, now in (("writes", self.writes, after.writes), ("reads", self.reads, after.reads)):
            if gone := sorted(before - now):
                return f"nothing {verb} the state %{gone[0]} any more"
        if after.collectives < self.collectives:
            return f"there were {self.collectives} collectives and {after.collectives} are left"
        return None


def effects_of(graph: Graph) -> Effects:
    """The effects of all nodes. An unknown op has none: the verifier refuses it by another rule."""
    reads: set[str] = set()
    writes: set[str] = set()
    collectives = 0
    for node, op in _calls(graph):
        reads.update(_states(node, op.reads))
        writes.update(_states(node, op.writes))
        collectives += op.collective
    return Effects(frozenset(reads), frozenset(writes), collectives)


def repeated_effect(graph: Graph) -> tuple[Node, str] | None:
    """The first node that does again what an earlier one has done, and which: a state written, a value reduced."""
    written: dict[str, Node] = {}
    called: dict[tuple[object, ...], Node] = {}
    for node, op in _calls(graph):
        for state in _states(node, op.writes):
            if state in written:
                return node, f"%{state} has been written by %{written[state].results[0].name} already"
            written[state] = node
        if op.collective and (problem := _repeated_collective(node, called)):
            return node, problem
    return None


def _repeated_collective(node: Node, called: dict[tuple[object, ...], Node]) -> str | None:
    operands = tuple((name, tuple(map(id, _values(node, name)))) for name in node.operands)
    attrs = repr(sorted(node.attrs.items(), key=lambda item: item[0]))
    twin = called.setdefault((node.op, operands, attrs), node)
    if twin is not node:
        return f"%{twin.results[0].name} is the same {node.op} of the same values already"
    if node.op == "linear_all_reduce":
        return None  # what is summed is its product, not its input
    for value in node.inputs():
        above = value.producer
        if above is not None and above.op == node.op and above.attrs == node.attrs and value is above.results[0]:
            return f"%{value.name} is the result of the same {node.op} already"
    return None


def _values(node: Node, name: str) -> tuple[Value, ...]:
    operand = node.operands[name]
    return operand if isinstance(operand, tuple) else (operand,)


def _calls(graph: Graph) -> Iterator[tuple[Node, Op]]:
    for node in graph.nodes:
        try:
            op = get_op(node.op)
        except VerifyError:
            continue
        if op.reads or op.writes or op.collective:
            yield node, op


def _states(node: Node, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        for value in _values(node, name) if name in node.operands else ():
            if isinstance(value.type, StateType):
                yield value.name
