"""Changes to one graph, collected and then applied at once: new nodes, redirected uses, dead nodes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Self

from treadle.ir.build import make_node
from treadle.ir.graph import Graph, Node, Operand, Param, Source, Value
from treadle.ir.types import Type
from treadle.ir.weights import Recipe

_NAMELESS = Graph("nameless")
_NO_SOURCE = Source()
_NUMBERS = re.compile(r"(\.\d+)+$")


class Rewriter:
    """Collects changes to one graph. New nodes go before or after an anchor; `apply` does everything at once."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.swaps: dict[Value, Value] = {}
        self._taken = {value.name for value in graph.values()}
        self._next: dict[str, int] = {}
        self._before: dict[int, list[Node]] = defaultdict(list)
        self._after: dict[int, list[Node]] = defaultdict(list)
        self._place: list[Node] | None = None
        self._created: list[Node] = []

    def at(self, anchor: Node, *, after: bool = False) -> Self:
        """New nodes are placed before (or after) `anchor` from now on."""
        self._place = (self._after if after else self._before)[id(anchor)]
        return self

    def call(
        self,
        op: str,
        /,
        *operands: Operand | Sequence[Value] | None,
        source: Source = _NO_SOURCE,
        names: Sequence[str] = (),
        **attrs: Any,
    ) -> Node:
        """A new node at the current place, with inferred types and fresh names."""
        node = make_node(_NAMELESS, op, *operands, source=source, names=names, **attrs)
        for value in node.results:
            value.name = self.fresh(_stem(value.name))
        assert self._place is not None, "call at(node) first"
        self._place.append(node)
        self._created.append(node)
        return node

    def param(self, name: str, kind: Type, recipe: Recipe) -> Param:
        """A new parameter of the graph."""
        param = Param(self.fresh(name), kind, recipe=recipe)
        self.graph.params.append(param)
        return param

    def fresh(self, hint: str) -> str:
        number = self._next.get(hint, 0)
        name = hint if number == 0 else f"{hint}.{number}"
        while name in self._taken:
            number += 1
            name = f"{hint}.{number}"
        self._next[hint] = number + 1
        self._taken.add(name)
        return name

    def replace(self, old: Value, new: Value) -> None:
        """Every use of `old` becomes one of `new`."""
        assert old is not new
        self.swaps[old] = new

    def apply(self, maybe_dead: Iterable[Node] = ()) -> None:
        """Splices new nodes in, redirects uses, and removes what nothing reads: of new nodes and `maybe_dead`."""
        spliced: list[Node] = []
        for node in self.graph.nodes:
            spliced += [*self._before.get(id(node), ()), node, *self._after.get(id(node), ())]
        self.graph.nodes = spliced
        if self.swaps:
            self.graph.replace_uses(self.swaps)
        drop_dead(self.graph, [*maybe_dead, *self._created])
        self._inherit_names()

    def _inherit_names(self) -> None:
        """A new value takes the name of the one it replaced if they differ in their number only."""
        taken = {value.name for value in self.graph.values()}
        created = set(map(id, self._created))
        for old, new in self.swaps.items():
            if id(new.producer) in created and old.name not in taken and _stem(old.name) == _stem(new.name):
                taken.add(old.name)
                new.name = old.name


def _stem(name: str) -> str:
    return _NUMBERS.sub("", name)


def drop_dead(graph: Graph, candidates: Iterable[Node]) -> int:
    """Removes those candidate nodes, and parameters, that nothing reads. Returns how many nodes went."""
    suspects = {id(node) for node in candidates}
    live = set(graph.outputs)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if id(node) in suspects and not any(value in live for value in node.results):
            continue
        live.update(node.inputs())
        kept.append(node)
    removed = len(graph.nodes) - len(kept)
    graph.nodes = kept[::-1]
    graph.params = [param for param in graph.params if param in live]
    return removed
