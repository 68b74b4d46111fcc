"""The stitched program: the order in which compiled pieces and attention ops run in one step.

Plain data that lives as JSON in a bundle's manifest. Values are named; a step reads names and defines names. The
runtime decides how to execute it (one by one, or bound into a launch plan). This module imports no torch.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from treadle.ir.errors import BundleError

PROGRAM_INPUTS = ("input_ids", "positions", "logit_rows")
"""i64[T], i64[T], i64[S]: T tokens of the step, S rows whose logits are wanted."""


class Step(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One call. A piece gets `inputs` (values), then `params` (weight tensors), and defines `outputs` in order.

    Op steps: "attention" takes q [T, Hq, D], k [T, Hk, D], v [T, Hk, Dv] and gives [T, Hq, Dv]; its attrs are layer,
    scale, window (visible tokens including self, or null), softcap (or null), num_heads, num_kv_heads, head_size.
    "select_rows" takes x [T, H] and rows i64[S] and gives [S, H]. Any other op of the dialect that splits runs its
    eager reference; its attrs carry `operands`, the schema's names of the inputs, then of the params.
    """

    kind: Literal["piece", "op"]
    piece: str = ""
    op: str = ""
    inputs: list[str]
    params: list[str] = []
    outputs: list[str]
    attrs: dict[str, Any] = {}


class KVLayer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What one attention layer keeps. `window` is the number of visible tokens including self; null means all."""

    layer: int
    num_kv_heads: int
    head_size: int
    window: int | None = None


class Program(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`inputs` -> `steps` -> `outputs`. One KVLayer for each attention step, in step order."""

    inputs: list[str]
    outputs: list[str]
    steps: list[Step]
    kv_layers: list[KVLayer]

    def piece_names(self) -> list[str]:
        """The pieces the program calls, each once, in order of first use."""
        return list(dict.fromkeys(step.piece for step in self.steps if step.kind == "piece"))

    def param_names(self) -> list[str]:
        """The weight tensors the program reads, each once, in order of first use."""
        return list(dict.fromkeys(name for step in self.steps for name in step.params))


def check_program(program: Program) -> None:
    """Raises BundleError for a value read before it is defined or defined twice, or a step that is not callable."""
    defined = set(program.inputs)
    for index, step in enumerate(program.steps):
        where = f"step {index} ({step.piece or step.op})"
        if bool(step.piece) == bool(step.op) or (step.kind == "piece") != bool(step.piece):
            raise BundleError(f"program {where}: a {step.kind} step names exactly one piece or one op")
        if unknown := [name for name in step.inputs if name not in defined]:
            raise BundleError(f"program {where} reads {unknown[0]!r} before anything defines it")
        if again := [name for name in step.outputs if name in defined]:
            raise BundleError(f"program {where} defines {again[0]!r} a second time")
        defined.update(step.outputs)
    if missing := [name for name in program.outputs if name not in defined]:
        raise BundleError(f"program output {missing[0]!r} is never defined")
    attention = [step.attrs.get("layer") for step in program.steps if step.op == "attention"]
    if attention != [kv.layer for kv in program.kv_layers]:
        raise BundleError("program: kv_layers do not list the attention steps in order")
