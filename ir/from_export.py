"""Turns a torch.export program of one step of a model into an IR graph.

Asserts, metadata checks, conversions that convert nothing, and dead code do not survive; sizes computed from the
token count become expressions over T; devices, layouts and memory formats are dropped.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from treadle.ir.build import normal_attrs
from treadle.ir.errors import TraceError
from treadle.ir.finish_trace import add_state, drop_dead
from treadle.ir.functionalize import functional_twin, is_mutating
from treadle.ir.graph import Graph, Node, Operand, Param, Value
from treadle.ir.infer import infer
from treadle.ir.ops.registry import get_op
from treadle.ir.trace_source import node_source
from treadle.ir.types import DType, T, TensorType, Type, simplify, tensor
from treadle.ir.weights import Literal, Recipe

_DROPPED_ATTRS = {"device", "layout", "memory_format", "pin_memory", "non_blocking", "copy", "requires_grad"}
_DROPPED_ATTRS |= {
    "padding_idx",
    "scale_grad_by_freq",
    "sparse",
}  # of an embedding; they matter to gradients only
_ERASED = {
    "aten._assert_tensor_metadata",
    "aten._assert_scalar",
    "aten._assert_async",
    "aten.sym_constrain_range",
}
_IDENTITY = {
    "aten.alias",
    "aten.detach",
    "aten.detach_",
    "aten.clone",
    "aten.contiguous",
    "aten.lift_fresh_copy",
}
_IDENTITY |= {"aten.dropout", "aten.lift", "aten.lift_fresh"}
_CASTS = {"aten.to", "aten._to_copy", "aten.type_as", "aten.to.other"}
_RESHAPES = {"aten.view", "aten._unsafe_view", "aten.reshape"}
_NO_CHANGE = {"aten.slice", "aten.expand", "aten.reshape", "aten.to", "aten.squeeze"}
_MIXES_TOKENS = ("conv", "cumsum", "cumprod", "scan", "while_loop", "scaled_dot_product", "_flash", "fft_")

ResolveParam = Callable[[str], tuple[str, Recipe]]


@dataclass
class Context:
    """What the conversion of one program carries along."""

    graph: Graph
    symbol: sympy.Symbol | None
    prefix: str
    values: dict[fx.Node, Any] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)

    def name(self, hint: str) -> str:
        hint = re.sub(r"[^\w.]", "_", hint)
        name, number = hint, 0
        while name in self.names:
            number += 1
            name = f"{hint}.{number}"
        self.names.add(name)
        return name


def convert(
    program: ExportedProgram,
    name: str,
    input_names: list[str],
    resolve: ResolveParam,
    tokens: tuple[int, int],
    prefix: str,
) -> Graph:
    """The IR graph of `program`. `resolve` gives a traced parameter its graph name and recipe.

    Raises TraceError for what the IR cannot hold and for values that depend on the other tokens of the batch.
    """
    context = Context(Graph(name, tokens=tokens), _symbol(program), prefix)
    if program.graph_signature.buffers_to_mutate:
        changed = ", ".join(program.graph_signature.buffers_to_mutate.values()).replace(prefix, "")
        raise TraceError(
            f"the model changes its own buffers while it runs ({changed}); a graph has no such state"
        )
    program.graph.eliminate_dead_code()
    _bind_inputs(program, context, input_names, resolve)
    context.graph.outputs = list(_convert_nodes(program.graph, program.graph_module, context))
    drop_dead(context.graph)
    add_state(context.graph)
    return context.graph


def _symbol(program: ExportedProgram) -> sympy.Symbol | None:
    """The one symbol of the program's shapes."""
    symbols = list(program.range_constraints)
    if len(symbols) > 1:
        raise TraceError(
            f"the model has more than one unknown size ({', '.join(map(str, symbols))}); only T is allowed"
        )
    return symbols[0] if symbols else None


def _bind_inputs(
    program: ExportedProgram, context: Context, input_names: list[str], resolve: ResolveParam
) -> None:
    kinds = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    shared: dict[str, Param] = {}
    names = iter(input_names)
    for node in program.graph.find_nodes(op="placeholder"):
        spec = kinds[node.name]
        kind = _type(context, node.meta["val"])
        if spec.kind == InputKind.USER_INPUT:
            value = Value(context.name(next(names)), kind)
            context.graph.inputs.append(value)
            context.values[node] = value
            continue
        if not node.users:
            continue
        if spec.kind == InputKind.CONSTANT_TENSOR:
            path, constant = str(spec.target), program.constants[str(spec.target)]
            assert isinstance(constant, torch.Tensor)
            if constant.is_meta:
                raise TraceError(f"the tensor {path}, made while tracing, has no values on the meta device")
            recipe: Recipe = Literal.of(constant)
        else:
            path, recipe = resolve(str(spec.target).removeprefix(context.prefix))
        if path not in shared:
            shared[path] = Param(context.name(path), kind, recipe=recipe)
            context.graph.params.append(shared[path])
        context.values[node] = shared[path]


def _type(context: Context, value: torch.Tensor) -> TensorType:
    return tensor(DType.of(value.dtype), [_dim(context, size) for size in value.shape])


def _dim(context: Context, size: int | torch.SymInt) -> Any:
    """A size as an expression over T."""
    if isinstance(size, int):
        return size
    expression = sympy.sympify(size.node.expr)
    if context.symbol is not None:
        expression = expression.subs(context.symbol, T)
    floored = expression.replace(
        lambda e: type(e).__name__ in ("FloorDiv", "CleanDiv", "IntTrueDiv"),
        lambda e: sympy.floor(e.args[0] / e.args[1]),
    )
    return simplify(floored)


def _convert_nodes(fx_graph: fx.Graph, owner: torch.nn.Module, context: Context) -> Any:
    """Converts every call; returns what the graph's output node holds."""
    for node in fx_graph.nodes:
        if node.op == "call_function":
            context.values[node] = _convert_call(node, owner, context)
        elif node.op == "get_attr":
            context.values[node] = getattr(owner, str(node.target))
        elif node.op == "output":
            return fx.map_arg(node.args[0], lambda arg: context.values[arg])
    return None


def _convert_call(node: fx.Node, owner: torch.nn.Module, context: Context) -> Any:
    target = node.target
    if target is operator.getitem:
        return context.values[node.args[0]][node.args[1]]  # type: ignore[index]
    if isinstance(node.meta.get("val"), torch.SymInt | int):
        return _dim(context, node.meta["val"])
    if isinstance(node.meta.get("val"), torch.SymBool):
        return None  # a comparison of sizes, for an assert that is erased
    if isinstance(target, torch._ops.HigherOrderOperator):
        return _inline(node, owner, context)
    if not isinstance(target, torch._ops.OpOverload):
        raise _unsupported(node, context, f"the call {target}")
    packet = f"{target.namespace}.{target._opname}"
    if packet in _ERASED:
        return None
    if packet == "treadle.traced_attention":
        return _emit(node, context, "attention", _bound(node, context))
    if packet == "treadle.traced_experts":
        return _emit(node, context, "experts", _bound(node, context))
    if any(word in target._opname for word in _MIXES_TOKENS):
        raise _unsupported(node, context, f"{packet} mixes tokens outside the attention interface")
    if is_mutating(node):
        return _convert_in_place(node, context)
    return _convert_aten(node, context, packet, str(target))


def _convert_in_place(node: fx.Node, context: Context) -> Any:
    """The functional twin's result; every later reader of the changed tensor reads it instead."""
    twin = functional_twin(node)
    if twin is None:
        raise _unsupported(node, context, f"{node.target} changes a tensor in place")
    before = context.values[node.args[0]]  # type: ignore[index]
    after = _emit(node, context, str(twin), _bound(node, context))
    context.values.update({key: after for key, value in context.values.items() if value is before})
    return after


def _inline(node: fx.Node, owner: torch.nn.Module, context: Context) -> Any:
    """Autocast and gradient-mode regions: their body becomes part of the graph."""
    name = str(node.target)
    if "autocast" not in name and "grad" not in name:
        raise _unsupported(node, context, f"the control-flow construct {name}")
    position = next(i for i, arg in enumerate(node.args) if isinstance(arg, fx.Node) and arg.op == "get_attr")
    body = context.values[node.args[position]]  # type: ignore[index]
    given = [context.values[arg] if isinstance(arg, fx.Node) else arg for arg in node.args[position + 1 :]]
    for placeholder, value in zip(body.graph.find_nodes(op="placeholder"), given, strict=True):
        context.values[placeholder] = value
    return _convert_nodes(body.graph, body, context)


def _convert_aten(node: fx.Node, context: Context, packet: str, name: str) -> Any:
    arguments = _bound(node, context)
    first = next((a for a in arguments.values() if isinstance(a, Value)), None)
    if packet in _IDENTITY and first is not None:
        if arguments.get("train"):
            raise _unsupported(node, context, "dropout in training mode")
        return first
    if packet in _CASTS and first is not None:
        kind = _type(context, node.meta["val"])
        if kind == first.type:
            return first
        return _emit(node, context, "aten.to.dtype", {"self": first, "dtype": kind.dtype})
    if packet in _RESHAPES and first is not None:
        kind = _type(context, node.meta["val"])
        if kind == first.type:
            return first
        return _emit(node, context, "aten.reshape.default", {"self": first, "shape": list(kind.shape)})
    values = _emit(node, context, name, arguments)
    if packet in _NO_CHANGE and first is not None and isinstance(values, Value) and values.type == first.type:
        context.graph.nodes.pop()
        return first
    return values


def _bound(node: fx.Node, context: Context) -> dict[str, Any]:
    """Arguments by schema name, converted; None and what the IR has no word for are left out."""
    schema = node.target._schema  # type: ignore[union-attr]
    given = {
        argument.name: value for argument, value in zip(schema.arguments, node.args, strict=False)
    } | node.kwargs
    return {
        name: _argument(value, context)
        for name, value in given.items()
        if name not in _DROPPED_ATTRS and value is not None
    }


def _argument(value: Any, context: Context) -> Any:
    if isinstance(value, fx.Node):
        return context.values[value]
    if isinstance(value, torch.dtype):
        return DType.of(value)
    if isinstance(value, torch.SymInt):
        return _dim(context, value)
    if isinstance(value, list | tuple):
        return [_argument(item, context) for item in value]
    return value


def _emit(node: fx.Node, context: Context, op: str, arguments: dict[str, Any]) -> Any:
    """Appends an IR node; returns its value, or the tuple of its values."""
    row = get_op(op)
    operands: dict[str, Operand] = {}
    for name in row.tensors:
        given = arguments.get(name)
        if isinstance(given, Value):
            operands[name] = given
        elif isinstance(given, list):
            operands[name] = tuple(given)  # a plain number in a tensor's place stays an attribute
    attrs = normal_attrs(op, {name: value for name, value in arguments.items() if name not in operands})
    made = Node(op, operands, attrs, source=node_source(node, context.prefix))
    types = infer(op, operands, attrs)
    if why := _mixes_tokens(made, types):
        raise _unsupported(node, context, f"{op} {why}; tokens of one step may belong to different requests")
    hint = node.name.rstrip("0123456789").rstrip("_") or node.name
    made.results = tuple(Value(context.name(hint), kind, made) for kind in types)
    context.graph.nodes.append(made)
    many = isinstance(node.meta.get("val"), tuple | list)
    return made.results if many else made.results[0]


def _mixes_tokens(node: Node, results: tuple[Type, ...]) -> str:
    """Why a call outside attention lets tokens see one another, judged by its sizes; '' if it does not."""
    if ".new_" in node.op:
        return ""  # takes only a dtype from its operand
    sizes = [kind for kind in results if isinstance(kind, TensorType)]
    if any(sum(not isinstance(dim, int) for dim in kind.shape) > 1 for kind in sizes):
        return "pairs tokens with tokens outside the attention interface"
    given = any(isinstance(value.type, TensorType) and value.type.symbolic for value in node.inputs())
    return "reduces over the tokens" if given and not any(kind.symbolic for kind in sizes) else ""


def _unsupported(node: fx.Node, context: Context, what: str) -> TraceError:
    source = node_source(node, context.prefix)
    return TraceError(
        f"{what}, which the IR cannot hold: at {source.line or 'unknown line'} in module {source.path or '?'}"
    )
