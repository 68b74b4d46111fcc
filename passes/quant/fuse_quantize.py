"""Joins the op that makes an activation with the quantization of it, so that it is written once, in 8 bits.

    %y = rms_norm(%x, %w)               ->   %q, %t = rms_norm_quant(%x, %w)
    %q, %t = quantize_dynamic(%y)

    %y, %s = add_rms_norm(%x, %r, %w)   ->   %q, %t, %s = add_rms_norm_quant(%x, %r, %w)
    %q, %t = quantize_dynamic(%y)

    %y = gated_act(%g, %u)              ->   %q, %t = gated_act_quant(%g, %u)
    %q, %t = quantize_dynamic(%y)

    %y, %s = all_reduce_add_rms_norm(%x, %r, %w, world=2)
    %q, %t = quantize_dynamic(%y)       ->   %q, %t, %s = all_reduce_add_rms_norm_quant(%x, %r, %w, world=2)

Exact: the same op, then the same rounding. Does not handle a result that anything else reads, static scales, nor
attention, whose kernel runs outside the pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from treadle.ir.graph import Graph, Node
from treadle.passes.base import NearMiss, Pass, PassReport, Site, Tier
from treadle.passes.rewriter import Rewriter

QUANTIZE = "quantize_dynamic"


class _Fuse(Pass):
    """What the passes share: they differ in the op that they start from."""

    stage: ClassVar[str] = "lower"
    makers: ClassVar[tuple[str, ...]]

    def run(self, graph: Graph) -> PassReport:
        report, rewriter, users = self.report(), Rewriter(graph), graph.users()
        dead: list[Node] = []
        for made in graph.nodes:
            if made.op not in self.makers:
                continue
            readers = users.get(made.results[0], [])
            quantize = next((node for node in readers if node.op == QUANTIZE), None)
            if quantize is None:
                continue
            if len(readers) > 1 or made.results[0] in graph.outputs:
                report.near_misses.append(NearMiss.of(made, f"%{made.results[0].name} is read unquantized too", 2))
                continue
            _fuse(rewriter, made, quantize)
            dead += [made, quantize]
            report.sites.append(Site.of(made))
            report.count(f"{made.op}_quant")
        rewriter.apply(dead)
        return report


def _fuse(rewriter: Rewriter, made: Node, quantize: Node) -> None:
    """Places the fused node where the value was made: its other results may be read before the quantization."""
    rest = made.results[1:]
    names = [value.name for value in (*quantize.results, *rest)]
    call = rewriter.at(made).call(
        f"{made.op}_quant", **made.operands, **made.attrs, **quantize.attrs, source=made.source, names=names
    )
    for old, new in zip((*quantize.results, *rest), call.results, strict=True):
        rewriter.replace(old, new)


@dataclass(frozen=True)
class FuseRmsNormQuant(_Fuse):
    name: ClassVar[str] = "fuse_rms_norm_quant"
    tier: ClassVar[Tier] = "exact"
    requires: ClassVar[tuple[str, ...]] = ("quantize_dynamic",)
    produces: ClassVar[tuple[str, ...]] = ("rms_norm_quant",)
    after: ClassVar[tuple[str, ...]] = ("quantize_activations", "fuse_add_rms_norm")
    makers: ClassVar[tuple[str, ...]] = ("rms_norm",)


@dataclass(frozen=True)
class FuseAddRmsNormQuant(_Fuse):
    name: ClassVar[str] = "fuse_add_rms_norm_quant"
    tier: ClassVar[Tier] = "exact"
    requires: ClassVar[tuple[str, ...]] = ("quantize_dynamic",)
    produces: ClassVar[tuple[str, ...]] = ("add_rms_norm_quant",)
    after: ClassVar[tuple[str, ...]] = ("quantize_activations", "fuse_add_rms_norm")
    makers: ClassVar[tuple[str, ...]] = ("add_rms_norm",)


@dataclass(frozen=True)
class FuseGatedActQuant(_Fuse):
    name: ClassVar[str] = "fuse_gated_act_quant"
    tier: ClassVar[Tier] = "exact"
    requires: ClassVar[tuple[str, ...]] = ("quantize_dynamic",)
    produces: ClassVar[tuple[str, ...]] = ("gated_act_quant",)
    after: ClassVar[tuple[str, ...]] = ("quantize_activations", "raise_gated_act")
    makers: ClassVar[tuple[str, ...]] = ("gated_act",)


@dataclass(frozen=True)
class FuseAllReduceRmsNormQuant(_Fuse):
    name: ClassVar[str] = "fuse_all_reduce_rms_norm_quant"
    tier: ClassVar[Tier] = "exact"
    requires: ClassVar[tuple[str, ...]] = ("quantize_dynamic",)
    after: ClassVar[tuple[str, ...]] = ("quantize_activations", "fuse_all_reduce_rms_norm")
    makers: ClassVar[tuple[str, ...]] = ("all_reduce_rms_norm", "all_reduce_add_rms_norm")
