"""Joins linears that read the same input into one, in the graph and in the weight plan together.

    %q = linear(%x, %wq)          param %wqkv = concat([wq, wk, wv], dim=0)
    %k = linear(%x, %wk)          %qkv = linear(%x, %wqkv)
    %v = linear(%x, %wv)    ->    %q, %k, %v = split(%qkv, sizes=[64, 32, 32])

Two passes: fuse_qkv takes linears whose results go on to attention, fuse_gate_up the two sides of a gated activation.
Changing: one wide product may sum in another order than three narrow ones. Does not handle a mix of linears with and
without bias, weights of different dtypes, or a weight that another node reads too (it would be stored twice).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from treadle.ir.graph import Graph, Node, Param, Value
from treadle.ir.types import TensorType, tensor
from treadle.ir.weights import Concat
from treadle.passes.base import NearMiss, Pass, PassReport, Site, Tier
from treadle.passes.rewriter import Rewriter

Users = dict[Value, list[Node]]
_PER_HEAD = (
    "aten.reshape.default",
    "aten.permute.default",
    "rope",
    "rms_norm",
    "aten.to.dtype",
    "aten.clamp.default",
)


class _Fuse(Pass):
    """What both passes share: they differ in which linears of one input belong together."""

    kind: ClassVar[str]

    def run(self, graph: Graph) -> PassReport:
        report, rewriter, users = self.report(), Rewriter(graph), graph.users()
        dead: list[Node] = []
        for group in self.groups(graph, users):
            if len(group) < 2:
                continue
            if problem := _objection(group, users):
                report.near_misses.append(NearMiss.of(group[0], problem, len(group)))
                continue
            _fuse(rewriter, group, self.kind)
            dead += group
            report.sites.append(Site.of(group[0]))
            report.count(self.kind)
        rewriter.apply(dead)
        return report

    def groups(self, graph: Graph, users: Users) -> Iterator[list[Node]]:
        raise NotImplementedError


@dataclass(frozen=True)
class FuseQkv(_Fuse):
    name: ClassVar[str] = "fuse_qkv"
    tier: ClassVar[Tier] = "changing"
    after: ClassVar[tuple[str, ...]] = ("raise_linear", "raise_addmm", "raise_rope")
    measured: ClassVar[bool] = True
    kind: ClassVar[str] = "qkv"

    def groups(self, graph: Graph, users: Users) -> Iterator[list[Node]]:
        by_input: dict[Value, list[Node]] = defaultdict(list)
        for node in graph.nodes:
            if node.op == "linear" and _reaches_attention(node.result, users):
                by_input[next(node.inputs())].append(node)
        yield from by_input.values()


@dataclass(frozen=True)
class FuseGateUp(_Fuse):
    name: ClassVar[str] = "fuse_gate_up"
    tier: ClassVar[Tier] = "changing"
    after: ClassVar[tuple[str, ...]] = ("raise_linear", "raise_gated_act")
    measured: ClassVar[bool] = True
    kind: ClassVar[str] = "gate_up"

    def groups(self, graph: Graph, users: Users) -> Iterator[list[Node]]:
        for node in graph.nodes:
            sides = [value.producer for value in node.inputs()] if node.op == "gated_act" else []
            linears = [side for side in sides if side is not None and side.op == "linear"]
            if len(linears) == 2 and linears[0] is not linears[1]:
                same = next(linears[0].inputs()) is next(linears[1].inputs())
                yield linears if same else []


def _reaches_attention(value: Value, users: Users) -> bool:
    """Whether all that happens to `value` on its way to attention is per-head work."""
    readers = users.get(value, [])
    if len(readers) != 1:
        return False
    reader = readers[0]
    if reader.op == "attention":
        return True
    return reader.op in _PER_HEAD and _reaches_attention(reader.result, users)


def _objection(group: list[Node], users: Users) -> str | None:
    if len({node.operand("bias") is None for node in group}) > 1:
        return "some of the linears have a bias and some have none"
    weights = [node.operands["weight"] for node in group]
    for weight in weights:
        assert isinstance(weight, Value)
        if not isinstance(weight, Param):
            return f"the weight %{weight.name} is computed in the graph"
        if len(users[weight]) > 1:
            return f"the weight %{weight.name} is read by another node"
    if len({weight.type.dtype for weight in weights if isinstance(weight, Param)}) > 1:  # type: ignore[union-attr]
        return "the weights differ in dtype"
    return None


def _fuse(rewriter: Rewriter, group: list[Node], kind: str) -> None:
    """Places the wide product where the first of the group was: all of them read the same input."""
    weight = _concat(rewriter, [node.operand("weight") for node in group], kind)
    has_bias = group[0].operand("bias") is not None
    bias = _concat(rewriter, [node.operand("bias") for node in group], kind) if has_bias else None
    source = group[0].source
    wide = rewriter.at(group[0]).call(
        "linear", next(group[0].inputs()), weight, bias, source=source, names=[kind]
    )
    sizes = [node.result.type.shape[-1] for node in group]  # type: ignore[union-attr]
    names = [node.result.name for node in group]
    parts = rewriter.call("split", wide.result, sizes=sizes, dim=-1, source=source, names=names)
    for node, part in zip(group, parts.results, strict=True):
        rewriter.replace(node.result, part)


def _concat(rewriter: Rewriter, parts: list[Value | None], kind: str) -> Param:
    params = [part for part in parts if isinstance(part, Param)]
    assert len(params) == len(parts)
    kinds = [param.type for param in params if isinstance(param.type, TensorType)]
    rows = sum(int(k.shape[0]) for k in kinds)  # type: ignore[arg-type]
    name = _joint_name([param.name for param in params], kind)
    recipe = Concat(tuple(param.recipe for param in params), 0)
    return rewriter.param(name, tensor(kinds[0].dtype, (rows, *kinds[0].shape[1:])), recipe)


def _joint_name(names: list[str], kind: str) -> str:
    """`a.q_proj.weight`, `a.k_proj.weight` -> `a.qkv.weight`: what the names have in common, around the kind."""
    parts = [name.split(".") for name in names]
    head = _common(parts)
    tail = _common([part[head:][::-1] for part in parts])
    return ".".join([*parts[0][:head], kind, *parts[0][len(parts[0]) - tail :]])


def _common(parts: list[list[str]]) -> int:
    """How many leading items all lists share."""
    return next((i for i, items in enumerate(zip(*parts, strict=False)) if len(set(items)) > 1), 0)
