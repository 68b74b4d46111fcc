"""A split program as plain data: named steps and KV layers, ready to be stored and run by somebody who has no IR."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sympy

from treadle.ir.graph import Node, Param, Value
from treadle.ir.ops.registry import get_op
from treadle.ir.quant_key import QuantKey
from treadle.ir.types import StateType, TensorType
from treadle.passes.split import OpCall, PieceCall, SplitGraph


@dataclass
class ProgramStep:
    """One call, with the fields that a stored program has."""

    kind: str
    inputs: list[str]
    outputs: list[str]
    piece: str = ""
    op: str = ""
    params: list[str] = field(default_factory=list)
    attrs: dict[str, Any] = field(default_factory=dict)


@dataclass
class KVLayerSpec:
    """What one attention layer caches. `window` counts visible tokens including the query's own; None means all."""

    layer: int
    num_kv_heads: int
    head_size: int
    window: int | None = None


def program_inputs(program: SplitGraph) -> list[str]:
    """Names of the inputs that are tensors; state is bound by the runtime."""
    return [value.name for value in program.inputs if isinstance(value.type, TensorType)]


def program_steps(program: SplitGraph) -> list[ProgramStep]:
    """The steps in order. Names of values are unique in the program."""
    return [_piece_step(step) if isinstance(step, PieceCall) else _op_step(step) for step in program.steps]


def kv_layers(program: SplitGraph) -> list[KVLayerSpec]:
    """One for each attention step, in step order."""
    layers = []
    for step in program.steps:
        if isinstance(step, OpCall) and step.node.op == "attention":
            _, heads, size = _heads(step.node, "k")
            layers.append(KVLayerSpec(step.node.attrs["layer"], heads, size, step.node.attrs.get("window")))
    return layers


def _piece_step(call: PieceCall) -> ProgramStep:
    return ProgramStep(
        "piece", _names(call.inputs), _names(call.outputs), piece=call.piece, params=_names(call.params)
    )


def _op_step(call: OpCall) -> ProgramStep:
    node = call.node
    given = {name: value for name, value in node.operands.items() if not _is_state(value)}
    inputs = {name: value for name, value in given.items() if not isinstance(value, Param)}
    params = {name: value for name, value in given.items() if isinstance(value, Param)}
    attrs = {name: _plain(attr) for name, attr in _all_attrs(node).items()}
    if node.op == "attention":
        attrs |= _attention_attrs(node)
    elif node.op != "select_rows":
        attrs["operands"] = [*inputs, *params]
    return ProgramStep(
        "op",
        _names(inputs.values()),
        _names(node.results),
        op=node.op,
        params=_names(params.values()),
        attrs=attrs,
    )


def _attention_attrs(node: Node) -> dict[str, Any]:
    _, num_heads, head_size = _heads(node, "q")
    _, num_kv_heads, _ = _heads(node, "k")
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_size": head_size}
    return {**sizes, **({"sinks": True} if "sinks" in node.operands else {})}


def _all_attrs(node: Node) -> dict[str, Any]:
    """The attributes with the schema's defaults filled in."""
    row = get_op(node.op)
    return {name: node.attrs.get(name, row.defaults.get(name)) for name in row.attributes}


def _heads(node: Node, name: str) -> tuple[Any, int, int]:
    value = node.operand(name)
    assert value is not None and isinstance(value.type, TensorType)
    tokens, heads, size = value.type.shape
    return tokens, int(heads), int(size)  # type: ignore[arg-type]


def _is_state(operand: Any) -> bool:
    assert isinstance(operand, Value), "a split op cannot take a list of tensors"
    return isinstance(operand.type, StateType)


def _names(values: Any) -> list[str]:
    return [value.name for value in values]


def _plain(attr: Any) -> Any:
    if isinstance(attr, list | tuple):
        return [_plain(item) for item in attr]
    return str(attr) if isinstance(attr, sympy.Expr | str | QuantKey) else attr
