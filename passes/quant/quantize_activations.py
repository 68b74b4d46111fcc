"""Quantizes what goes into the linears whose weights are quantized, so that products have 8 bits on both sides.

    %y = weight_only_linear(%x, %w, %s)   ->   %q, %t = quantize_dynamic(%x, key=quant(i8, per_token, dynamic))
                                               %y = scaled_linear(%q, %t, %w, %s)

Changing: activations are rounded to 8 bits. An input that several linears read is quantized once. `scales` makes inputs
static: `"*down_proj*=0.02"` gives the linears whose weight matches that scale for the whole tensor, through
`quantize_static`. `group` above 0 gives each run of so many values its own scale, which keeps outliers from the others;
weights that match a pattern of `ignore` keep their input as it is. Experts get the key as an attribute and round inside, the
input and what goes into the second product; their scales are always dynamic. Does not handle attention, nor linears whose
weights are not quantized.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

from treadle.ir.errors import ConfigError
from treadle.ir.graph import Graph, Node, Value
from treadle.ir.quant_key import QuantKey
from treadle.ir.types import TensorType, tensor
from treadle.ir.weights import Literal
from treadle.passes.base import NearMiss, Pass, PassReport, Site, Tier
from treadle.passes.rewriter import Rewriter

_Quantized = tuple[Value, Value, QuantKey]


@dataclass(frozen=True)
class QuantizeActivations(Pass):
    """The element type is that of the weight, so that both sides of a product are alike."""

    scales: tuple[str, ...] = ()
    group: int = 0
    ignore: tuple[str, ...] = ()

    name: ClassVar[str] = "quantize_activations"
    tier: ClassVar[Tier] = "changing"
    stage: ClassVar[str] = "lower"
    requires: ClassVar[tuple[str, ...]] = ("quantize_weights",)
    produces: ClassVar[tuple[str, ...]] = ("quantize_dynamic", "scaled_linear")
    after: ClassVar[tuple[str, ...]] = ("quantize_weights",)
    expects: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._static()

    def _static(self) -> list[tuple[str, float]]:
        """Pattern and scale of each entry. Raises ConfigError for one that is not `pattern=positive number`."""
        found = []
        for entry in self.scales:
            pattern, _, number = entry.rpartition("=")
            try:
                scale = float(number)
            except ValueError:
                scale = 0.0
            if not pattern or not 0 < scale < float("inf"):
                raise ConfigError(f"quantize_activations: scales has {entry!r}; write pattern=scale, as in '*down_proj*=0.02'")
            found.append((pattern, scale))
        return found

    def run(self, graph: Graph) -> PassReport:
        report, rewriter = self.report(), Rewriter(graph)
        dead: list[Node] = []
        done: dict[tuple[Value, QuantKey, float | None], _Quantized] = {}
        for node in graph.nodes:
            if node.op in ("moe_quant", "experts_quant"):
                self._round_experts(node, report)
            if node.op != "weight_only_linear":
                continue
            x, weight = node.operand("x"), node.operand("weight")
            assert x is not None and weight is not None and isinstance(x.type, TensorType)
            if problem := self._objection(weight.name, x.type):
                report.near_misses.append(NearMiss.of(node, problem, 1))
                continue
            scale = next((number for pattern, number in self._static() if fnmatchcase(weight.name, pattern)), None)
            place = (x, node.attrs["key"], scale)
            if place not in done:
                done[place] = _quantize(rewriter.at(node), node, x, scale, self.group)
            q, x_scale, key = done[place]
            call = rewriter.at(node).call(
                "scaled_linear", q, x_scale, weight, node.operand("scale"), node.operand("bias"),
                source=node.source, names=[node.result.name], x_key=key, key=node.attrs["key"], dtype=x.type.dtype,
            )  # fmt: skip
            rewriter.replace(node.result, call.result)
            dead.append(node)
            report.sites.append(Site.of(node))
            report.count("dynamic" if scale is None else "static")
        rewriter.apply(dead)
        return report

    def _round_experts(self, node: Node, report: PassReport) -> None:
        """Experts round what goes into their products themselves: the op learns the key."""
        if node.attrs.get("x_key") is not None:
            return
        for name in ("gate_up", "down"):
            weight = node.operand(name)
            assert weight is not None and isinstance(weight.type, TensorType)
            if problem := self._objection(weight.name, weight.type):
                report.near_misses.append(NearMiss.of(node, problem, 1))
                return
        element = node.attrs["key"].element
        node.attrs["x_key"] = QuantKey(element, "per_group" if self.group else "per_token", self.group, dynamic=True)
        report.sites.append(Site.of(node))
        report.count("experts")

    def _objection(self, weight: str, x: TensorType) -> str | None:
        if pattern := next((p for p in self.ignore if fnmatchcase(weight, p)), None):
            return f"the weight %{weight} matches {pattern!r} of ignore"
        if self.group and int(x.shape[-1]) % self.group:  # type: ignore[arg-type]
            return f"{x.shape[-1]} inputs do not divide into groups of {self.group}"
        return None


def _quantize(rewriter: Rewriter, node: Node, x: Value, scale: float | None, group: int) -> _Quantized:
    """The quantized input, its scale and key; new nodes go before `node`, the first to read it."""
    element, source = node.attrs["key"].element, node.source
    names = [f"{x.name}.quant", f"{x.name}.scale"]
    if scale is None:
        key = QuantKey(element, "per_group" if group else "per_token", group, dynamic=True)
        call = rewriter.call("quantize_dynamic", x, source=source, names=names, key=key)
        return call.results[0], call.results[1], key
    key = QuantKey(element, "per_tensor")
    assert isinstance(x.type, TensorType)
    shape = (1,) * len(x.type.shape)
    held = rewriter.param(f"{x.name}.scale", tensor("f32", shape), Literal(tensor("f32", ()).dtype, shape, (scale,)))
    call = rewriter.call("quantize_static", x, held, source=source, names=names[:1], key=key)
    return call.result, held, key
