"""Lets attention write its output quantized, where the scale is known beforehand.

    %o = attention(%q, %k, %v, %kv, %batch, layer=0)        %o = attention(..., %s, layer=0, out_key=quant(f8e4m3, per_tensor))
    %flat = reshape(%o, [T, 576])                     ->    %y = reshape(%o, [T, 576])
    %y = quantize_static(%flat, %s)

Exact: the same attention, then the same rounding. Does not handle dynamic scales, which need the whole row before they
are known, nor outputs that anything else reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from treadle.ir.graph import Graph, Node, Param, Value
from treadle.passes.base import NearMiss, Pass, PassReport, Site, Tier
from treadle.passes.rewriter import Rewriter

_RESHAPE = "aten.reshape.default"


@dataclass(frozen=True)
class FuseAttentionQuant(Pass):
    name: ClassVar[str] = "fuse_attention_quant"
    tier: ClassVar[Tier] = "exact"
    stage: ClassVar[str] = "lower"
    requires: ClassVar[tuple[str, ...]] = ("quantize_activations",)
    after: ClassVar[tuple[str, ...]] = ("quantize_activations",)

    def run(self, graph: Graph) -> PassReport:
        report, rewriter, users = self.report(), Rewriter(graph), graph.users()
        dead: list[Node] = []
        for node in graph.nodes:
            if node.op != "attention" or node.attrs.get("out_key") is not None:
                continue
            path = _path(node, users)
            if problem := _objection(path, users, graph.outputs):
                report.near_misses.append(NearMiss.of(node, problem, len(path)))
                continue
            _fuse(rewriter, path)
            dead += path
            report.sites.append(Site.of(node))
            report.count("attention_quant")
        rewriter.apply(dead)
        return report


def _path(attention: Node, users: dict[Value, list[Node]]) -> list[Node]:
    """The attention, the reshapes behind it, and what reads the last of them."""
    path = [attention]
    while readers := users.get(path[-1].results[0], []):
        path.append(readers[0])
        if readers[0].op != _RESHAPE:
            break
    return path


def _objection(path: list[Node], users: dict[Value, list[Node]], outputs: list[Value]) -> str | None:
    for node in path[:-1]:
        value = node.results[0]
        if len(users[value]) > 1 or value in outputs:
            return f"%{value.name} is read elsewhere too"
    last = path[-1]
    if last.op == "quantize_dynamic":
        return "its scale is computed in each step from the whole row; quantize_activations{scales=[...]} gives a static one"
    if last.op != "quantize_static":
        return f"its output goes to {last.op} unquantized"
    return None if isinstance(last.operand("scale"), Param) else "its scale is computed in the graph"


def _fuse(rewriter: Rewriter, path: list[Node]) -> None:
    attention, *reshapes, quantize = path
    call = rewriter.at(attention).call(
        "attention", **attention.operands, output_scale=quantize.operands["scale"],
        source=attention.source, names=[attention.result.name], **attention.attrs, out_key=quantize.attrs["key"],
    )  # fmt: skip
    for reshape in reshapes:
        place = rewriter.at(reshape)
        call = place.call(_RESHAPE, call.result, source=reshape.source, names=[reshape.result.name], **reshape.attrs)
    rewriter.replace(quantize.result, call.result)
