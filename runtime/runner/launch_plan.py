"""The whole program of a model as one launch plan: a step is two calls, body and head, without Python in between.

The CPU's counterpart of a captured graph, made from the same pieces. Not bound to a shape: pieces are compiled for
ranges of token counts, so one plan serves every step. What a piece returns is allocated by the piece.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from treadle.codegen.loader import RangeDispatch
from treadle.codegen.program import Program, Step
from treadle.ir.errors import ArtifactError
from treadle.kernels.attention.interface import TORCH_DTYPES, BoundAttention
from treadle.runtime.runner.model import LoadedModel, Values, attention_shape
from treadle.runtime.runner.native_plan import NATIVE_SOURCE, NativePlan

Capture = Callable[[int], BoundAttention]
"""The attention of a layer with its cache and metadata bound."""


def obstacle(program: Program, native: Collection[str]) -> str:
    """Why a program cannot run as a launch plan, given the names of its native libraries; "" if nothing is in the way."""
    for step in program.steps:
        if step.kind == "op" and step.op not in ("attention", "select_rows"):
            return f"{step.op} runs in Python"
        if step.attrs.get("out_key"):
            return "the output of attention is quantized in Python"
    if NATIVE_SOURCE not in native:
        return f"the bundle holds no native library {NATIVE_SOURCE!r}; compile it again"
    return ""


class LaunchPlan:
    """Runs like a LoadedModel: `run_body`, then `logits` for any rows of it, until the next `run_body`."""

    def __init__(self, model: LoadedModel, capture: Capture):
        """Raises ArtifactError, which says why, if a piece can be called from Python only."""
        self._model = model
        self._plan = NativePlan(model.native[NATIVE_SOURCE], len(model.places))
        self._capture = capture
        natives = {name: _native(model.pieces[name]) for name in model.program.piece_names()}
        last_use = model.last_uses()
        for index, step in enumerate(model.program.steps):
            self._add(step, natives)
            made_here = {name for other in self._segment(index) for name in other.outputs}
            dead = [name for name, last in last_use.items() if last == index and name in made_here]
            self._plan.add_dead([model.places[name] for name in dead])

    def _segment(self, index: int) -> list[Step]:
        steps, split = self._model.program.steps, self._model.split
        return steps[:split] if index < split else steps[split:]

    def _add(self, step: Step, natives: dict[str, Any]) -> None:
        model = self._model
        inputs = [model.places[name] for name in step.inputs]
        outputs = [model.places[name] for name in step.outputs]
        if step.kind == "piece":
            artifacts, tokens_from = natives[step.piece]
            self._plan.add_piece(inputs, outputs, [model.weights[name] for name in step.params], artifacts, tokens_from)
        elif step.op == "attention":
            self._plan.add_attention(inputs, outputs[0], self._capture(attention_shape(step).layer))
        else:
            element_size = TORCH_DTYPES[model.spec.dtype].itemsize
            self._plan.add_select(inputs[0], inputs[1], outputs[0], element_size)

    def run_body(self, input_ids: torch.Tensor, positions: torch.Tensor) -> Values:
        """Runs everything up to the row selection on i64 [T] ids and positions, after the metadata was built."""
        places, split = self._model.places, self._model.split
        with self._plan.holding({places["input_ids"]: input_ids, places["positions"]: positions}):
            self._plan.run(0, split)
        return []

    def logits(self, values: Values, rows: torch.Tensor) -> torch.Tensor:
        """[S, V] logits of the given i64 [S] rows of the last body; S is at least 1."""
        model = self._model
        out = model.places[model.program.outputs[0]]
        with self._plan.holding({model.places["logit_rows"]: rows}):
            self._plan.run(model.split, self._plan.num_steps)
        logits = self._plan.value(out)
        self._plan.release([out])
        return logits

    def times(self) -> tuple[float, float]:
        """(seconds in compiled pieces, seconds in attention) since the last call."""
        return self._plan.times()


def _native(piece: Any) -> tuple[list[Any], tuple[int, int] | None]:
    if not isinstance(piece, RangeDispatch):
        raise ArtifactError("its pieces are called through Python")
    return piece.native(), piece.tokens_from
