"""Cuts a graph at the ops that declare `splits`: what lies between two of them becomes a piece, compiled on its own.

The result is a program: a list of steps that call pieces and split ops by name of value. Unify (its own module) then
lets equal pieces share one definition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from treadle.ir.errors import VerifyError
from treadle.ir.graph import Graph, Node, Param, Value
from treadle.ir.interpret import call as call_reference
from treadle.ir.interpret import run as run_graph
from treadle.ir.ops.registry import get_op
from treadle.ir.types import StateType
from treadle.ir.verify import verify


@dataclass(eq=False)
class PieceCall:
    """A call of a piece: `inputs` and `params` bind the piece's, in order; `outputs` are new values."""

    piece: str
    inputs: list[Value]
    params: list[Param]
    outputs: list[Value]

    @property
    def reads(self) -> list[Value]:
        return self.inputs


@dataclass(eq=False)
class OpCall:
    """A call of a split op. The node's operands and results are values of the program."""

    node: Node

    @property
    def reads(self) -> list[Value]:
        return list(self.node.inputs())

    @property
    def outputs(self) -> list[Value]:
        return list(self.node.results)


@dataclass(eq=False)
class SplitGraph:
    """A graph as a program over pieces. `pieces` maps names to graphs; several calls may name one piece."""

    name: str
    inputs: list[Value]
    params: list[Param]
    steps: list[PieceCall | OpCall] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    pieces: dict[str, Graph] = field(default_factory=dict)
    tokens: tuple[int, int] = (1, 8192)

    def calls(self) -> Iterator[PieceCall]:
        return (step for step in self.steps if isinstance(step, PieceCall))


def split(graph: Graph) -> SplitGraph:
    """Cuts `graph` (which stays as it is) at every op that splits. Pieces are named piece0, piece1, ..."""
    program = SplitGraph(graph.name, list(graph.inputs), list(graph.params), tokens=graph.tokens)
    program.outputs = list(graph.outputs)
    last_use = _last_uses(graph)
    begin = 0
    for index, node in enumerate([*graph.nodes, None]):
        if node is not None and not get_op(node.op).splits:
            continue
        if begin < index:
            _add_piece(program, graph.nodes[begin:index], last_use, index)
        if node is not None:
            program.steps.append(OpCall(node))
        begin = index + 1
    return program


def _last_uses(graph: Graph) -> dict[Value, int]:
    """The index of the last node that reads each value; a graph output is read after all of them."""
    last = {value: index for index, node in enumerate(graph.nodes) for value in node.inputs()}
    return last | dict.fromkeys(graph.outputs, len(graph.nodes))


def _add_piece(program: SplitGraph, nodes: list[Node], last_use: Mapping[Value, int], end: int) -> None:
    """One piece of `nodes`. Inputs and parameters stand in order of first use, outputs in order of definition."""
    name = f"piece{len(program.pieces)}"
    made = {value: None for node in nodes for value in node.results}
    read = dict.fromkeys(value for node in nodes for value in node.inputs() if value not in made)
    inputs = [value for value in read if not isinstance(value, Param)]
    params = [value for value in read if isinstance(value, Param)]
    outputs = [value for value in made if last_use.get(value, -1) >= end]
    whole = Graph(name, inputs, params, nodes, outputs, program.tokens)
    program.pieces[name] = whole.copy()
    program.steps.append(PieceCall(name, inputs, params, outputs))


def verify_split(program: SplitGraph) -> None:
    """Raises VerifyError if a piece breaks a rule, or a call does not fit its piece or reads an undefined value."""
    for piece in program.pieces.values():
        verify(piece, after="split")
    defined = {*program.inputs, *program.params}
    for step in program.steps:
        if unknown := [value for value in step.reads if value not in defined]:
            raise VerifyError(f"program {program.name}: %{unknown[0].name} is read before it is defined")
        if isinstance(step, PieceCall):
            _check_call(program, step)
        defined.update(step.outputs)
    if missing := [value for value in program.outputs if value not in defined]:
        raise VerifyError(f"program {program.name}: output %{missing[0].name} is never defined")


def _check_call(program: SplitGraph, call: PieceCall) -> None:
    piece = program.pieces[call.piece]
    for what, given, wanted in (
        ("inputs", call.inputs, piece.inputs),
        ("params", call.params, piece.params),
        ("outputs", call.outputs, piece.outputs),
    ):
        kinds, expected = [str(value.type) for value in given], [str(value.type) for value in wanted]
        if kinds != expected:
            raise VerifyError(f"program {program.name}: {call.piece} has {what} {expected}, the call {kinds}")


def run_split(
    program: SplitGraph, inputs: Mapping[str, Any], params: Mapping[str, torch.Tensor]
) -> tuple[Any, ...]:
    """Runs the program with every op by its reference. State inputs are None. Returns the outputs."""
    values: dict[Value, Any] = {}
    for value in program.inputs:
        values[value] = None if isinstance(value.type, StateType) else inputs[value.name]
    values.update((param, params[param.name]) for param in program.params)
    for step in program.steps:
        if isinstance(step, OpCall):
            results: Iterable[Any] = call_reference(step.node, values, 0)
        else:
            given = [values[value] for value in step.inputs]
            results = run_graph(program.pieces[step.piece], given, [values[param] for param in step.params])
        values.update(zip(step.outputs, results, strict=True))
    return tuple(values[value] for value in program.outputs)
