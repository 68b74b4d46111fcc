"""Keeps residuals and norms on one rank's share of the tokens, where every rank did the same work on all of them.

    %n, %s = all_reduce_add_rms_norm(%p, %r, %w, world=2)
    ->
    %part = reduce_scatter_rows(%p, world=2)          this rank's tokens of the sum
    %mine = own_rows(%r, world=2)                     only where the residual is not on shares already
    %k, %t = add_rms_norm(%part, %mine, %w)
    %n = all_gather_rows(%k, %p, world=2)             whole again for the column-parallel product

The residual %t stays on shares from one norm to the next; where something else reads it, it is gathered. A bare
all_reduce_rms_norm is cut the same way. After Korthikanti et al., "Reducing activation recomputation in large transformer
models" (2022). Exact: each row sees the same sums and the same norm. Worth it where activations are long and norms take
time; scattering and gathering send as much as the sum did. Does not handle norms joined with quantization, layer norms, nor
sums that no norm follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from treadle.ir.graph import Graph, Node, Value
from treadle.passes.base import NearMiss, Pass, PassReport, Site, Tier
from treadle.passes.rewriter import Rewriter

_NORMS = {"all_reduce_rms_norm": "rms_norm", "all_reduce_add_rms_norm": "add_rms_norm"}


@dataclass(frozen=True)
class SequenceParallel(Pass):
    name: ClassVar[str] = "sequence_parallel"
    tier: ClassVar[Tier] = "exact"
    stage: ClassVar[str] = "lower"
    requires: ClassVar[tuple[str, ...]] = ("fuse_all_reduce_rms_norm",)
    produces: ClassVar[tuple[str, ...]] = ("reduce_scatter_rows",)
    after: ClassVar[tuple[str, ...]] = ("quantize_weights", "fuse_all_reduce_rms_norm_quant")
    expects: ClassVar[bool] = True

    def run(self, graph: Graph) -> PassReport:
        report = self.report()
        _Job(graph, report).run()
        return report


class _Job:
    """`shares` maps a whole residual to the value that holds this rank's rows of it."""

    def __init__(self, graph: Graph, report: PassReport):
        self._graph = graph
        self._report = report
        self._rewriter = Rewriter(graph)
        self._users = graph.users()
        self._shares: dict[Value, Value] = {}
        self._cut: set[int] = set()

    def run(self) -> None:
        dead = []
        found = [node for node in self._graph.nodes if node.op in _NORMS]
        self._cut = {id(node) for node in found}
        for node in self._graph.nodes:
            if node.op == "all_reduce" or (node.op.endswith("_quant") and node.op.startswith("all_reduce")):
                reason = "no norm follows the sum" if node.op == "all_reduce" else "the norm is joined with quantization"
                self._report.near_misses.append(NearMiss.of(node, reason, 1))
        for node in found:
            self._rewrite(node)
            dead.append(node)
            self._report.sites.append(Site.of(node))
            self._report.count(_NORMS[node.op])
        self._rewriter.apply(dead)

    def _rewrite(self, node: Node) -> None:
        place, world, source = self._rewriter.at(node), node.attrs["world"], node.source
        partial = next(node.inputs())
        operands = {name: operand for name, operand in node.operands.items() if name != "x"}
        attrs = {name: value for name, value in node.attrs.items() if name != "world"}
        share = place.call("reduce_scatter_rows", partial, world=world, source=source, names=["share"]).result
        if "residual" in operands:
            residual = operands["residual"]
            assert isinstance(residual, Value)
            if residual not in self._shares:
                mine = place.call("own_rows", residual, world=world, source=source, names=[f"{residual.name}.share"])
                self._shares[residual] = mine.result
            operands["residual"] = self._shares[residual]
        names = [f"{value.name}.share" for value in node.results]
        norm = place.call(_NORMS[node.op], x=share, **operands, source=source, names=names, **attrs)
        self._gather(node.results[0], norm.results[0], partial, node)
        if len(node.results) > 1:
            self._shares[node.results[1]] = norm.results[1]
            if self._is_read_whole(node.results[1]):
                self._gather(node.results[1], norm.results[1], partial, node)

    def _gather(self, whole: Value, share: Value, like: Value, node: Node) -> None:
        call = self._rewriter.at(node).call(
            "all_gather_rows", share, like, world=node.attrs["world"], source=node.source, names=[whole.name]
        )
        self._rewriter.replace(whole, call.result)

    def _is_read_whole(self, total: Value) -> bool:
        """Whether anything but the residual of another cut norm reads the sum."""
        if total in self._graph.outputs:
            return True
        return any(
            id(user) not in self._cut or total is not user.operands.get("residual") for user in self._users.get(total, [])
        )
