"""Turns slices that share out one dimension of a value into one split.

    %q = aten.slice(%qkv, dim=1, end=64)
    %k = aten.slice(%qkv, dim=1, start=64, end=96)
    %v = aten.slice(%qkv, dim=1, start=96)              ->    %q, %k, %v = split(%qkv, sizes=[64, 32, 32], dim=1)

Exact. The slices must cover the dimension exactly once, without steps. Does not handle a symbolic dimension.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar

from treadle.ir.graph import Graph, Node, Value
from treadle.ir.types import TensorType
from treadle.passes.base import NearMiss, Pass, PassReport, Site, Tier
from treadle.passes.rewriter import Rewriter

SLICE = "aten.slice.Tensor"


@dataclass(frozen=True)
class JoinSlices(Pass):
    name: ClassVar[str] = "join_slices"
    tier: ClassVar[Tier] = "exact"
    stage: ClassVar[str] = "raise"

    def run(self, graph: Graph) -> PassReport:
        report, rewriter = self.report(), Rewriter(graph)
        dead: list[Node] = []
        for group in _groups(graph).values():
            if len(group) < 2:
                continue
            if problem := _objection(group):
                report.near_misses.append(NearMiss.of(group[0], problem, len(group)))
                continue
            _join(rewriter, group)
            dead += group
            report.sites.append(Site.of(group[0]))
            report.count("split")
        rewriter.apply(dead)
        return report


def _groups(graph: Graph) -> dict[tuple[Value, int], list[Node]]:
    """The slices of each value along each dimension of known size."""
    groups: dict[tuple[Value, int], list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == SLICE and isinstance(_size(node), int):
            groups[next(node.inputs()), node.attrs.get("dim", 0)].append(node)
    return groups


def _size(node: Node) -> object:
    kind = next(node.inputs()).type
    assert isinstance(kind, TensorType)
    return kind.shape[node.attrs.get("dim", 0)]


def _bounds(node: Node) -> tuple[int, int]:
    end = node.attrs.get("end")
    return node.attrs.get("start") or 0, _size(node) if end is None else end  # type: ignore[return-value]


def _objection(group: list[Node]) -> str | None:
    if any(node.attrs.get("step", 1) != 1 for node in group):
        return "a slice takes every n-th element"
    position = 0
    for begin, end in sorted(map(_bounds, group)):
        if begin != position:
            return f"the slices do not share out the dimension: one begins at {begin}, expected {position}"
        position = end
    return None if position == _size(group[0]) else f"the slices end at {position} of {_size(group[0])}"


def _join(rewriter: Rewriter, group: list[Node]) -> None:
    """Places the split where the first slice was."""
    ordered = sorted(group, key=_bounds)
    sizes = [end - begin for begin, end in map(_bounds, ordered)]
    names, source = [node.result.name for node in ordered], group[0].source
    dim = group[0].attrs.get("dim", 0)
    parts = rewriter.at(group[0]).call(
        "split", next(group[0].inputs()), sizes=sizes, dim=dim, source=source, names=names
    )
    for node, part in zip(ordered, parts.results, strict=True):
        rewriter.replace(node.result, part)
