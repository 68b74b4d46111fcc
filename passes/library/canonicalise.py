"""Gives every meaning one spelling, so that later passes need to know only one.

    view, unsqueeze, squeeze, flatten, select of a size-1 dim  ->  aten.reshape (chains become one)
    transpose, t, movedim                                      ->  aten.permute (chains become one)
    to.device, _to_copy, type_as                               ->  aten.to.dtype
    chunk, split_with_sizes                                    ->  split
    alias, detach, contiguous, dropout in eval mode, casts to the same type, full slices, x * 1, x + 0  ->  x

Exact: no arithmetic changes. Does not fold constants, does not touch strided layout ops (`as_strided`), and leaves a
reshape that follows a permute alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from treadle.ir.build import normal_attrs
from treadle.ir.graph import Graph, Node, Value
from treadle.ir.types import Dim, TensorType
from treadle.passes.base import Pass, PassReport, Tier
from treadle.passes.rewriter import Rewriter

New = Value | Sequence[Value] | None


class _Sweep(Rewriter):
    """A rewriter that remembers which nodes the rules looked through, as they may be dead afterwards."""

    def __init__(self, graph: Graph):
        super().__init__(graph)
        self.touched: list[Node] = []
        self.counts: dict[str, int] = {}

    def resolve(self, value: Value) -> Value:
        while value in self.swaps:
            value = self.swaps[value]
        return value


Rule = Callable[[_Sweep, Node], New]


@dataclass(frozen=True)
class Canonicalise(Pass):
    name: ClassVar[str] = "canonicalise"
    tier: ClassVar[Tier] = "exact"
    stage: ClassVar[str] = "clean"

    def run(self, graph: Graph) -> PassReport:
        report, sweep = self.report(), _Sweep(graph)
        for node in graph.nodes:
            node.replace_operands(sweep.resolve)
            _simplify(sweep, node)
        sweep.apply(sweep.touched)
        for kind, number in sweep.counts.items():
            report.count(kind, number)
        return report


def _simplify(sweep: _Sweep, node: Node) -> None:
    """Applies the rule of `node`'s op, and the rule of what came out, until none applies."""
    current = node
    while (rule := _RULES.get(current.op)) is not None:
        before = current.attrs
        new = rule(sweep.at(node), current)
        if new is None:
            if current.attrs is not before:
                sweep.counts[f"normal {current.op}"] = sweep.counts.get(f"normal {current.op}", 0) + 1
            return
        values = [new] if isinstance(new, Value) else list(new)
        for old, value in zip(current.results, values, strict=True):
            assert old.type == value.type, f"{current.op}: {value.type} cannot replace {old.type}"
            sweep.replace(old, value)
        sweep.touched.append(current)
        sweep.counts[current.op] = sweep.counts.get(current.op, 0) + 1
        producer = values[0].producer
        if len(values) != 1 or producer is None or producer.op == current.op:
            return
        current = producer


def _shape(value: Value) -> tuple[Dim, ...]:
    assert isinstance(value.type, TensorType)
    return value.type.shape


def _self(node: Node) -> Value:
    value = node.operand("self") or node.operand("input")
    assert value is not None
    return value


def _set_attrs(node: Node, **attrs: Any) -> None:
    """Replaces attributes by their normal form; does nothing if they are in it already."""
    normal = normal_attrs(node.op, {**node.attrs, **attrs})
    if str(normal) != str(node.attrs):
        node.attrs = normal


def _forward(sweep: _Sweep, node: Node) -> New:
    """`x -> x` for ops that only change memory layout or autograd state, and for casts to the same type."""
    source = _self(node)
    return source if source.type == node.result.type else None


def _dropout(sweep: _Sweep, node: Node) -> New:
    return None if node.attrs.get("train", False) or node.attrs.get("training", False) else _self(node)


def _cast(sweep: _Sweep, node: Node) -> New:
    source, kind = _self(node), node.result.type
    if source.type == kind:
        return source
    assert isinstance(kind, TensorType)
    if node.op == "aten.to.dtype":
        _set_attrs(node, dtype=kind.dtype, non_blocking=False, copy=False, memory_format=None)
        return None
    return sweep.call("aten.to.dtype", source, dtype=kind.dtype, source=node.source, names=["to"]).result


def _reshape(sweep: _Sweep, node: Node) -> New:
    """Every op that only regroups elements. A chain of them is one reshape, or nothing."""
    source, shape = _self(node), _shape(node.result)
    while source.producer is not None and source.producer.op == "aten.reshape.default":
        sweep.touched.append(source.producer)
        source = _self(source.producer)
    if _shape(source) == shape:
        return source
    if node.op == "aten.reshape.default" and source is _self(node):
        _set_attrs(node, shape=list(shape))
        return None
    return sweep.call("aten.reshape.default", source, shape=list(shape), source=node.source).result


def _select(sweep: _Sweep, node: Node) -> New:
    dim = _axis(node, "dim")
    return _reshape(sweep, node) if _shape(_self(node))[dim] == 1 else None


def _permute(sweep: _Sweep, node: Node) -> New:
    """Every op that only reorders dimensions. Chains compose; moving dimensions of size 1 is a reshape."""
    source, dims = _self(node), _permutation(node)
    while source.producer is not None and source.producer.op == "aten.permute.default":
        sweep.touched.append(source.producer)
        dims = [_permutation(source.producer)[dim] for dim in dims]
        source = _self(source.producer)
    if dims == list(range(len(dims))):
        return source
    moved = [dim for dim in dims if _shape(source)[dim] != 1]
    if moved == sorted(moved):
        shape = list(_shape(node.result))
        return sweep.call("aten.reshape.default", source, shape=shape, source=node.source).result
    if node.op == "aten.permute.default" and source is _self(node):
        _set_attrs(node, dims=dims)
        return None
    return sweep.call("aten.permute.default", source, dims=dims, source=node.source).result


def _permutation(node: Node) -> list[int]:
    """Where each dimension of the result comes from."""
    rank = len(_shape(_self(node)))
    order = list(range(rank))
    match node.op:
        case "aten.permute.default":
            return [dim % rank for dim in node.attrs["dims"]]
        case "aten.t.default":
            return order[::-1]
        case "aten.movedim.int":
            order.insert(node.attrs["destination"] % rank, order.pop(node.attrs["source"] % rank))
            return order
        case _:
            first, second = ("dim0", "dim1") if "dim0" in node.attrs else ("axis0", "axis1")
            a, b = node.attrs[first] % rank, node.attrs[second] % rank
            order[a], order[b] = order[b], order[a]
            return order


def _axis(node: Node, name: str, default: int = 0) -> int:
    operand = next(node.inputs())
    return int(node.attrs.get(name, default)) % max(len(_shape(operand)), 1)


def _expand(sweep: _Sweep, node: Node) -> New:
    if _self(node).type == node.result.type:
        return _self(node)
    _set_attrs(node, size=list(_shape(node.result)), implicit=False)
    return None


def _slice(sweep: _Sweep, node: Node) -> New:
    source, result = _self(node), node.result
    if source.type == result.type and node.attrs.get("step", 1) == 1:
        return source
    dim = _axis(node, "dim")
    size, start, end = _shape(source)[dim], node.attrs.get("start"), node.attrs.get("end")
    if isinstance(size, int):
        start = min(max((start or 0) + (size if (start or 0) < 0 else 0), 0), size)
        end = size if end is None else min(end + (size if end < 0 else 0), size)
    reaches_end = end is None or end == size or (isinstance(end, int) and end > 1 << 31)
    _set_attrs(node, dim=dim, start=start or None, end=None if reaches_end else end)
    return None


def _cat(sweep: _Sweep, node: Node) -> New:
    dim, parts = _axis(node, "dim"), list(node.inputs())
    full = [
        part for part in parts if len(_shape(part)) == len(_shape(node.result)) and _shape(part)[dim] != 0
    ]
    sweep.touched += [part.producer for part in parts if part not in full and part.producer is not None]
    if len(full) == 1 and full[0].type == node.result.type:
        return full[0]
    if len(full) < len(parts):
        return sweep.call("aten.cat.default", full, dim=dim, source=node.source).result
    _set_attrs(node, dim=dim)
    return None


def _split(sweep: _Sweep, node: Node) -> New:
    dim = _axis(node, "dim")
    sizes = [_shape(part)[dim] for part in node.results]
    if not all(isinstance(size, int) for size in sizes):
        return None
    return sweep.call("split", _self(node), sizes=sizes, dim=dim, source=node.source).results


def _dim_list(sweep: _Sweep, node: Node) -> New:
    rank = len(_shape(_self(node)))
    if node.attrs.get("dim") is not None:
        _set_attrs(node, dim=[dim % rank for dim in node.attrs["dim"]])
    return None


def _neutral(scalar: float) -> Rule:
    def rule(sweep: _Sweep, node: Node) -> New:
        other = node.attrs.get("other")
        same = other is not None and not isinstance(other, bool) and other == scalar
        return _self(node) if same and _self(node).type == node.result.type else None

    return rule


_LAYOUT = ("alias", "detach", "detach_", "contiguous", "clone", "lift_fresh", "lift_fresh_copy", "positive")
_REGROUP = ("view.default", "_unsafe_view.default", "reshape.default", "unsqueeze.default", "squeeze.default")
_REGROUP += ("squeeze.dim", "squeeze.dims", "flatten.using_ints", "unflatten.int", "view_as.default")
_REORDER = ("permute.default", "transpose.int", "t.default", "swapaxes.default", "movedim.int")

_RULES: dict[str, Rule] = {
    **{f"aten.{name}.default": _forward for name in _LAYOUT},
    **{f"aten.{name}": _reshape for name in _REGROUP},
    **{f"aten.{name}": _permute for name in _REORDER},
    **{f"aten.{name}": _cast for name in ("to.dtype", "to.device", "to.dtype_layout", "to.other")},
    **{f"aten.{name}.default": _cast for name in ("_to_copy", "type_as")},
    "aten.dropout.default": _dropout,
    "aten.select.int": _select,
    "aten.expand.default": _expand,
    "aten.slice.Tensor": _slice,
    "aten.cat.default": _cat,
    "aten.concat.default": _cat,
    "aten.chunk.default": _split,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split,
    "aten.mean.dim": _dim_list,
    "aten.sum.dim_IntList": _dim_list,
    "aten.mul.Tensor": _neutral(1),
    "aten.div.Tensor": _neutral(1),
    "aten.add.Tensor": _neutral(0),
    "aten.sub.Tensor": _neutral(0),
}
