"""Assigns storage: which values share bytes of one arena, which are views, which are written over an operand.

The one step that deals with mutation. A functional graph and its plan together say what memory a step takes:

    %a = linear(%x, %w)               %a   at 0
    %b = aten.silu(%a)                %b   at 0, over %a (nothing reads %a later)
    %c = linear(%b, %v)      ->       %c   at 640*T
    %d = linear(%c, %u)               %d   at 0 (%b is dead), the arena is 1280*T bytes
    return %d'                        outputs have storage of their own

Sizes and offsets are affine in T and right for every T of the graph's range. Exact: no value is changed. Does not
reorder nodes to save memory, nor place weights and state. `check_plan` (bufferise_check.py) holds a plan to account.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from treadle.ir.graph import Graph, Node, Value
from treadle.passes.aliases import (
    Affine,
    is_contiguous_view,
    must_copy,
    storage_bytes,
    view_base,
    writable_over,
)
from treadle.passes.split import SplitGraph

ZERO = Affine(0, 0)


@dataclass(frozen=True)
class Place:
    """Where a value lives: in which storage, as a view of which value, or written over which operand.

    `storage` is the name of the value that the bytes were first given to (an input or parameter for its views).
    """

    storage: str
    view_of: str = ""
    over: str = ""


@dataclass(frozen=True)
class Buffer:
    """Bytes that belong to the graph. `offset` is None for storage that outlives the arena: that of outputs."""

    size: Affine
    offset: Affine | None


@dataclass
class Plan:
    """Places by value name, buffers by storage name, the size of the arena, and what it would be without sharing."""

    places: dict[str, Place] = field(default_factory=dict)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    arena: Affine = ZERO
    unshared: Affine = ZERO

    def report(self, tokens: int) -> str:
        """One line for people: bytes of computed values at a token count, without sharing and with it."""
        before, after = self.unshared.at(tokens), self.arena.at(tokens)
        return (
            f"{before} bytes of computed values at T = {tokens}; {after} in the shared arena ({self.arena})"
        )


@dataclass
class Call:
    """One step of a graph or program, as far as storage goes."""

    reads: list[Value]
    writes: list[Value]
    node: Node | None = None


def graph_calls(graph: Graph) -> list[Call]:
    return [Call(list(node.inputs()), list(node.results), node) for node in graph.nodes]


def program_calls(program: SplitGraph) -> list[Call]:
    return [Call(list(step.reads), list(step.outputs)) for step in program.steps]


def plan_graph(graph: Graph) -> Plan:
    """The storage plan of a functional graph, for example a piece."""
    return _Planner(graph_calls(graph), [*graph.inputs, *graph.params], graph.outputs, graph.tokens).plan()


def plan_program(program: SplitGraph) -> Plan:
    """The storage plan of the values that pass between pieces and split ops. Pieces return storage of their own."""
    given = [*program.inputs, *program.params]
    return _Planner(program_calls(program), given, program.outputs, program.tokens).plan()


class _Planner:
    """Three sweeps: find what is a view or in place, find how long each storage lives, give out offsets."""

    def __init__(
        self, calls: list[Call], given: Sequence[Value], outputs: Sequence[Value], tokens: tuple[int, int]
    ):
        self.calls, self.outputs, self.tokens = calls, outputs, tokens
        self.result = Plan()
        self.value_storage: dict[Value, Value] = {value: value for value in given}
        self.compact: set[Value] = set(given)
        self.fixed = set(given)
        self.last_read = {value: at for at, call in enumerate(calls) for value in call.reads}
        self.last_read |= dict.fromkeys(outputs, len(calls))
        self.begin: dict[Value, int] = {}
        self.end: dict[Value, int] = {}

    def plan(self) -> Plan:
        self._settle_lifetimes_of_views()
        for at, call in enumerate(self.calls):
            for position, value in enumerate(call.writes):
                self._place(at, call, position, value)
        self._give_offsets()
        return self.result

    def _settle_lifetimes_of_views(self) -> None:
        """A value lives as long as any view of it: backwards, so that views of views count."""
        for at in range(len(self.calls) - 1, -1, -1):
            call = self.calls[at]
            for value in call.writes:
                self.last_read.setdefault(value, at)
            base = self._base(call)
            if base is not None:
                self.last_read[base] = max(self.last_read[base], *(self.last_read[v] for v in call.writes))

    def _base(self, call: Call) -> Value | None:
        return view_base(call.node) if call.node is not None else None

    def _place(self, at: int, call: Call, position: int, value: Value) -> None:
        base = self._base(call)
        if base is not None and not must_copy(call.node, base in self.compact):
            self._share(value, base)
            self.result.places[value.name] = Place(self.value_storage[base].name, view_of=base.name)
            if base in self.compact and call.node is not None and is_contiguous_view(call.node):
                self.compact.add(value)
            return
        self.compact.add(value)
        size = storage_bytes(value)
        self.result.unshared += size
        under = self._operand_to_write_over(at, call, position, value)
        if under is not None:
            self._share(value, under)
            self.result.places[value.name] = Place(self.value_storage[under].name, over=under.name)
            return
        self.value_storage[value] = value
        self.begin[value], self.end[value] = at, self.last_read[value]
        self.result.places[value.name] = Place(value.name)
        self.result.buffers[value.name] = Buffer(size, None)

    def _share(self, value: Value, base: Value) -> None:
        storage = self.value_storage[base]
        self.value_storage[value] = storage
        if storage in self.end:
            self.end[storage] = max(self.end[storage], self.last_read[value])

    def _operand_to_write_over(self, at: int, call: Call, position: int, value: Value) -> Value | None:
        """The operand whose bytes the result may take: declared by the op, dead afterwards, ours, read as it is."""
        under = writable_over(call.node, position) if call.node is not None else None
        if under is None or under not in self.compact:
            return None
        storage = self.value_storage[under]
        if (
            storage in self.fixed
            or under.type != value.type
            or storage_bytes(storage) != storage_bytes(value)
        ):
            return None
        sharing = [
            other for other, known in self.value_storage.items() if known is storage and other is not under
        ]
        if any(self.last_read[other] >= at for other in sharing) or self.last_read[under] > at:
            return None
        return under

    def _give_offsets(self) -> None:
        """Largest first; each storage goes to the lowest place that is free for as long as it lives."""
        escaping = {self.value_storage[value] for value in self.outputs}
        inside = [value for value in self.begin if value not in escaping]
        buffers, reach = self.result.buffers, self.tokens
        placed: list[Value] = []
        for value in sorted(inside, key=lambda v: (-buffers[v.name].size.at(reach[1]), self.begin[v])):
            rivals = [buffers[other.name] for other in placed if self._meet(value, other)]
            offset = _lowest(buffers[value.name].size, rivals, self._sum(placed), reach)
            buffers[value.name] = Buffer(buffers[value.name].size, offset)
            placed.append(value)
        ends = [b.offset + b.size for b in buffers.values() if b.offset is not None]
        tops = [end for end in ends if all(other.fits_below(end, reach) for other in ends)]
        self.result.arena = tops[0] if tops else Affine.above(ends)

    def _meet(self, one: Value, other: Value) -> bool:
        return self.begin[one] <= self.end[other] and self.begin[other] <= self.end[one]

    def _sum(self, placed: list[Value]) -> Affine:
        return sum((self.result.buffers[value.name].size for value in placed), ZERO)


def _lowest(size: Affine, rivals: list[Buffer], beyond: Affine, reach: tuple[int, int]) -> Affine:
    """The lowest offset, at the most tokens, at which `size` bytes are clear of every rival for all token counts."""
    ends = [rival.offset + rival.size for rival in rivals if rival.offset is not None]
    for offset in sorted([ZERO, *ends], key=lambda e: e.at(reach[1])):
        top = offset + size
        if all(
            top.fits_below(rival.offset, reach) or (rival.offset + rival.size).fits_below(offset, reach)
            for rival in rivals
            if rival.offset is not None
        ):
            return offset
    return Affine.above([beyond, *ends])
