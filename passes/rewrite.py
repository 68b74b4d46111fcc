"""Applies rules to a graph: finds matches, builds replacements, splices them in, removes what they made dead.

All matching happens on the graph as it was; the changes are applied together, so one run is linear in its size.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from treadle.ir.build import make_node
from treadle.ir.graph import Graph, Node, Operand, Param, Source, Value
from treadle.ir.types import Type
from treadle.ir.weights import Recipe
from treadle.passes.base import NearMiss, PassReport, Site
from treadle.passes.match import Env, OpCall, Trail

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

    def at(self, anchor: Node, *, after: bool = False) -> Rewriter:
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


@dataclass(frozen=True)
class Match:
    """A complete match: `m["x"]` is a bound value or attribute, `root` the node it grew from, `nodes` all of them."""

    root: Node
    env: Env

    def __getitem__(self, name: str) -> Any:
        return self.env.bound[name]

    def get(self, name: str) -> Any:
        return self.env.bound.get(name)

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.env.nodes


Build = Callable[[Rewriter, Match], Value]
Where = tuple[str, Callable[[Match], bool]]


@dataclass(frozen=True)
class Rule:
    """A pattern, the function that builds its replacement, and conditions on a whole match with their words.

    `build` returns the value that takes the place of the root's only result. A failed match is a near miss if at
    least `near` nodes matched first.
    """

    kind: str
    pattern: OpCall
    build: Build
    where: tuple[Where, ...] = ()
    near: int = 2


@dataclass
class _Search:
    """What one run of `rewrite` has found so far."""

    users: dict[Value, list[Node]]
    outputs: set[Value]
    claimed: set[int] = field(default_factory=set)
    misses: dict[int, tuple[Node, Trail]] = field(default_factory=dict)


def rewrite(graph: Graph, report: PassReport, rules: Sequence[Rule]) -> PassReport:
    """Applies `rules` in order of preference to every node, each node in one match at most; fills `report`."""
    search = _Search(graph.users(), set(graph.outputs))
    rewriter = Rewriter(graph)
    changed: list[Node] = []
    for rule in rules:
        for node in graph.nodes:
            if node.op in rule.pattern.ops and id(node) not in search.claimed:
                match = _find(rule, node, search)
                if match is not None:
                    _replace(rule, match, rewriter, report, search)
                    changed += match.nodes
    report.near_misses += [
        NearMiss.of(trail.node, trail.predicate, trail.matched)
        for root, (_, trail) in search.misses.items()
        if root not in search.claimed and trail.node is not None and id(trail.node) not in search.claimed
    ]
    rewriter.apply(changed)
    return report


def _find(rule: Rule, node: Node, search: _Search) -> Match | None:
    trail = Trail()
    for env in rule.pattern.match_node(node, Env(), trail):
        match = Match(node, env)
        problem = _objection(rule, match, search)
        if problem is None:
            return match
        if len(match.nodes) >= trail.matched:
            trail = Trail(problem[0], problem[1], len(match.nodes))
    known = search.misses.get(id(node))
    if trail.matched >= rule.near and (known is None or known[1].matched < trail.matched):
        search.misses[id(node)] = (node, trail)
    return None


def _objection(rule: Rule, match: Match, search: _Search) -> tuple[Node, str] | None:
    """Why a match of the pattern must not be rewritten: a node used elsewhere, or a failed condition."""
    inside = set(map(id, match.nodes))
    for node in match.nodes:
        if id(node) in search.claimed and id(node) not in match.env.shared:
            return node, f"{node.op} belongs to another match already"
        if node is match.root or id(node) in match.env.shared:
            continue
        for value in node.results:
            if value in search.outputs:
                return node, f"%{value.name} is an output of the graph"
            if outside := [user for user in search.users.get(value, ()) if id(user) not in inside]:
                return node, f"%{value.name} is also used by {outside[0].op} (%{outside[0].results[0].name})"
    for words, holds in rule.where:
        if not holds(match):
            return match.root, words
    return None


def _replace(rule: Rule, match: Match, rewriter: Rewriter, report: PassReport, search: _Search) -> None:
    new = rule.build(rewriter.at(match.root), match)
    old = match.root.result
    if new.type != old.type:
        reason = f"{rule.kind} would give {new.type} where the model has {old.type}"
        search.misses[id(match.root)] = (match.root, Trail(match.root, reason, len(match.nodes)))
        return
    rewriter.replace(old, new)
    search.claimed.update(id(node) for node in match.nodes if id(node) not in match.env.shared)
    report.sites.append(Site.of(match.root))
    report.count(rule.kind)
