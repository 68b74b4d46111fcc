"""The text form of a graph: prints, diffs, and parses back to the same graph.

    graph @llama(T in 1..8192) {
      input %input_ids: i64[T]
      param %w: f32[64,64] = load("model.layers.0.mlp.up_proj.weight")
      %x: f32[T,64] = linear(%h, %w)   // model.layers.0.mlp | modeling_llama.py:178
      return %x
    }

Lines in a `repeat` block stand for several (its own module).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import sympy

from treadle.ir.errors import VerifyError
from treadle.ir.graph import Graph, Node, Operand, Param, Source, Value
from treadle.ir.ops.registry import get_op
from treadle.ir.quant_key import QuantKey, quant_key_of
from treadle.ir.repeat_text import expand_lines
from treadle.ir.types import DTYPES, DType, StateType, T, TensorType, Type, tensor
from treadle.ir.weights import parse_recipe


def print_graph(graph: Graph, *, sources: bool = True) -> str:
    """The whole graph as text. Without `sources` the comments are left out."""
    low, high = graph.tokens
    lines = [f"graph @{graph.name}(T in {low}..{high}) {{"]
    lines += [f"  input %{value.name}: {value.type}" for value in graph.inputs]
    lines += [f"  param %{param.name}: {param.type} = {param.recipe}" for param in graph.params]
    lines += [f"  {print_node(node, source=sources)}" for node in graph.nodes]
    lines.append(f"  return {', '.join(f'%{value.name}' for value in graph.outputs)}")
    return "\n".join([*lines, "}", ""])


def print_node(node: Node, *, source: bool = True) -> str:
    """One line: `%y: f32[T,64] = linear(%x, %w)   // where it came from`."""
    names = ", ".join(f"%{value.name}" for value in node.results)
    types = ", ".join(str(value.type) for value in node.results)
    text = f"{names}: {types} = {node.op}({', '.join(_arguments(node))})"
    return f"{text}   // {node.source}" if source and str(node.source) else text


def _arguments(node: Node) -> Iterator[str]:
    in_order = True
    for name in get_op(node.op).tensors:
        if name not in node.operands:
            in_order = False
            continue
        yield _operand_text(node.operands[name]) if in_order else f"{name}={_operand_text(node.operands[name])}"
    for name, attr in node.attrs.items():
        yield f"{name}={attr_text(attr)}"


def _operand_text(operand: Operand) -> str:
    if isinstance(operand, tuple):
        return f"[{', '.join(f'%{value.name}' for value in operand)}]"
    return f"%{operand.name}"


def attr_text(attr: Any) -> str:
    """An attribute as it stands in the text form."""
    if isinstance(attr, DType | sympy.Expr | QuantKey):
        return str(attr)
    if isinstance(attr, list | tuple):
        return f"[{', '.join(map(attr_text, attr))}]"
    return repr(attr)


_HEAD = re.compile(r"graph @([\w.-]+)\(T in (\d+)\.\.(\d+)\) \{$")
_INPUT = re.compile(r"input %([\w.]+): (\S+)$")
_PARAM = re.compile(r"param %([\w.]+): (\S+) = (.+)$")
_NODE = re.compile(r"((?:%[\w.]+(?:, )?)+): (.+?) = ([\w.]+)\((.*)\)(?:   // (.*))?$")
_REFERENCE = re.compile(r"%([\w.]+)")


def parse_graph(text: str) -> Graph:
    """Reads a graph back. Raises VerifyError with the line number for text that is not one."""
    lines = [(number, line.strip()) for number, line in expand_lines(text)]
    lines = [(number, line) for number, line in lines if line and not line.startswith("//")]
    if not lines or not (head := _HEAD.match(lines[0][1])):
        raise VerifyError("line 1: expected `graph @name(T in 1..8192) {`")
    graph = Graph(head[1], tokens=(int(head[2]), int(head[3])))
    values: dict[str, Value] = {}
    for number, line in lines[1:]:
        if line == "}":
            break
        try:
            _parse_line(graph, values, line)
        except (VerifyError, ValueError, KeyError, SyntaxError) as error:
            detail = f"%{error.args[0]} is not defined" if isinstance(error, KeyError) else str(error)
            raise VerifyError(f"line {number}: {detail}\n  {line}") from error
    return graph


def _parse_line(graph: Graph, values: dict[str, Value], line: str) -> None:
    if match := _INPUT.match(line):
        graph.inputs.append(_define(values, Value(match[1], parse_type(match[2]))))
    elif match := _PARAM.match(line):
        param = Param(match[1], parse_type(match[2]), recipe=parse_recipe(match[3]))
        graph.params.append(param)
        _define(values, param)
    elif line.startswith("return"):
        graph.outputs = [values[name] for name in _REFERENCE.findall(line)]
    elif match := _NODE.match(line):
        graph.nodes.append(_parse_node(values, *match.groups()))
    else:
        raise VerifyError("not an input, param, node or return line")


def _define(values: dict[str, Value], value: Value) -> Value:
    if value.name in values:
        raise VerifyError(f"%{value.name} is defined twice")
    values[value.name] = value
    return value


def _parse_node(values: dict[str, Value], names: str, types: str, op: str, arguments: str, comment: str | None) -> Node:
    row = get_op(op)
    call = ast.parse(f"f({_REFERENCE.sub(lambda m: f'_ref({m[1]!r})', arguments)})", mode="eval").body
    assert isinstance(call, ast.Call)
    given = dict(zip(row.tensors, call.args, strict=False)) | {str(k.arg): k.value for k in call.keywords}
    operands: dict[str, Operand] = {}
    attrs: dict[str, Any] = {}
    for name, tree in given.items():
        if name not in row.tensors and name not in row.attributes:
            raise VerifyError(f"{op} has no argument {name!r}; it has {', '.join((*row.tensors, *row.attributes))}")
        value = _read(tree, values)
        if isinstance(value, Value) or (name in row.lists and isinstance(value, list)):
            operands[name] = value if isinstance(value, Value) else tuple(value)
        else:
            attrs[name] = value
    path, _, where = (comment or "").partition(" | ")
    if comment and not where and re.search(r"\.py:\d+$", comment):
        path, where = "", comment
    node = Node(op, operands, attrs, source=Source(path, where))
    kinds = [parse_type(kind) for kind in re.findall(r"[\w]+(?:\[[^\]]*\]|<[^>]*>)?", types)]
    node.results = tuple(
        _define(values, Value(name, kind, node)) for name, kind in zip(_REFERENCE.findall(names), kinds, strict=True)
    )
    return node


def _read(tree: ast.expr, values: dict[str, Value]) -> Any:
    """An operand, or an attribute: number, string, boolean, None, dtype, expression over T, or a list of them."""
    match tree:
        case ast.Call(func=ast.Name(id="_ref"), args=[ast.Constant(value=str(name))]):
            return values[name]
        case ast.Call(func=ast.Name(id="quant"), args=[_, *_]):
            return quant_key_of(tree)
        case ast.List(elts=items):
            return [_read(item, values) for item in items]
        case ast.Constant(value=value):
            return value
        case ast.Name(id=("inf" | "nan") as name):
            return float(name)
        case ast.Name(id=name) if name in DTYPES:
            return DTYPES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Name(id="inf")):
            return -float("inf")
    return parse_dim(ast.unparse(tree))


def parse_dim(text: str) -> Any:
    """An integer or an expression over T. Only arithmetic is read; anything else is a VerifyError."""

    def read(tree: ast.expr) -> Any:
        match tree:
            case ast.Constant(value=int(value)):
                return sympy.Integer(value)
            case ast.Name(id="T"):
                return T
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -read(operand)
            case ast.BinOp(left=left, op=operator, right=right):
                a, b = read(left), read(right)
                match operator:
                    case ast.Add():
                        return a + b
                    case ast.Sub():
                        return a - b
                    case ast.Mult():
                        return a * b
                    case ast.Div():
                        return a / b
                    case ast.FloorDiv():
                        return sympy.floor(a / b)
            case ast.Call(func=ast.Name(id="floor"), args=[argument]):
                return sympy.floor(read(argument))
        raise VerifyError(f"{text!r} is not a dimension: integers, T, + - * / and floor()")

    value = read(ast.parse(text.strip(), mode="eval").body)
    return int(value) if isinstance(value, sympy.Integer) else value


def parse_type(text: str) -> Type:
    """`f32[T,576]`, `kv<3,64>` or `batch`."""
    if match := re.fullmatch(r"(\w+)\[(.*)\]", text):
        if match[1] not in DTYPES:
            raise VerifyError(f"unknown dtype {match[1]!r}; known: {', '.join(DTYPES)}")
        return tensor(match[1], [parse_dim(dim) for dim in match[2].split(",") if dim])
    if match := re.fullmatch(r"(\w+)(?:<([\d,]*)>)?", text):
        return StateType(match[1], tuple(int(p) for p in (match[2] or "").split(",") if p))
    raise VerifyError(f"{text!r} is not a type")


__all__ = ["TensorType", "attr_text", "parse_dim", "parse_graph", "parse_type", "print_graph", "print_node"]
