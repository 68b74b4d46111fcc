"""Lays the weights of linears out as the processor reads them, once, when the bundle is written.

    param %w: bf16[N,K] = load("w")            param %w.packed: bf16[N/16,K/2,16,2] = pack(load("w"), dtype=bf16)
    %y = linear(%x, %w)                ->      %y = packed_linear(%x, %w.packed, n=N)

A bias becomes an addition, which the code generator fuses with what follows. Changing: sums run in another order. For code
generators that can call our kernels. A weight that another op reads too (a tied embedding) stays beside its packed form:
of the plain one, mapped into memory, only the rows that are looked up are ever read. Does not handle float16, weights that
are computed in the graph, nor inputs of other than two dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from treadle.ir.graph import Graph, Node, Param, Value
from treadle.ir.packing import PACKED_DTYPES, packed_shape
from treadle.ir.types import TensorType, tensor
from treadle.ir.weights import Pack
from treadle.passes.base import NearMiss, Pass, PassReport, Site, Tier
from treadle.passes.rewriter import Rewriter


@dataclass(frozen=True)
class PrepackWeights(Pass):
    """Packs every linear whose weight is a parameter of float32 or bfloat16."""

    name: ClassVar[str] = "prepack_weights"
    tier: ClassVar[Tier] = "changing"
    stage: ClassVar[str] = "lower"
    requires: ClassVar[tuple[str, ...]] = ("raise_linear",)
    after: ClassVar[tuple[str, ...]] = ("fuse_qkv", "fuse_gate_up", "shard_tensor_parallel", "quantize_weights")
    produces: ClassVar[tuple[str, ...]] = ("packed_linear",)

    def run(self, graph: Graph) -> PassReport:
        report, rewriter = self.report(), Rewriter(graph)
        dead: list[Node] = []
        packed: dict[Param, Param] = {}
        for node in graph.nodes:
            if node.op != "linear":
                continue
            if problem := _objection(node):
                report.near_misses.append(NearMiss.of(node, problem, 1))
                continue
            rewriter.replace(node.result, _call(rewriter.at(node), node, packed))
            dead.append(node)
            report.sites.append(Site.of(node))
            report.count("linear")
        rewriter.apply(dead)
        return report


def _objection(node: Node) -> str | None:
    x, weight = node.operand("x"), node.operand("weight")
    assert x is not None and isinstance(x.type, TensorType) and weight is not None and isinstance(weight.type, TensorType)
    if not isinstance(weight, Param):
        return f"the weight %{weight.name} is computed in the graph"
    if str(weight.type.dtype) not in PACKED_DTYPES:
        return f"weights of {weight.type.dtype} are not packed; {' and '.join(PACKED_DTYPES)} are"
    if len(x.type.shape) != 2:
        return f"the input has {len(x.type.shape)} dimensions, not 2"
    return None


def _call(rewriter: Rewriter, node: Node, packed: dict[Param, Param]) -> Value:
    weight, bias = node.operand("weight"), node.operand("bias")
    assert isinstance(weight, Param) and isinstance(weight.type, TensorType)
    rows, size = (int(dim) for dim in weight.type.shape)  # type: ignore[arg-type]
    if weight not in packed:
        shape = packed_shape(weight.type.dtype, rows, size)
        packed[weight] = rewriter.param(f"{weight.name}.packed", tensor(weight.type.dtype, shape), Pack(weight.recipe, weight.type.dtype))
    name = node.result.name
    product = rewriter.call(
        "packed_linear", node.operand("x"), packed[weight], source=node.source,
        names=[name if bias is None else f"{name}.product"], n=rows,
    )  # fmt: skip
    if bias is None:
        return product.result
    return rewriter.call("aten.add.Tensor", product.result, bias, source=node.source, names=[name]).result
