"""Holds a storage plan to account: `check_plan` proves that nothing is overwritten while it is needed, `run_planned`
runs a graph in the planned bytes. Neither trusts how the plan was made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from treadle.ir.errors import VerifyError
from treadle.ir.graph import Graph, Value
from treadle.ir.interpret import call as call_reference
from treadle.ir.interpret import token_count
from treadle.ir.types import TensorType
from treadle.passes.aliases import is_contiguous_view, must_copy, storage_bytes, view_base, writable_over
from treadle.passes.bufferise import Buffer, Call, Plan, graph_calls, program_calls
from treadle.passes.split import SplitGraph


def check_plan(graph: Graph | SplitGraph, plan: Plan) -> None:
    """Raises VerifyError that names the value, the step and what the plan does wrong there."""
    calls = graph_calls(graph) if isinstance(graph, Graph) else program_calls(graph)
    _Checker(graph, calls, plan).check()


class _Checker:
    def __init__(self, graph: Graph | SplitGraph, calls: list[Call], plan: Plan):
        self.calls, self.plan, self.reach = calls, plan, graph.tokens
        self.given = {value.name for value in [*graph.inputs, *graph.params]}
        self.defined: list[Value] = [*graph.inputs, *graph.params]
        self.compact = set(self.defined)
        self.outputs = graph.outputs
        self.last = {value: at for at, call in enumerate(calls) for value in call.reads}
        self.last |= dict.fromkeys(graph.outputs, len(calls))

    def check(self) -> None:
        for name, buffer in self.plan.buffers.items():
            self._check_bounds(name, buffer)
        for at, call in enumerate(self.calls):
            for position, value in enumerate(call.writes):
                if value.name not in self.plan.places:
                    raise VerifyError(f"%{value.name} has no place")
                if self.plan.places[value.name].view_of:
                    self._check_view(call, value)
                else:
                    self._check_write(at, call, position, value)
                self.defined.append(value)
        for value in self.outputs:
            storage = self._storage(value)
            if storage not in self.given and self.plan.buffers[storage].offset is not None:
                raise VerifyError(f"output %{value.name} lives in the arena, which the next step reuses")

    def _check_bounds(self, name: str, buffer: Buffer) -> None:
        if buffer.offset is None:
            return
        starts = min(buffer.offset.at(tokens) for tokens in self.reach)
        if starts < 0 or not (buffer.offset + buffer.size).fits_below(self.plan.arena, self.reach):
            raise VerifyError(f"the bytes of %{name} do not lie within the arena of {self.plan.arena}")

    def _check_view(self, call: Call, value: Value) -> None:
        """A view is one by nature, of its operand, in its operand's bytes, which it thereby keeps alive."""
        base = view_base(call.node) if call.node is not None else None
        place = self.plan.places[value.name]
        if base is None or call.node is None or base.name != place.view_of:
            raise VerifyError(f"%{value.name} is not a view of %{place.view_of}")
        if self._storage(value) != self._storage(base):
            raise VerifyError(f"%{value.name} is a view of %{base.name} but is placed in other bytes")
        if must_copy(call.node, base in self.compact):
            raise VerifyError(f"%{value.name} cannot be a view: %{base.name} does not stand in row order")
        if base in self.compact and is_contiguous_view(call.node):
            self.compact.add(value)

    def _check_write(self, at: int, call: Call, position: int, value: Value) -> None:
        storage = self._storage(value)
        if storage in self.given:
            raise VerifyError(f"%{value.name} is written over the input %{storage}")
        if not storage_bytes(value).fits_below(self.plan.buffers[storage].size, self.reach):
            raise VerifyError(f"%{value.name} does not fit into the bytes of %{storage}")
        for other in [*self.defined, *call.writes[:position]]:
            needed = self.last.get(other, -1) >= at or other in call.writes
            if needed and self._overlap(other, value) and not self._may_write_over(at, call, position, other):
                where = f"step {at} ({call.node.op})" if call.node is not None else f"step {at}"
                raise VerifyError(f"{where} writes %{value.name} over %{other.name}, which is still needed")
        self.compact.add(value)

    def _may_write_over(self, at: int, call: Call, position: int, other: Value) -> bool:
        """The one overlap that is allowed: the operand that the op declares for this result, read here last."""
        if call.node is None or writable_over(call.node, position) is not other:
            return False
        value = call.writes[position]
        declared = self.plan.places[value.name].over == other.name
        return declared and self.last[other] == at and other.type == value.type and other in self.compact

    def _storage(self, value: Value) -> str:
        if value.name in self.given:
            return value.name
        storage = self.plan.places[value.name].storage
        if storage not in self.given and storage not in self.plan.buffers:
            raise VerifyError(f"%{value.name} is placed in %{storage}, which has no bytes")
        return storage

    def _overlap(self, one: Value, other: Value) -> bool:
        first, second = self._storage(one), self._storage(other)
        if first == second or first in self.given or second in self.given:
            return first == second
        a, b = self.plan.buffers[first], self.plan.buffers[second]
        if a.offset is None or b.offset is None:
            return False
        apart = (a.offset + a.size).fits_below(b.offset, self.reach)
        return not (apart or (b.offset + b.size).fits_below(a.offset, self.reach))


def run_planned(
    graph: Graph, plan: Plan, inputs: Sequence[Any], params: Sequence[torch.Tensor]
) -> tuple[Any, ...]:
    """Evaluates `graph` in one arena laid out by `plan`: every result is written to its planned bytes."""
    values: dict[Value, Any] = dict(zip([*graph.inputs, *graph.params], [*inputs, *params], strict=True))
    tokens = token_count(graph, inputs)
    arena = torch.full((plan.arena.at(tokens),), 255, dtype=torch.uint8)
    owned = {
        name: torch.full((buffer.size.at(tokens),), 255, dtype=torch.uint8)
        if buffer.offset is None
        else arena[buffer.offset.at(tokens) :][: buffer.size.at(tokens)]
        for name, buffer in plan.buffers.items()
    }
    for node in graph.nodes:
        for value, result in zip(node.results, call_reference(node, values, tokens), strict=True):
            place = plan.places[value.name]
            values[value] = result if place.view_of else _write(owned[place.storage], value, result, tokens)
    return tuple(values[value] for value in graph.outputs)


def _write(storage: torch.Tensor, value: Value, result: torch.Tensor, tokens: int) -> torch.Tensor:
    assert isinstance(value.type, TensorType)
    shape, dtype = value.type.at(tokens), value.type.dtype.torch
    count = result.numel() * dtype.itemsize
    return storage[:count].view(dtype).view(shape).copy_(result)
