"""Computes small constants once, while compiling.

    param %f: f32[8] = literal(...)
    %r = aten.reciprocal(%f)             ->    param %r: f32[8] = literal(...)

A node is folded if it is pure, reads literals only, and its results have a fixed size of at most `max_elements`.
Exact: the value is what the eager reference gives. Does not touch weights of the checkpoint, whose recipes the loader
evaluates, nor anything that depends on T.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import sympy
import torch

from treadle.ir.graph import Graph, Node, Value
from treadle.ir.interpret import call
from treadle.ir.ops.registry import get_op
from treadle.ir.types import TensorType
from treadle.ir.weights import Literal
from treadle.passes.base import NearMiss, Pass, PassReport, Site, Tier
from treadle.passes.rewriter import Rewriter


@dataclass(frozen=True)
class FoldConstants(Pass):
    name: ClassVar[str] = "fold_constants"
    tier: ClassVar[Tier] = "exact"
    max_elements: int = 4096

    def run(self, graph: Graph) -> PassReport:
        report, rewriter = self.report(), Rewriter(graph)
        known: dict[Value, Literal] = {p: p.recipe for p in graph.params if isinstance(p.recipe, Literal)}
        folded: list[Node] = []
        for node in graph.nodes:
            reads = list(node.inputs())
            if not reads or not all(value in known for value in reads) or not _is_plain(node):
                continue
            if (size := _elements(node)) > self.max_elements:
                report.near_misses.append(
                    NearMiss.of(node, f"{size} elements, more than {self.max_elements}", 1)
                )
                continue
            values = {value: known[value].evaluate(_no_checkpoint) for value in reads}
            for value, result in zip(node.results, call(node, values, 0), strict=True):
                known[value] = Literal.of(result)
            folded.append(node)
            report.sites.append(Site.of(node))
            report.count(node.op)
        _replace(graph, rewriter, folded, known)
        rewriter.apply(folded)
        return report


def _replace(graph: Graph, rewriter: Rewriter, folded: list[Node], known: dict[Value, Literal]) -> None:
    """Literals for the results that something outside the folded nodes reads."""
    inside = set(map(id, folded))
    outside = {value for node in graph.nodes if id(node) not in inside for value in node.inputs()}
    for node in folded:
        for value in node.results:
            if value in outside or value in graph.outputs:
                rewriter.replace(value, rewriter.param(f"{value.name}.folded", value.type, known[value]))


def _is_plain(node: Node) -> bool:
    op = get_op(node.op)
    attrs = (item for attr in node.attrs.values() for item in (attr if isinstance(attr, list) else [attr]))
    return op.pure and not op.splits and not any(isinstance(item, sympy.Expr) for item in attrs)


def _elements(node: Node) -> int:
    kinds = [value.type for value in node.results if isinstance(value.type, TensorType)]
    return max(prod(kind.at(1)) for kind in kinds)


def _no_checkpoint(name: str) -> torch.Tensor:
    raise AssertionError(f"a literal reads no checkpoint tensor, asked for {name}")
