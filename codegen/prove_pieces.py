"""Proves the compiled pieces of a bundle: each against its IR on the values it really gets, and all of them stitched.

The program is walked once for each token count with attention by its reference, so that pieces see real activations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from treadle.codegen.loader import RangeDispatch
from treadle.ir.graph import Value
from treadle.ir.group import Group
from treadle.ir.interpret import call as call_reference
from treadle.ir.interpret import run
from treadle.ir.tolerance import REWRITE
from treadle.ir.types import TensorType
from treadle.passes.prove import Check, Outputs, Trial, on_ranks, worst_error
from treadle.passes.split import OpCall, PieceCall, SplitGraph

Values = dict[Value, Any]


def prove_pieces(
    program: SplitGraph, pieces: Mapping[str, RangeDispatch], trial: Trial, wanted: Outputs
) -> list[Check]:
    """One check for each piece and token count, at the piece's first call; then `program`: compiled pieces, end to end,
    against `wanted`, the outputs of the traced graph. A program cut over ranks runs on all of them, as threads; of each
    check the worst rank counts.
    """

    def of_rank(group: Group | None) -> list[Check]:
        weights = trial.weights.of(program.params, None if group is None else group.rank)
        params = dict(zip(program.params, weights, strict=True))
        checks: list[Check] = []
        for tokens in trial.shapes:
            start: Values = {**params, **_bound_inputs(program, trial.inputs(program, tokens))}
            walk = _Walk(program, pieces, tokens, start, group)
            checks += walk.run()
            logits = walk.stitched[program.outputs[0]]
            error = worst_error(wanted[tokens], [walk.stitched[value] for value in program.outputs])
            checks.append(
                Check(kind="program", name="compiled program", tokens=tokens, error=error, bound=_bound(logits))
            )
        return checks

    nodes = [step.node for step in program.steps if isinstance(step, OpCall)]
    by_rank = on_ranks(nodes, of_rank)
    return [max(same, key=lambda check: check.error) for same in zip(*by_rank, strict=True)]


class _Walk:
    """One run of the program twice over: `reference` by the IR, `stitched` by the compiled pieces."""

    def __init__(
        self,
        program: SplitGraph,
        pieces: Mapping[str, RangeDispatch],
        tokens: int,
        start: Values,
        group: Group | None = None,
    ):
        self._group = group
        self._program = program
        self._pieces = pieces
        self._tokens = tokens
        self.reference: Values = dict(start)
        self.stitched: Values = dict(start)

    def run(self) -> list[Check]:
        checks, seen = [], set()
        for step in self._program.steps:
            if isinstance(step, OpCall):
                for values in (self.reference, self.stitched):
                    _define(values, step.outputs, call_reference(step.node, values, self._tokens, self._group))
                continue
            expected = self._by_reference(step)
            if step.piece not in seen:
                seen.add(step.piece)
                checks.append(self._check(step, expected))
            _define(self.stitched, step.outputs, self._compiled(step, self.stitched))
            _define(self.reference, step.outputs, expected)
        return checks

    def _check(self, step: PieceCall, expected: Sequence[torch.Tensor]) -> Check:
        error = worst_error(expected, self._compiled(step, self.reference))
        return Check(
            kind="piece", name=step.piece, tokens=self._tokens, error=error, bound=max(map(_bound, expected))
        )

    def _by_reference(self, step: PieceCall) -> Sequence[torch.Tensor]:
        given = [self.reference[value] for value in step.inputs]
        return run(self._program.pieces[step.piece], given, [self.reference[param] for param in step.params])

    def _compiled(self, step: PieceCall, values: Values) -> Sequence[torch.Tensor]:
        return self._pieces[step.piece]([values[value].contiguous() for value in (*step.inputs, *step.params)])


def _define(values: Values, names: Sequence[Value], results: Sequence[Any]) -> None:
    values.update(zip(names, results, strict=True))


def _bound_inputs(program: SplitGraph, inputs: Mapping[str, Any]) -> Values:
    return {value: inputs[value.name] if isinstance(value.type, TensorType) else None for value in program.inputs}


def _bound(tensor: torch.Tensor) -> float:
    names = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
    return REWRITE[names[tensor.dtype]] if tensor.dtype in names else 0.0
