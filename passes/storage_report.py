"""What memory a program takes: the storage plan of each piece and of the values between them, checked, as plain data."""

from __future__ import annotations

from typing import Any

from treadle.ir.graph import Graph
from treadle.passes.bufferise import Plan, plan_graph, plan_program
from treadle.passes.bufferise_check import check_plan
from treadle.passes.split import SplitGraph


def storage_report(program: SplitGraph) -> dict[str, Any]:
    """Bytes at one token and at the most, for each piece and between the pieces. Raises VerifyError for a plan that is wrong."""
    pieces = {name: _row(piece, plan_graph(piece)) for name, piece in program.pieces.items()}
    return {"tokens": program.tokens[1], "pieces": pieces, "between": _row(program, plan_program(program))}


def _row(graph: Graph | SplitGraph, plan: Plan) -> dict[str, Any]:
    check_plan(graph, plan)
    most = graph.tokens[1]
    places = plan.places.values()
    return {
        "arena": str(plan.arena),
        "arena_bytes": plan.arena.at(most),
        "unshared_bytes": plan.unshared.at(most),
        "output_bytes": sum(buffer.size.at(most) for buffer in plan.buffers.values() if buffer.offset is None),
        "in_place": sum(bool(place.over) for place in places),
        "views": sum(bool(place.view_of) for place in places),
    }
