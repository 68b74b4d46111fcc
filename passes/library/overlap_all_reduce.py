"""Cuts a product and the sum over ranks that follows into runs of tokens, so that one is summed while the next is computed.

    %p = linear(%x, %w)                   ->   %y = linear_all_reduce(%x, %w, world=2, chunks=2)
    %y = all_reduce(%p, world=2)

    %n, %s = all_reduce_add_rms_norm(%p, %r, %g, world=2)   ->   %y = linear_all_reduce(...)
                                                                 %n, %s = add_rms_norm(%y, %r, %g)

Worth it where a message takes about as long as the product, as between machines. A fused norm is taken apart again: it would
have to wait for the last run. Changing: products of fewer rows may round otherwise. Does not handle products that are read
elsewhere, quantized ones, nor gathers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from treadle.ir.errors import ConfigError
from treadle.ir.graph import Graph, Node, Value
from treadle.passes.base import NearMiss, Pass, PassReport, Site, Tier
from treadle.passes.rewriter import Rewriter

_NORMS = {"all_reduce_rms_norm": "rms_norm", "all_reduce_add_rms_norm": "add_rms_norm"}


@dataclass(frozen=True)
class OverlapAllReduce(Pass):
    """`chunks` is into how many runs the tokens of a step are cut; a step of fewer tokens has fewer."""

    chunks: int = 2

    name: ClassVar[str] = "overlap_all_reduce"
    tier: ClassVar[Tier] = "changing"
    stage: ClassVar[str] = "lower"
    requires: ClassVar[tuple[str, ...]] = ("shard_tensor_parallel",)
    produces: ClassVar[tuple[str, ...]] = ("linear_all_reduce",)
    after: ClassVar[tuple[str, ...]] = ("fuse_all_reduce_rms_norm", "quantize_weights", "fuse_all_reduce_rms_norm_quant")
    expects: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.chunks < 2:
            raise ConfigError(f"overlap_all_reduce: chunks={self.chunks} leaves nothing to overlap; give 2 or more")

    def run(self, graph: Graph) -> PassReport:
        report, rewriter, users = self.report(), Rewriter(graph), graph.users()
        dead: list[Node] = []
        for node in graph.nodes:
            if node.op != "all_reduce" and node.op not in _NORMS:
                continue
            partial = next(node.inputs())
            product = partial.producer
            if product is None or product.op != "linear":
                report.near_misses.append(NearMiss.of(node, _no_product(partial), 1))
                continue
            if len(users[partial]) > 1 or partial in graph.outputs:
                report.near_misses.append(NearMiss.of(node, f"%{partial.name} is read elsewhere too", 2))
                continue
            self._join(rewriter, product, node)
            dead += [product, node]
            report.sites.append(Site.of(node))
            report.count("all_reduce" if node.op == "all_reduce" else _NORMS[node.op])
        rewriter.apply(dead)
        return report

    def _join(self, rewriter: Rewriter, product: Node, reduce: Node) -> None:
        names = [value.name for value in reduce.results]
        attrs = {name: value for name, value in reduce.attrs.items() if name != "world"}
        place = rewriter.at(reduce)
        norm = _NORMS.get(reduce.op)
        joined = place.call(
            "linear_all_reduce", **product.operands, source=product.source,
            names=names if norm is None else ["sum"], world=reduce.attrs["world"], chunks=self.chunks,
        )  # fmt: skip
        if norm is not None:
            rest = {name: operand for name, operand in reduce.operands.items() if name != "x"}
            joined = place.call(norm, x=joined.result, **rest, source=reduce.source, names=names, **attrs)
        for old, new in zip(reduce.results, joined.results, strict=True):
            rewriter.replace(old, new)


def _no_product(partial: Value) -> str:
    maker = partial.producer.op if partial.producer is not None else "an input"
    return f"%{partial.name} is made by {maker}, not by a linear"
