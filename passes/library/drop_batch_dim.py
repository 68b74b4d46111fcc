"""Removes the leading dimension of size 1 that transformers models carry, so that values are [T, ...].

    %a: f32[1,T,64] = aten.reshape(%x)            (from f32[T,64])
    %b: f32[1,T,32] = linear(%a, %w)        ->    %b: f32[T,32] = linear(%x, %w)

Walks forward from every reshape that adds a leading 1; each node it knows is rebuilt without it. Exact. Runs after
canonicalise (it knows reshape and permute, not view and transpose). Where an op is unknown, or uses the leading
dimension, the value gets its 1 back just before it and the node is reported as a near miss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from treadle.ir.graph import Graph, Node, Operand, Value
from treadle.ir.types import Dim, TensorType
from treadle.passes.base import NearMiss, Pass, PassReport, Tier
from treadle.passes.rewriter import Rewriter

_POINTWISE = """
add.Tensor sub.Tensor mul.Tensor div.Tensor neg.default cos.default sin.default exp.default tanh.default
sigmoid.default silu.default gelu.default relu.default rsqrt.default sqrt.default reciprocal.default abs.default
pow.Tensor_Scalar pow.Scalar to.dtype square.default softplus.default clamp.default minimum.default maximum.default
where.self rsub.Scalar add.Scalar mul.Scalar div.Scalar sub.Scalar erf.default log.default
ge.Scalar gt.Scalar le.Scalar lt.Scalar eq.Scalar ne.Scalar logical_and.default logical_not.default
"""
POINTWISE = frozenset(f"aten.{name}" for name in _POINTWISE.split())


class _Unknown(Exception):
    """This node cannot lose its leading dimension; the text says why."""


@dataclass
class _State:
    rewriter: Rewriter
    twins: dict[Value, Value]

    def bare(self, value: Value, rank: int) -> Value:
        """`value` without its leading 1, if it has the rank of a batched result; else as it is (it broadcasts)."""
        if value in self.twins and len(_shape(value)) == rank:
            return self.twins[value]
        if len(_shape(value)) < rank:
            return self.full(value)
        if _shape(value)[0] != 1:
            raise _Unknown(f"%{value.name} has no leading 1")
        return self.rewriter.call("aten.reshape.default", value, shape=list(_shape(value)[1:])).result

    def full(self, value: Value) -> Value:
        """`value` as it was, with the 1 put back if it has been rebuilt without it."""
        twin = self.twins.get(value)
        if twin is None or (value.producer is not None and _is_seed(value.producer)):
            return value
        return self.rewriter.call("aten.reshape.default", twin, shape=list(_shape(value))).result


@dataclass(frozen=True)
class DropBatchDim(Pass):
    name: ClassVar[str] = "drop_batch_dim"
    tier: ClassVar[Tier] = "exact"
    stage: ClassVar[str] = "clean"

    def run(self, graph: Graph) -> PassReport:
        report = self.report()
        state = _State(Rewriter(graph), {})
        old: list[Node] = []
        for node in graph.nodes:
            state.rewriter.at(node)
            if _is_seed(node):
                state.twins[node.result] = _without(state, node)
                old.append(node)
            elif any(value in state.twins for value in node.inputs()):
                old += self._visit(state, node, report)
        graph.outputs = self._restore_outputs(state, graph)
        state.rewriter.apply(old)
        return report

    def _visit(self, state: _State, node: Node, report: PassReport) -> list[Node]:
        rule = _RULES.get(node.op, _pointwise if node.op in POINTWISE else None)
        try:
            if rule is None:
                raise _Unknown(f"no rule for {node.op}")
            new = rule(state, node)
        except _Unknown as reason:
            report.near_misses.append(NearMiss.of(node, str(reason), 1))
            node.replace_operands(state.full)
            return []
        report.count(node.op)
        for result, twin in zip(node.results, new, strict=True):
            if result.type == twin.type:
                state.rewriter.replace(result, twin)
            else:
                state.twins[result] = twin
        return [node]

    def _restore_outputs(self, state: _State, graph: Graph) -> list[Value]:
        if graph.nodes:
            state.rewriter.at(graph.nodes[-1], after=True)
        return [state.full(value) for value in graph.outputs]


def _shape(value: Value) -> tuple[Dim, ...]:
    return value.type.shape if isinstance(value.type, TensorType) else ()


def _is_seed(node: Node) -> bool:
    """A reshape that puts a 1 in front of something that had none."""
    if node.op != "aten.reshape.default":
        return False
    source = next(node.inputs())
    return _shape(node.result)[:1] == (1,) and _shape(source)[:1] not in ((1,), ())


def _without(state: _State, node: Node) -> Value:
    source, shape = next(node.inputs()), _shape(node.result)[1:]
    if _shape(source) == shape:
        return source
    return state.rewriter.call("aten.reshape.default", source, shape=list(shape), source=node.source).result


def _call(state: _State, node: Node, operands: Mapping[str, Operand], **attrs: Any) -> tuple[Value, ...]:
    merged = {**node.attrs, **attrs}
    return state.rewriter.call(node.op, source=node.source, names=_names(node), **operands, **merged).results


def _names(node: Node) -> list[str]:
    return [value.name for value in node.results]


def _pointwise(state: _State, node: Node) -> tuple[Value, ...]:
    rank = len(_shape(node.result))
    if _shape(node.result)[0] != 1:
        raise _Unknown("the result has no leading 1")
    operands = {
        name: state.bare(value, rank) for name, value in node.operands.items() if isinstance(value, Value)
    }
    return _call(state, node, operands)


def _only_first(state: _State, node: Node) -> tuple[Value, ...]:
    """Ops whose first operand is batched and that work on the last dimensions: linear, norms."""
    (first, value), *rest = node.operands.items()
    assert isinstance(value, Value)
    if any(isinstance(other, Value) and other in state.twins for _, other in rest):
        raise _Unknown("an operand other than the first is batched")
    return _call(state, node, {first: state.bare(value, len(_shape(value))), **dict(rest)})


def _embedding(state: _State, node: Node) -> tuple[Value, ...]:
    name = "indices" if "indices" in node.operands else "ids"
    ids = node.operand(name)
    assert ids is not None
    return _call(state, node, {**node.operands, name: state.bare(ids, len(_shape(ids)))})


def _shifted(state: _State, node: Node) -> tuple[Value, ...]:
    """Ops with a `dim` attribute (a number or a list) that is not the leading one."""
    values = list(node.inputs())
    rank = len(_shape(values[0]))
    given = node.attrs.get("dim", -1 if node.op in ("split", "aten.topk.default") else 0)
    dims = [dim % rank for dim in (given if isinstance(given, list) else [given])]
    if 0 in dims:
        raise _Unknown("works along the leading dimension")
    shifted = [dim - 1 for dim in dims] if isinstance(given, list) else dims[0] - 1
    operands: dict[str, Operand] = {}
    for name, operand in node.operands.items():
        parts = operand if isinstance(operand, tuple) else (operand,)
        bare = tuple(state.bare(value, rank) for value in parts)
        operands[name] = bare if isinstance(operand, tuple) else bare[0]
    return _call(state, node, operands, dim=shifted)


def _stack(state: _State, node: Node) -> tuple[Value, ...]:
    rank = len(_shape(next(node.inputs())))
    dim = node.attrs.get("dim", 0) % (rank + 1)
    if dim == 0:
        raise _Unknown("stacks along the leading dimension")
    return _call(
        state, node, {"tensors": tuple(state.bare(value, rank) for value in node.inputs())}, dim=dim - 1
    )


def _reshape(state: _State, node: Node) -> tuple[Value, ...]:
    """Keeps the 1 in front, or drops it in the model itself: then this is the end of the batched stretch."""
    source, shape = next(node.inputs()), _shape(node.result)
    twin = state.bare(source, len(_shape(source)))
    wanted = shape[1:] if shape and shape[0] == 1 else shape
    if _shape(twin) == wanted:
        return (twin,)
    call = state.rewriter.call("aten.reshape.default", twin, shape=list(wanted), source=node.source)
    return call.results


def _permute(state: _State, node: Node) -> tuple[Value, ...]:
    dims = node.attrs["dims"]
    if dims[0] != 0:
        raise _Unknown("moves the leading dimension")
    source = next(node.inputs())
    return _call(state, node, {"self": state.bare(source, len(dims))}, dims=[dim - 1 for dim in dims[1:]])


def _expand(state: _State, node: Node) -> tuple[Value, ...]:
    source, size = next(node.inputs()), _shape(node.result)
    if size[0] != 1:
        raise _Unknown("the result has no leading 1")
    return _call(state, node, {"self": state.bare(source, len(size))}, size=list(size[1:]))


_Rule = Callable[[_State, Node], tuple[Value, ...]]
_RULES: dict[str, _Rule] = {
    "aten.reshape.default": _reshape,
    "aten.permute.default": _permute,
    "aten.expand.default": _expand,
    "aten.stack.default": _stack,
    "aten.embedding.default": _embedding,
    "embedding": _embedding,
    **{f"aten.{name}": _only_first for name in ("linear.default", "layer_norm.default", "rms_norm.default")},
    **{name: _only_first for name in ("linear", "layer_norm", "rms_norm")},
    **{f"aten.{name}.default": _shifted for name in ("cat", "topk", "cumsum", "repeat_interleave")},
    **{f"aten.{name}": _shifted for name in ("mean.dim", "sum.dim_IntList", "slice.Tensor", "softmax.int")},
    "split": _shifted,
}
