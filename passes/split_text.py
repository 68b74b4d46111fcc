"""The text form of a split program: its pieces as graphs, then the program that calls them. Parses back.

program @llama(T in 1..8192) {
  input %input_ids: i64[T]
  weight %w: f32[64,64] = load("model.layers.0.mlp.up_proj.weight")
  %q, %k, %v: f32[T,4,16], f32[T,2,16], f32[T,2,16] = piece first(%input_ids; %w)
  %o: f32[T,4,16] = attention(%q, %k, %v, %kv.0, %batch, layer=0, scale=0.25)
  return %logits
}
"""

from __future__ import annotations

import re

from treadle.ir.errors import VerifyError
from treadle.ir.graph import Graph, Param, Value
from treadle.ir.repeat_text import expand_text
from treadle.ir.text import parse_graph, parse_type, print_graph, print_node
from treadle.ir.weights import parse_recipe
from treadle.passes.split import OpCall, PieceCall, SplitGraph

_REF = re.compile(r"%([\w.]+)")
_TYPE = re.compile(r"\w+(?:\[[^\]]*\]|<[^>]*>)?")


def print_split(program: SplitGraph, *, sources: bool = True) -> str:
    """The pieces, each once, then the program."""
    low, high = program.tokens
    texts = [print_graph(piece, sources=sources) for piece in program.pieces.values()]
    lines = [f"program @{program.name}(T in {low}..{high}) {{"]
    lines += [f"  input %{value.name}: {value.type}" for value in program.inputs]
    lines += [f"  weight %{param.name}: {param.type} = {param.recipe}" for param in program.params]
    for step in program.steps:
        text = print_node(step.node, source=sources) if isinstance(step, OpCall) else _call_text(step)
        lines.append(f"  {text}")
    lines.append(f"  return {_names(program.outputs)}")
    return "\n".join([*texts, "\n".join([*lines, "}", ""])])


def _call_text(call: PieceCall) -> str:
    types = ", ".join(str(value.type) for value in call.outputs)
    weights = f"; {_names(call.params)}" if call.params else ""
    return f"{_names(call.outputs)}: {types} = piece {call.piece}({_names(call.inputs)}{weights})"


def _names(values: list[Value] | list[Param]) -> str:
    return ", ".join(f"%{value.name}" for value in values)


def parse_split(text: str) -> SplitGraph:
    """Reads the text form back. Raises VerifyError naming the line for text that is not one."""
    text = expand_text(text)
    start = text.find("program @")
    if start < 0:
        raise VerifyError("expected `program @name(T in 1..8192) {`")
    pieces = [
        parse_graph(part + "}\n") for part in re.split(r"^\}\n", text[:start], flags=re.M) if part.strip()
    ]
    head, *lines = text[start:].splitlines()
    match = re.match(r"program @([\w.-]+)\(T in (\d+)\.\.(\d+)\) \{$", head)
    if match is None:
        raise VerifyError(f"expected `program @name(T in 1..8192) {{`, found {head!r}")
    program = SplitGraph(match[1], [], [], tokens=(int(match[2]), int(match[3])))
    program.pieces = {piece.name: piece for piece in pieces}
    values: dict[str, Value] = {}
    for line in lines:
        if line.strip() not in ("", "}"):
            try:
                _parse_line(program, values, line.strip())
            except KeyError as error:
                raise VerifyError(f"{error.args[0]!r} is not defined\n  {line}") from error
    return program


def _parse_line(program: SplitGraph, values: dict[str, Value], line: str) -> None:
    if match := re.match(r"input %([\w.]+): (\S+)$", line):
        values[match[1]] = Value(match[1], parse_type(match[2]))
        program.inputs.append(values[match[1]])
    elif match := re.match(r"weight %([\w.]+): (\S+) = (.+)$", line):
        param = Param(match[1], parse_type(match[2]), recipe=parse_recipe(match[3]))
        values[match[1]] = param
        program.params.append(param)
    elif line.startswith("return"):
        program.outputs = [values[name] for name in _REF.findall(line)]
    elif match := re.match(r"(%.*?): (.*) = piece ([\w.-]+)\((.*)\)$", line):
        program.steps.append(_parse_call(program, values, *match.groups()))
    else:
        program.steps.append(_parse_op(values, line))


def _parse_call(
    program: SplitGraph, values: dict[str, Value], names: str, types: str, piece: str, arguments: str
) -> PieceCall:
    if piece not in program.pieces:
        raise KeyError(piece)
    inputs, _, weights = arguments.partition(";")
    params = [values[name] for name in _REF.findall(weights)]
    kinds = [parse_type(kind) for kind in _TYPE.findall(types)]
    outputs = [Value(name, kind) for name, kind in zip(_REF.findall(names), kinds, strict=True)]
    values.update((value.name, value) for value in outputs)
    return PieceCall(piece, [values[name] for name in _REF.findall(inputs)], params, outputs)  # type: ignore[arg-type]


def _parse_op(values: dict[str, Value], line: str) -> OpCall:
    """Reads an op line as the only node of a graph, then binds its operands to the program's values."""
    made, _, rest = line.partition(": ")
    read = dict.fromkeys(_REF.findall(rest.partition("   // ")[0]))
    inputs = [f"input %{name}: {values[name].type}" for name in read]
    graph = parse_graph("\n".join(["graph @op(T in 1..8192) {", *inputs, line, f"return {made}", "}"]))
    (node,) = graph.nodes
    outer: dict[Value, Value] = {inner: values[inner.name] for inner in graph.inputs}
    node.replace_operands(lambda value: outer[value])
    values.update((value.name, value) for value in node.results)
    return OpCall(node)


def print_stage(stage: Graph | SplitGraph) -> str:
    """Either kind of stage as text."""
    return print_graph(stage) if isinstance(stage, Graph) else print_split(stage)
