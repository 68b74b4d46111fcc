"""Stores the weights of linears and experts quantized; the activations stay as they are.

    param %w = load("w")                       param %w.quant = quantize(load("w"), key=quant(i8, per_channel))
    %y = linear(%x, %w)                ->      param %w.scale = quantization_scale(load("w"), key=...)
                                               %y = weight_only_linear(%x, %w.quant, %w.scale, key=...)

Changing: weights are rounded to 8 bits. The linear that makes the logits stays as it is unless `head`, since every
answer goes through it; so do weights whose name matches a pattern of `ignore`. The two weights of a mixture's experts are
quantized alike, each expert's rows with scales of their own, and `moe` becomes `moe_quant`; its router stays. Does not
handle embeddings (the table of a tied head stays as it is for the lookup), nor weights that are computed in the graph or
read by another op.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

from treadle.ir.graph import Graph, Node, Operand, Param, Value
from treadle.ir.quant_key import QuantKey
from treadle.ir.types import TensorType, tensor
from treadle.ir.weights import QuantizationScale, Quantize
from treadle.passes.base import NearMiss, Pass, PassReport, Site, Tier
from treadle.passes.rewriter import Rewriter

_FUSIONS_BEFORE = ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm", "fuse_moe", "shard_tensor_parallel", "fuse_all_reduce_rms_norm")
_WEIGHTS = {"linear": ("weight",), "moe": ("gate_up", "down"), "experts": ("gate_up", "down")}
"""Op -> the operands that are quantized."""
_LOOKUP = "embedding"
"""Reads a few rows of a tied weight, which stays beside the quantized one."""
_AFTER_HEAD = ("aten.mul.", "aten.div.", "aten.tanh.", "aten.to.", "aten.reshape.", "aten.add.", "aten.slice.", "all_gather")


@dataclass(frozen=True)
class QuantizeWeights(Pass):
    """`group` above 0 gives each run of so many weights along K its own scale."""

    element: str = "i8"
    group: int = 0
    head: bool = False
    ignore: tuple[str, ...] = ()

    name: ClassVar[str] = "quantize_weights"
    tier: ClassVar[Tier] = "changing"
    stage: ClassVar[str] = "lower"
    requires: ClassVar[tuple[str, ...]] = ("raise_linear",)
    produces: ClassVar[tuple[str, ...]] = ("weight_only_linear", "moe_quant")
    after: ClassVar[tuple[str, ...]] = _FUSIONS_BEFORE
    expects: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.key()  # an element type that is not known is said at once

    def key(self) -> QuantKey:
        return QuantKey(self.element, "per_group" if self.group else "per_channel", self.group)

    def run(self, graph: Graph) -> PassReport:
        report, rewriter, users = self.report(), Rewriter(graph), graph.users()
        head = None if self.head else logits_linear(graph)
        dead: list[Node] = []
        done: dict[Value, tuple[Param, Param]] = {}
        for node in graph.nodes:
            names = _WEIGHTS.get(node.op)
            if names is None:
                continue
            if problem := next(filter(None, (self._objection(node, name, node is head, users) for name in names)), None):
                report.near_misses.append(NearMiss.of(node, problem, 1))
                continue
            call = self._call(rewriter.at(node), node, names, done)
            rewriter.replace(node.result, call.result)
            dead.append(node)
            report.sites.append(Site.of(node))
            report.count("linear" if node.op == "linear" else "experts")
        rewriter.apply(dead)
        return report

    def _call(
        self, rewriter: Rewriter, node: Node, names: tuple[str, ...], done: dict[Value, tuple[Param, Param]]
    ) -> Node:
        """The op over quantized weights: each of `names` is replaced, and its scale added behind it."""
        operands: dict[str, Operand] = {}
        for name, operand in node.operands.items():
            operands[name] = operand
            if name in names:
                assert isinstance(operand, Param)
                if operand not in done:
                    done[operand] = quantized_params(rewriter, operand, self.key())
                scale = "scale" if name == "weight" else f"{name}_scale"
                operands[name], operands[scale] = done[operand]
        op = "weight_only_linear" if node.op == "linear" else f"{node.op}_quant"
        return rewriter.call(op, source=node.source, names=[node.result.name], **operands, **node.attrs, key=self.key())

    def _objection(self, node: Node, name: str, is_head: bool, users: dict[Value, list[Node]]) -> str | None:
        weight = node.operand(name)
        assert weight is not None and isinstance(weight.type, TensorType)
        if is_head:
            return "it makes the logits; head=true quantizes it too"
        if not isinstance(weight, Param):
            return f"the weight %{weight.name} is computed in the graph"
        if pattern := next((p for p in self.ignore if fnmatchcase(weight.name, p)), None):
            return f"the weight %{weight.name} matches {pattern!r} of ignore"
        if other := next((user for user in users[weight] if user.op not in (node.op, _LOOKUP)), None):
            return f"the weight %{weight.name} is read by {other.op} too"
        size = weight.type.shape[-1]
        if self.group and int(size) % self.group:  # type: ignore[arg-type]
            return f"{size} inputs do not divide into groups of {self.group}"
        return None


def quantized_params(rewriter: Rewriter, weight: Param, key: QuantKey) -> tuple[Param, Param]:
    """The parameters that hold the quantized weight and its scale."""
    assert isinstance(weight.type, TensorType)
    *rows, size = weight.type.shape
    groups = int(size) // key.group if key.group else 1  # type: ignore[arg-type]
    values = rewriter.param(f"{weight.name}.quant", tensor(key.element, (*rows, size)), Quantize(weight.recipe, key))
    scale = rewriter.param(
        f"{weight.name}.scale", tensor(key.scale, (*rows, groups)), QuantizationScale(weight.recipe, key)
    )
    return values, scale


def logits_linear(graph: Graph) -> Node | None:
    """The linear behind the first output of a language model, through scalings and caps; None if there is none.

    A graph whose first input holds no token ids has no logits.
    """
    if not (graph.inputs and isinstance(graph.inputs[0].type, TensorType) and graph.inputs[0].type.dtype == "i64"):
        return None
    node = graph.outputs[0].producer
    while node is not None and node.op.startswith(_AFTER_HEAD):
        node = next(node.inputs()).producer
    return node if node is not None and node.op == "linear" else None
