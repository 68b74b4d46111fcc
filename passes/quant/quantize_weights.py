"""Stores the weights of linears quantized; the activations stay as they are.

    param %w = load("w")                       param %w.quant = quantize(load("w"), key=quant(i8, per_channel))
    %y = linear(%x, %w)                ->      param %w.scale = quantization_scale(load("w"), key=...)
                                               %y = weight_only_linear(%x, %w.quant, %w.scale, key=...)

Changing: weights are rounded to 8 bits. The linear that makes the logits stays as it is unless `head`, since every
answer goes through it; so do weights whose name matches a pattern of `ignore`. Does not handle embeddings, experts, nor
weights that are computed in the graph or read by another op.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

from treadle.ir.graph import Graph, Node, Param, Value
from treadle.ir.quant_key import QuantKey
from treadle.ir.types import TensorType, tensor
from treadle.ir.weights import QuantizationScale, Quantize
from treadle.passes.base import NearMiss, Pass, PassReport, Site, Tier
from treadle.passes.rewriter import Rewriter

_FUSIONS_BEFORE = ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm", "shard_tensor_parallel", "fuse_all_reduce_rms_norm")
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
    produces: ClassVar[tuple[str, ...]] = ("weight_only_linear",)
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
            if node.op != "linear":
                continue
            if problem := self._objection(node, node is head, users):
                report.near_misses.append(NearMiss.of(node, problem, 1))
                continue
            weight = node.operand("weight")
            assert isinstance(weight, Param)
            if weight not in done:
                done[weight] = quantized_params(rewriter, weight, self.key())
            call = rewriter.at(node).call(
                "weight_only_linear", node.operand("x"), *done[weight], node.operand("bias"),
                source=node.source, names=[node.result.name], key=self.key(),
            )  # fmt: skip
            rewriter.replace(node.result, call.result)
            dead.append(node)
            report.sites.append(Site.of(node))
            report.count("linear")
        rewriter.apply(dead)
        return report

    def _objection(self, node: Node, is_head: bool, users: dict[Value, list[Node]]) -> str | None:
        weight = node.operand("weight")
        assert weight is not None and isinstance(weight.type, TensorType)
        if is_head:
            return "it makes the logits; head=true quantizes it too"
        if not isinstance(weight, Param):
            return f"the weight %{weight.name} is computed in the graph"
        if pattern := next((p for p in self.ignore if fnmatchcase(weight.name, p)), None):
            return f"the weight %{weight.name} matches {pattern!r} of ignore"
        if other := next((user for user in users[weight] if user.op != "linear"), None):
            return f"the weight %{weight.name} is read by {other.op} too"
        size = weight.type.shape[-1]
        if self.group and int(size) % self.group:  # type: ignore[arg-type]
            return f"{size} inputs do not divide into groups of {self.group}"
        return None


def quantized_params(rewriter: Rewriter, weight: Param, key: QuantKey) -> tuple[Param, Param]:
    """The parameters that hold the quantized weight and its scale."""
    assert isinstance(weight.type, TensorType)
    rows, size = weight.type.shape
    groups = int(size) // key.group if key.group else 1  # type: ignore[arg-type]
    values = rewriter.param(f"{weight.name}.quant", tensor(key.element, (rows, size)), Quantize(weight.recipe, key))
    scale = rewriter.param(
        f"{weight.name}.scale", tensor(key.scale, (rows, groups)), QuantizationScale(weight.recipe, key)
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
