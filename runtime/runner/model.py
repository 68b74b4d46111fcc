"""A loaded model: the stitched program with its pieces, weights and attention bound, run step by step.

The steps before the first `select_rows` are the body, the rest is the head: the head may run more than once on the
result of one body, with other rows (prompt logprobs come in chunks).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from treadle.codegen.program import PROGRAM_INPUTS, KVLayer, Program, Step, check_program
from treadle.ir.errors import BundleError, PluginError, VerifyError
from treadle.ir.group import Group
from treadle.ir.quant_key import QuantKey, parse_quant_key
from treadle.ir.quantize import quantize_with
from treadle.kernels.native import NativeLibrary
from treadle.runtime import forward_context
from treadle.runtime.dispatch import GraphKeys

Piece = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
"""A compiled piece for every token count: takes values, then weights; may empty the list it is given."""

Values = list[Any]
"""The values of one step by place; None once the last reader is done."""

BoundStep = Callable[[Values], None]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What the engine must know of a model apart from how to run it. `dtype` is an IR name such as "bf16"."""

    name: str
    vocab_size: int
    max_model_len: int
    max_num_batched_tokens: int
    dtype: str
    architecture: str = ""


class AttentionShape(NamedTuple):
    """The attributes of one attention step that a backend needs."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    window: int | None
    softcap: float | None
    has_sinks: bool


MakeAttention = Callable[[AttentionShape, torch.Tensor | None], Any]
"""Gives the implementation of one layer's attention from its shape and its sinks, if it has any."""


def attention_shape(step: Step) -> AttentionShape:
    """Reads an attention step's attributes."""
    attrs = step.attrs
    return AttentionShape(
        layer=attrs["layer"],
        num_heads=attrs["num_heads"],
        num_kv_heads=attrs["num_kv_heads"],
        head_size=attrs["head_size"],
        scale=attrs["scale"],
        window=attrs.get("window"),
        softcap=attrs.get("softcap"),
        has_sinks=bool(attrs.get("sinks")),
    )


class LoadedModel:
    """A program over loaded pieces and mapped weights. Call `bind` once before the first step."""

    def __init__(
        self,
        spec: ModelSpec,
        program: Program,
        pieces: Mapping[str, Piece],
        weights: Mapping[str, torch.Tensor],
        native: Mapping[str, NativeLibrary] | None = None,
        graph_keys: GraphKeys = frozenset(),
        group: Group | None = None,
    ):
        """`graph_keys` are the padded shapes for which the pieces have exact-size artifacts; collectives run in `group`."""
        check_program(program)
        self.spec = spec
        self.graph_keys = graph_keys
        self.native = dict(native or {})
        self.program = program
        self.pieces = pieces
        self._group = group
        self.weights = weights
        self.places = _places(program)
        self.split = _first_select(program)
        self._body: list[BoundStep] = []
        self._head: list[BoundStep] = []
        missing = [name for name in program.piece_names() if name not in pieces]
        missing += [name for name in program.param_names() if name not in weights]
        if missing:
            raise BundleError(f"the program of {spec.name} needs {', '.join(missing[:5])}, which did not load")

    @property
    def kv_layers(self) -> list[KVLayer]:
        """One entry for each attention layer, in the order in which they run."""
        return self.program.kv_layers

    def attention_shapes(self) -> list[AttentionShape]:
        """The attention steps in the order in which they run."""
        return [attention_shape(step) for step in self.program.steps if step.op == "attention"]

    def last_uses(self) -> dict[str, int]:
        """Index of the last step that reads (or, unread, defines) each value; outputs are never released."""
        last: dict[str, int] = {}
        for index, step in enumerate(self.program.steps):
            for name in (*step.outputs, *step.inputs):
                last[name] = index
        for name in self.program.outputs:
            last.pop(name, None)
        return last

    def bind(self, make_attention: MakeAttention) -> None:
        """Resolves every name once. `make_attention(shape, sinks)` gives the implementation of one layer."""
        last_use = self.last_uses()
        bound = []
        for index, step in enumerate(self.program.steps):
            dead = [self.places[name] for name, last in last_use.items() if last == index]
            bound.append(self._bind_step(step, make_attention))
            if dead:
                bound.append(_release(dead))
            if index + 1 == self.split:
                self._body, bound = bound, []
        self._head = bound

    def _bind_step(self, step: Step, make_attention: MakeAttention) -> BoundStep:
        sources = [self.places[name] for name in step.inputs]
        targets = [self.places[name] for name in step.outputs]
        if step.kind == "piece":
            return _piece_step(self.pieces[step.piece], sources, [self.weights[n] for n in step.params], targets)
        if step.op == "attention":
            shape = attention_shape(step)
            given = [self.weights[name] for name in step.params]  # sinks and the scale of the output, where there are any
            impl = make_attention(shape, given[0] if shape.has_sinks else None)
            key = _attribute(step.attrs.get("out_key"))
            return _attention_step(impl, shape.layer, sources, targets[0], key, given[-1] if key is not None else None)
        if step.op == "select_rows":
            return _select_step(sources, targets[0])
        weights = [self.weights[name] for name in step.params]
        return _reference_step(step, sources, weights, targets, self._group)

    def run_body(self, input_ids: torch.Tensor, positions: torch.Tensor) -> Values:
        """Runs everything up to the row selection on i64 [T] ids and positions; needs a forward context."""
        values: Values = [None] * len(self.places)
        values[self.places["input_ids"]] = input_ids
        values[self.places["positions"]] = positions
        for step in self._body:
            step(values)
        return values

    def logits(self, values: Values, rows: torch.Tensor) -> torch.Tensor:
        """[S, V] logits of the given i64 [S] rows; S is at least 1. `values` stays usable for other rows."""
        values = list(values)
        values[self.places["logit_rows"]] = rows
        for step in self._head:
            step(values)
        return values[self.places[self.program.outputs[0]]]


def _places(program: Program) -> dict[str, int]:
    names = list(PROGRAM_INPUTS)
    names += [name for name in program.inputs if name not in names]
    names += [name for step in program.steps for name in step.outputs]
    return {name: place for place, name in enumerate(names)}


def _first_select(program: Program) -> int:
    for index, step in enumerate(program.steps):
        if step.op == "select_rows":
            return index
    raise BundleError("the program selects no rows, so it gives logits for every token; compile the model again")


def _piece_step(piece: Piece, sources: list[int], params: list[torch.Tensor], targets: list[int]) -> BoundStep:
    def run(values: Values) -> None:
        outputs = piece([*[values[source] for source in sources], *params])
        for target, output in zip(targets, outputs, strict=True):
            values[target] = output

    return run


def _attention_step(
    impl: Any, layer: int, sources: list[int], target: int, out_key: QuantKey | None, output_scale: torch.Tensor | None
) -> BoundStep:
    """Attention of one layer. What no backend here writes quantized is quantized right after it."""
    q_at, k_at, v_at = sources

    def run(values: Values) -> None:
        context = forward_context.current()
        q, cache = values[q_at], context.kv_caches[layer]
        impl.write_kv(values[k_at], values[v_at], cache, context.slot_mapping[layer])
        out = q.new_empty((*q.shape[:-1], values[v_at].shape[-1]))
        if context.is_padding is not None:
            out[context.is_padding] = 0  # garbage in a padding row could be NaN and reach an index
        done = impl.forward(q, cache, context.attn_metadata[layer], out)
        values[target] = done if out_key is None or output_scale is None else quantize_with(done, output_scale, out_key)

    return run


def _select_step(sources: list[int], target: int) -> BoundStep:
    x_at, rows_at = sources

    def run(values: Values) -> None:
        values[target] = values[x_at].index_select(0, values[rows_at])

    return run


def _reference_step(
    step: Step, sources: list[int], params: list[torch.Tensor], targets: list[int], group: Group | None
) -> BoundStep:
    """Any other op of the dialect that splits the graph: its eager reference runs between the pieces."""
    from treadle.ir.ops.registry import get_op

    try:
        row = get_op(step.op)
    except (VerifyError, PluginError) as error:
        raise BundleError(f"unknown op step {step.op!r}: {error}; compile the model again") from error
    attrs = {name: _attribute(step.attrs[name]) for name in row.attributes}
    if row.collective:
        attrs["group"] = group
    weights = dict(zip(step.attrs["operands"][len(sources) :], params, strict=True))
    names = step.attrs["operands"][: len(sources)]

    def run(values: Values) -> None:
        tensors = {name: values[source] for name, source in zip(names, sources, strict=True)}
        outputs = row.reference(**tensors, **weights, **attrs)
        for target, output in zip(targets, outputs if len(targets) > 1 else (outputs,), strict=True):
            values[target] = output

    return run


def _attribute(value: Any) -> Any:
    """An attribute as the op's reference takes it; a manifest holds a QuantKey as text."""
    return parse_quant_key(value) if isinstance(value, str) and value.startswith("quant(") else value


def _release(dead: Sequence[int]) -> BoundStep:
    def run(values: Values) -> None:
        for place in dead:
            values[place] = None

    return run
