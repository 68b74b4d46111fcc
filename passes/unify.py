"""Lets pieces that are equal up to weights, names and layer index share one definition, so that it is compiled once.

Equality is that of the structural hash. A shared piece takes its weights as arguments: in its text a parameter reads
`argument(2)`, and each call of the program says which weights it passes.
"""

from __future__ import annotations

import re
from collections import Counter

from treadle.ir.graph import Graph, Value
from treadle.ir.hashing import structural_hash
from treadle.ir.weights import Argument
from treadle.passes.split import OpCall, PieceCall, SplitGraph


def unify(program: SplitGraph) -> SplitGraph:
    """The same program over unique pieces. The steps' values are shared with `program`; its pieces are copied."""
    names = _unique_names(program)
    unified = SplitGraph(program.name, program.inputs, program.params, tokens=program.tokens)
    unified.outputs = program.outputs
    for step in program.steps:
        if isinstance(step, OpCall):
            unified.steps.append(step)
            continue
        name = names[step.piece]
        if name not in unified.pieces:
            unified.pieces[name] = _localised(program.pieces[step.piece], name)
        unified.steps.append(PieceCall(name, step.inputs, step.params, step.outputs))
    return unified


def _unique_names(program: SplitGraph) -> dict[str, str]:
    """The name of the shared piece for each piece of the program."""
    by_hash: dict[str, str] = {}
    taken: Counter[str] = Counter()
    names = {}
    for index, step in enumerate(program.steps):
        if not isinstance(step, PieceCall):
            continue
        key = structural_hash(program.pieces[step.piece])
        if key not in by_hash:
            name = _role(program, index)
            taken[name] += 1
            by_hash[key] = name if taken[name] == 1 else f"{name}_{taken[name]}"
        names[step.piece] = by_hash[key]
    return names


def _role(program: SplitGraph, index: int) -> str:
    """What a piece is to the program: first, layer, last (before the rows are selected), logits (after)."""
    before = next((s.node.op for s in reversed(program.steps[:index]) if isinstance(s, OpCall)), None)
    after = next((s.node.op for s in program.steps[index:] if isinstance(s, OpCall)), None)
    match before, after:
        case None, None:
            return "whole"
        case "select_rows", _:
            return "logits"
        case None, _:
            return "first"
        case _, "select_rows" | None:
            return "last"
        case "attention", "attention":
            return "layer"
    return f"{before}_to_{after}"


_LAYER = re.compile(r"(^|\.)(layers|h|blocks|block)\.\d+(?=\.|$)")


def _localised(piece: Graph, name: str) -> Graph:
    """A copy with names that do not depend on the layer it was taken from."""
    twin = piece.copy()
    twin.name = name
    taken: set[str] = set()
    for position, param in enumerate(twin.params):
        param.recipe = Argument(position)
        _rename(param, _LAYER.sub(r"\1layer", param.name), taken)
    for value in [*twin.inputs, *(value for node in twin.nodes for value in node.results)]:
        _rename(value, re.sub(r"(\.\d+)+$", "", value.name), taken)
    return twin


def _rename(value: Value, hint: str, taken: set[str]) -> None:
    name, number = hint, 0
    while name in taken:
        number += 1
        name = f"{hint}.{number}"
    taken.add(name)
    value.name = name
