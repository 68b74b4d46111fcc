"""Applies rules to a graph: finds matches, builds replacements, and says where a pattern nearly matched.

All matching happens on the graph as it was; the changes are applied together, so one run is linear in its size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from treadle.ir.graph import Graph, Node, Value
from treadle.passes.base import NearMiss, PassReport, Site
from treadle.passes.match import Env, OpCall, Trail
from treadle.passes.rewriter import Rewriter


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
    least `near` nodes matched first and, where the pattern has `anchors`, ops that hardly occur without it, one of
    them is close by.
    """

    kind: str
    pattern: OpCall
    build: Build
    where: tuple[Where, ...] = ()
    near: int = 2
    anchors: frozenset[str] = frozenset()


@dataclass
class _Search:
    """What one run of `rewrite` has found so far."""

    users: dict[Value, list[Node]]
    outputs: set[Value]
    claimed: set[int] = field(default_factory=set)
    misses: dict[int, tuple[Trail, frozenset[str]]] = field(default_factory=dict)

    def anchored(self, trail: Trail, anchors: frozenset[str]) -> bool:
        """Whether an anchor that no match has claimed is among the matched nodes or shortly above the stop."""
        matched = any(node.op in anchors and id(node) not in self.claimed for node in trail.nodes)
        return matched or (trail.node is not None and self._above(trail.node, anchors, 4))

    def _above(self, node: Node, anchors: frozenset[str], depth: int) -> bool:
        if id(node) in self.claimed or depth < 0:
            return False
        producers = (value.producer for value in node.inputs() if value.producer is not None)
        return node.op in anchors or any(self._above(producer, anchors, depth - 1) for producer in producers)


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
    report.near_misses += _near_misses(search)
    rewriter.apply(changed)
    return report


def _near_misses(search: _Search) -> list[NearMiss]:
    """The furthest attempt for each node where matching stopped, outside of what did match."""
    furthest: dict[int, Trail] = {}
    for root, (trail, anchors) in search.misses.items():
        node = trail.node
        if node is None or root in search.claimed or id(node) in search.claimed:
            continue
        if anchors and not search.anchored(trail, anchors):
            continue
        if id(node) not in furthest or furthest[id(node)].matched < trail.matched:
            furthest[id(node)] = trail
    return [NearMiss.of(t.node, t.predicate, t.matched) for t in furthest.values() if t.node is not None]


def _find(rule: Rule, node: Node, search: _Search) -> Match | None:
    trail = Trail()
    for env in rule.pattern.match_node(node, Env(), trail):
        match = Match(node, env)
        problem = _objection(rule, match, search)
        if problem is None:
            return match
        if len(match.nodes) >= trail.matched:
            trail = Trail(*problem, match.nodes)
    known = search.misses.get(id(node))
    if trail.matched >= rule.near and (known is None or known[0].matched < trail.matched):
        search.misses[id(node)] = trail, rule.anchors
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
        search.misses[id(match.root)] = Trail(match.root, reason, match.nodes), frozenset()
        return
    rewriter.replace(old, new)
    search.claimed.update(id(node) for node in match.nodes if id(node) not in match.env.shared)
    report.sites.append(Site.of(match.root))
    report.count(rule.kind)
