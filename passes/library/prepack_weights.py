"""Lays the weights of linears out as the processor reads them, once, when the bundle is written.

    param %w: bf16[N,K] = load("w")            param %w.packed: bf16[N/16,K/2,16,2] = pack(load("w"), dtype=bf16)
    %y = linear(%x, %w)                ->      %y = packed_linear(%x, %w.packed, n=N)

An int8 weight with scales (`weight_only_linear`) becomes `packed_int8_linear` of the packed weight and the packed scales.
A bias becomes an addition, which the code generator fuses with what follows. Changing: sums run in another order. For code
generators that can call our kernels. A weight that another op reads too (a tied embedding) stays beside its packed form:
of the plain one, mapped into memory, only the rows that are looked up are ever read. Does not handle float16, weights that
are computed in the graph, nor inputs of other than two dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from treadle.ir.graph import Graph, Node, Param, Value
from treadle.ir.packing import packed_shape
from treadle.ir.types import DTYPES, DType, TensorType, tensor
from treadle.ir.weights import Pack
from treadle.passes.base import NearMiss, Pass, PassReport, Site, Tier
from treadle.passes.rewriter import Rewriter

_OPS = ("linear", "weight_only_linear")
_LINEAR_DTYPES = ("f32", "bf16")
_GROUP_MULTIPLE = 32
"""The kernel reads the weight in steps of so many along K, which one scale has to hold for."""


@dataclass(frozen=True)
class PrepackWeights(Pass):
    """Packs every linear whose weight is a parameter of float32, bfloat16 or int8."""

    name: ClassVar[str] = "prepack_weights"
    tier: ClassVar[Tier] = "changing"
    stage: ClassVar[str] = "lower"
    requires: ClassVar[tuple[str, ...]] = ("raise_linear",)
    after: ClassVar[tuple[str, ...]] = ("fuse_qkv", "fuse_gate_up", "shard_tensor_parallel", "quantize_weights", "quantize_activations")
    produces: ClassVar[tuple[str, ...]] = ("packed_linear", "packed_int8_linear")

    def run(self, graph: Graph) -> PassReport:
        report, rewriter = self.report(), Rewriter(graph)
        dead: list[Node] = []
        packed: dict[Param, Param] = {}
        for node in graph.nodes:
            if node.op not in _OPS:
                continue
            if problem := _objection(node):
                report.near_misses.append(NearMiss.of(node, problem, 1))
                continue
            rewriter.replace(node.result, _call(rewriter.at(node), node, packed))
            dead.append(node)
            report.sites.append(Site.of(node))
            report.count(node.op)
        rewriter.apply(dead)
        return report


def _objection(node: Node) -> str | None:
    x, weight = node.operand("x"), node.operand("weight")
    assert x is not None and isinstance(x.type, TensorType) and weight is not None and isinstance(weight.type, TensorType)
    if not isinstance(weight, Param):
        return f"the weight %{weight.name} is computed in the graph"
    if len(x.type.shape) != 2:
        return f"the input has {len(x.type.shape)} dimensions, not 2"
    if str(x.type.dtype) not in _LINEAR_DTYPES:
        return f"products of {x.type.dtype} have no kernel; those of {' and '.join(_LINEAR_DTYPES)} have"
    return _quantized_objection(node) if node.op == "weight_only_linear" else None


def _quantized_objection(node: Node) -> str | None:
    key, scale = node.attrs["key"], node.operand("scale")
    if key.element != "i8":
        return f"weights of {key.element} are not packed; those of i8 are"
    if key.granularity not in ("per_channel", "per_group"):
        return f"the weight's scales are {key.granularity}; they should be per_channel or per_group"
    if key.group % _GROUP_MULTIPLE:
        return f"groups of {key.group} are not a multiple of {_GROUP_MULTIPLE}"
    if not isinstance(scale, Param):
        return "the scales are computed in the graph"
    return None


def _call(rewriter: Rewriter, node: Node, packed: dict[Param, Param]) -> Value:
    weight, bias, scale = node.operand("weight"), node.operand("bias"), node.operand("scale") if node.op != "linear" else None
    assert isinstance(weight, Param) and isinstance(weight.type, TensorType)
    operands = [node.operand("x"), _packed(rewriter, weight, weight.type.dtype, packed)]
    if scale is not None:
        assert isinstance(scale, Param)
        operands.append(_packed(rewriter, scale, DTYPES["f32"], packed))
    name = node.result.name
    product = rewriter.call(
        "packed_linear" if scale is None else "packed_int8_linear", *operands, source=node.source,
        names=[name if bias is None else f"{name}.product"], n=int(weight.type.shape[0]),  # type: ignore[arg-type]
    )  # fmt: skip
    if bias is None:
        return product.result
    return rewriter.call("aten.add.Tensor", product.result, bias, source=node.source, names=[name]).result


def _packed(rewriter: Rewriter, param: Param, dtype: DType, packed: dict[Param, Param]) -> Param:
    """The parameter that holds another one in panels; made once."""
    if param not in packed:
        assert isinstance(param.type, TensorType)
        rows, size = (int(dim) for dim in param.type.shape)  # type: ignore[arg-type]
        packed[param] = rewriter.param(f"{param.name}.packed", tensor(dtype, packed_shape(dtype, rows, size)), Pack(param.recipe, dtype))
    return packed[param]
