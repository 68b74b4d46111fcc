"""Says a piece in TVM's words: canonical graph in, Relax module out. One row of `OPS` for each op that can be said.

Runs in the worker only. Products of matrices go out to a library by name (see tvm_runtime); the rest is TVM's own code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax, tirx, topi
from tvm.ir import StringImm
from tvm.relax import op as R

from treadle.codegen.tvm_runtime import ENTRY, LIBRARY_PREFIX, VERSIONS
from treadle.ir.errors import ArtifactError
from treadle.ir.graph import Graph, Node, Value
from treadle.ir.text import print_node
from treadle.ir.types import DType, T, TensorType

_DTYPES = {
    "f32": "float32", "f64": "float64", "f16": "float16", "bf16": "bfloat16", "bool": "bool",
    "i64": "int64", "i32": "int32", "i16": "int16", "i8": "int8", "u8": "uint8",
}  # fmt: skip


@dataclass(frozen=True)
class Emission:
    """One graph being emitted. `tokens` is what stands for T: a variable, or a number for an exact size."""

    builder: Any
    tokens: Any
    values: dict[Value, Any]
    library: frozenset[str]

    def emit(self, expression: Any) -> Any:
        return self.builder.emit(expression)

    def type(self, kind: Any) -> Any:
        return relax.TensorType(self.shape(kind), _dtype(kind.dtype))

    def shape(self, kind: TensorType) -> list[Any]:
        return [dim if isinstance(dim, int) else self.dim(dim) for dim in kind.shape]

    def dim(self, dim: Any) -> Any:
        """An affine dimension over T."""
        slope, offset = int(dim.coeff(T, 1)), int(dim.coeff(T, 0))
        return tirx.IntImm("int64", slope) * self.tokens + tirx.IntImm("int64", offset)

    def operand(self, node: Node, name: str) -> Any:
        """The expression bound to `name`, or None."""
        value = node.operand(name)
        return None if value is None else self.values[value]


Emit = Callable[[Emission, Node], Any]
"""Returns the result, or a list with one for each result of the node."""


def emit_piece(
    graph: Graph, exact: int | None, library: Collection[str], sources: Sequence[str], versions: str
) -> Any:
    """The Relax module of a piece: a function `piece(inputs..., params...)` that returns a tuple, and `versions()`.

    `exact` fixes T to a number. Ops named in `library` become calls of packed functions. Raises ArtifactError that
    names op and place for an op without a row.
    """
    refuse_unknown(graph, sources)
    tokens = tirx.IntImm("int64", exact) if exact is not None else tirx.Var("T", "int64")
    builder = relax.BlockBuilder()
    scope = Emission(builder, tokens, {}, frozenset(library))
    arguments = []
    for value in (*graph.inputs, *graph.params):
        variable = relax.Var(f"a{len(arguments)}", scope.type(value.type))
        scope.values[value] = variable
        arguments.append(variable)
    with builder.function(ENTRY, arguments):
        with builder.dataflow():
            for number, node in enumerate(graph.nodes):
                _emit_node(scope, node, _place(node, number, sources))
            result = builder.emit_output(relax.Tuple([scope.values[value] for value in graph.outputs]))
        builder.emit_func_output(result)
    with builder.function(VERSIONS, []):
        builder.emit_func_output(StringImm(versions))
    return builder.finalize()


def refuse_unknown(graph: Graph, sources: Sequence[str]) -> None:
    """Raises ArtifactError for the first op or dtype that cannot be said."""
    for number, node in enumerate(graph.nodes):
        if node.op not in OPS:
            raise ArtifactError(
                f"this backend has no code for {node.op} at {_place(node, number, sources)}; "
                f"it has: {', '.join(sorted(OPS))}. Add a row to OPS in tvm_emit.py, or compile with another --backend"
            )
        for result in node.results:
            assert isinstance(result.type, TensorType), "state does not enter a piece"
            if result.type.dtype not in _DTYPES:
                raise ArtifactError(
                    f"this backend has no dtype {result.type.dtype} at {_place(node, number, sources)}"
                )


def _place(node: Node, number: int, sources: Sequence[str]) -> str:
    where = sources[number] if number < len(sources) else ""
    return f"`{print_node(node, source=False)}`" + (f" ({where})" if where else "")


def _emit_node(scope: Emission, node: Node, place: str) -> None:
    try:
        emit = _call_library if node.op in scope.library else OPS[node.op]
        results = emit(scope, node)
        results = list(results) if isinstance(results, list) else [results]
        for value, result in zip(node.results, results, strict=True):
            scope.values[value] = _as_declared(scope, result, value)
    except (ValueError, TypeError, KeyError) as error:  # TVM's own errors are ValueErrors and TypeErrors
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise ArtifactError(f"TVM refuses {node.op} at {place}: {reason}") from error


def _as_declared(scope: Emission, result: Any, value: Value) -> Any:
    """The result as a variable of the dtype that the IR says; TVM widens some."""
    kind = value.type
    assert isinstance(kind, TensorType)
    wanted = _dtype(kind.dtype)
    variable = scope.emit(result)
    return variable if str(variable.ty.dtype) == wanted else scope.emit(R.astype(variable, wanted))


def _dtype(dtype: Any) -> str:
    return _DTYPES[str(dtype)]


def _scalar(value: float | int, dtype: str) -> Any:
    return relax.const(value, dtype)


def _call_library(scope: Emission, node: Node) -> Any:
    arguments = [scope.values[value] for value in node.inputs()]
    return relax.call_dps_packed(LIBRARY_PREFIX + node.op, arguments, scope.type(node.result.type))


def _linear(scope: Emission, node: Node) -> Any:
    x, weight, bias = (scope.operand(node, name) for name in ("x", "weight", "bias"))
    if x.ty.ndim != 2:
        raise ValueError("only products of two matrices have code")
    product = scope.builder.emit_te(topi.nn.matmul, x, weight, None, "float32", False, True)
    narrow = R.astype(product, _dtype(_kind(node).dtype))
    return narrow if bias is None else R.add(narrow, bias)


def _embedding(scope: Emission, node: Node) -> Any:
    return R.take(scope.operand(node, "table"), scope.operand(node, "ids"), axis=0)


def _rms_norm(scope: Emission, node: Node) -> Any:
    return _norm_rows(scope, node, scope.operand(node, "x"))


def _add_rms_norm(scope: Emission, node: Node) -> Any:
    total = scope.emit(R.add(scope.operand(node, "residual"), scope.operand(node, "x")))
    return [_norm_rows(scope, node, total), total]


def _norm_rows(scope: Emission, node: Node, x: Any) -> Any:
    narrow = _dtype(_kind(node).dtype)
    wide = scope.emit(R.astype(x, "float32"))
    mean = R.mean(R.multiply(wide, wide), [-1], keepdims=True)
    normed = scope.emit(R.multiply(wide, R.rsqrt(R.add(mean, _scalar(node.attrs["eps"], "float32")))))
    weight, offset = scope.operand(node, "weight"), node.attrs.get("offset", 0.0)
    if weight is None:
        return R.astype(normed, narrow)
    if node.attrs.get("scale_in_f32", False):
        return R.astype(R.multiply(normed, _shifted(R.astype(weight, "float32"), offset, "float32")), narrow)
    return R.multiply(_shifted(weight, offset, narrow), R.astype(normed, narrow))


def _shifted(weight: Any, offset: float, dtype: str) -> Any:
    return R.add(weight, _scalar(offset, dtype)) if offset else weight


def _layer_norm(scope: Emission, node: Node) -> Any:
    narrow = _dtype(_kind(node).dtype)
    wide = scope.emit(R.astype(scope.operand(node, "x"), "float32"))
    centred = scope.emit(R.subtract(wide, R.mean(wide, [-1], keepdims=True)))
    variance = R.mean(R.multiply(centred, centred), [-1], keepdims=True)
    out = R.multiply(centred, R.rsqrt(R.add(variance, _scalar(node.attrs["eps"], "float32"))))
    weight, bias = scope.operand(node, "weight"), scope.operand(node, "bias")
    out = out if weight is None else R.multiply(out, R.astype(weight, "float32"))
    out = out if bias is None else R.add(out, R.astype(bias, "float32"))
    return R.astype(out, narrow)


def _rope(scope: Emission, node: Node) -> Any:
    x, cos, sin = (scope.operand(node, name) for name in ("x", "cos", "sin"))
    heads, size = (int(dim) for dim in _kind(node).shape[-2:])  # type: ignore[arg-type]
    turning = int(node.operands["cos"].type.shape[-1])  # type: ignore[union-attr]
    turned = scope.emit(_slice(x, -1, 0, turning))
    half = turning // 2
    if node.attrs.get("interleaved", False):
        pairs = scope.emit(R.reshape(turned, [scope.tokens, heads, half, 2]))
        swapped = R.concat([R.negative(_slice(pairs, -1, 1, 2)), _slice(pairs, -1, 0, 1)], axis=-1)
        swapped = R.reshape(swapped, [scope.tokens, heads, turning])
    else:
        swapped = R.concat(
            [R.negative(_slice(turned, -1, half, turning)), _slice(turned, -1, 0, half)], axis=-1
        )
    out = R.add(
        R.multiply(turned, R.expand_dims(cos, -2)), R.multiply(scope.emit(swapped), R.expand_dims(sin, -2))
    )
    if turning == size:
        return out
    return R.concat([scope.emit(out), _slice(x, -1, turning, size)], axis=-1)


def _slice(variable: Any, axis: int, start: int, end: int) -> Any:
    return R.strided_slice(variable, [axis % variable.ty.ndim], [start], [end], assume_inbound=True)


def _gated_act(scope: Emission, node: Node) -> Any:
    gate = _ACTIVATIONS[node.attrs["act"]](scope, scope.operand(node, "gate"), _dtype(_kind(node).dtype))
    return R.multiply(gate, scope.operand(node, "up"))


def _silu(scope: Emission, x: Any, dtype: str) -> Any:
    wide = scope.emit(R.astype(x, "float32"))
    # A polynomial that LLVM can vectorise, where the C library's function is called for each element.
    falling = scope.builder.emit_te(topi.fast_exp, scope.emit(R.negative(wide)))
    return R.astype(R.divide(wide, R.add(_scalar(1.0, "float32"), falling)), dtype)


def _gelu(scope: Emission, x: Any, dtype: str) -> Any:
    wide = scope.emit(R.astype(x, "float32"))
    one_plus = R.add(_scalar(1.0, "float32"), R.erf(R.multiply(wide, _scalar(math.sqrt(0.5), "float32"))))
    return R.astype(R.multiply(R.multiply(_scalar(0.5, "float32"), wide), one_plus), dtype)


def _gelu_tanh(scope: Emission, x: Any, dtype: str) -> Any:
    wide = scope.emit(R.astype(x, "float32"))
    cube = R.multiply(R.multiply(wide, wide), wide)
    inner = R.multiply(
        _scalar(math.sqrt(2 / math.pi), "float32"),
        R.add(wide, R.multiply(_scalar(0.044715, "float32"), cube)),
    )
    one_plus = R.add(_scalar(1.0, "float32"), R.tanh(inner))
    return R.astype(R.multiply(R.multiply(_scalar(0.5, "float32"), wide), one_plus), dtype)


_ACTIVATIONS: Mapping[str, Callable[[Emission, Any, str], Any]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda scope, x, dtype: R.nn.relu(x),
}


def _split(scope: Emission, node: Node) -> Any:
    x, axis, start, parts = scope.operand(node, "x"), node.attrs.get("dim", -1), 0, []
    for size in node.attrs["sizes"]:
        parts.append(_slice(x, axis, start, start + size))
        start += size
    return parts


def _reshape(scope: Emission, node: Node) -> Any:
    return R.reshape(scope.operand(node, "self"), scope.shape(_kind(node)))


def _to(scope: Emission, node: Node) -> Any:
    return R.astype(scope.operand(node, "self"), _dtype(node.attrs["dtype"]))


def _cat(scope: Emission, node: Node) -> Any:
    parts = node.operands["tensors"]
    assert isinstance(parts, tuple)
    return R.concat([scope.values[part] for part in parts], axis=node.attrs.get("dim", 0))


def _binary(op: Callable[[Any, Any], Any]) -> Emit:
    """An elementwise op of two tensors, or of a tensor and a number."""

    def emit(scope: Emission, node: Node) -> Any:
        dtype = _dtype(_kind(node).dtype)
        if node.attrs.get("alpha", 1) != 1 or node.attrs.get("rounding_mode") is not None:
            raise ValueError("only plain arithmetic has code: alpha 1 and no rounding_mode")
        left = R.astype(scope.operand(node, "self"), dtype)
        other = scope.operand(node, "other")
        right = _scalar(node.attrs["other"], dtype) if other is None else R.astype(other, dtype)
        return op(left, right)

    return emit


def _unary(op: Callable[[Any], Any]) -> Emit:
    """An elementwise op, computed in float32."""

    def emit(scope: Emission, node: Node) -> Any:
        wide = R.astype(scope.operand(node, "self"), "float32")
        return R.astype(op(wide), _dtype(_kind(node).dtype))

    return emit


def _pow(scope: Emission, node: Node) -> Any:
    exponent, x = node.attrs["exponent"], scope.operand(node, "self")
    if exponent not in (2.0, 3.0):
        raise ValueError(f"only squares and cubes have code, not a power of {exponent}")
    square = R.multiply(x, x)
    return square if exponent == 2.0 else R.multiply(scope.emit(square), x)


def _softmax(scope: Emission, node: Node) -> Any:
    wide = R.astype(scope.operand(node, "self"), "float32")
    return R.astype(R.nn.softmax(wide, axis=node.attrs["dim"]), _dtype(_kind(node).dtype))


def _sum(scope: Emission, node: Node) -> Any:
    keep = node.attrs.get("keepdim", False)
    return R.sum(scope.operand(node, "self"), list(node.attrs["dim"]), keepdims=keep)


def _kind(node: Node) -> TensorType:
    """The type of the first result."""
    kind = node.results[0].type
    assert isinstance(kind, TensorType) and isinstance(kind.dtype, DType)
    return kind


OPS: Mapping[str, Emit] = {
    "linear": _linear,
    "embedding": _embedding,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "layer_norm": _layer_norm,
    "rope": _rope,
    "gated_act": _gated_act,
    "split": _split,
    "aten.reshape.default": _reshape,
    "aten.view.default": _reshape,
    "aten.to.dtype": _to,
    "aten.cat.default": _cat,
    "aten.add.Tensor": _binary(R.add),
    "aten.sub.Tensor": _binary(R.subtract),
    "aten.mul.Tensor": _binary(R.multiply),
    "aten.div.Tensor": _binary(R.divide),
    "aten.pow.Tensor_Scalar": _pow,
    "aten.cos.default": _unary(R.cos),
    "aten.sin.default": _unary(R.sin),
    "aten.tanh.default": _unary(R.tanh),
    "aten.softmax.int": _softmax,
    "aten.sum.dim_IntList": _sum,
}
