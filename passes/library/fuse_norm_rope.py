"""Joins the norm of queries or keys with the rotation that follows it.

    %n = rms_norm(%q, %w)
    %y = rope(%n, %cos, %sin)     ->     %y = rms_norm_rope(%q, %cos, %sin, %w)

Kinds: `per_head` norms each head's features (Qwen 3, Gemma 3), `across_heads` all of a token's, before they are cut
into heads (OLMo 2). Exact: the same norm, then the same rotation. Does not handle layer norms of queries and keys
(StableLM, Cohere), nor a norm whose result is read elsewhere too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from treadle.ir.graph import Graph, Value
from treadle.ir.types import TensorType
from treadle.passes.base import Pass, PassReport, Tier
from treadle.passes.match import bind, either, op
from treadle.passes.rewrite import Build, Match, Rule, Where, rewrite
from treadle.passes.rewriter import Rewriter

_NORM = either(
    op("rms_norm", bind("x"), bind("w"), name="norm"), op("rms_norm", bind("x"), None, name="norm")
)
_PER_HEAD = op("rope", _NORM, bind("cos"), bind("sin"))
_ACROSS = op("rope", op("aten.reshape.default", _NORM, name="cut"), bind("cos"), bind("sin"))


def _with(across_heads: bool) -> Build:
    def build(rewriter: Rewriter, match: Match) -> Value:
        root, x, source = match.root, match["x"], match.root.source
        if across_heads:
            shape = match["cut"].attrs["shape"]
            x = rewriter.call("aten.reshape.default", x, shape=shape, source=match["cut"].source).result
        attrs: dict[str, Any] = {**match["norm"].attrs, **root.attrs, "across_heads": across_heads}
        operands = x, match["cos"], match["sin"], match.get("w")
        return rewriter.call("rms_norm_rope", *operands, source=source, **attrs).result

    return build


def _rank(value: Value) -> int:
    return len(value.type.shape) if isinstance(value.type, TensorType) else 0


def _covers_a_token(match: Match) -> bool:
    """The norm is over [T, H * D], and the reshape cuts just that into heads."""
    x, cut = match["x"].type, match["cut"].result.type
    return _rank(match["x"]) == 2 and _rank(match["cut"].result) == 3 and x.shape[0] == cut.shape[0]


_CUTS: Where = (
    "the reshape between norm and rope does not cut a token's features into heads",
    _covers_a_token,
)
RULES = (
    Rule("per_head", _PER_HEAD, _with(False)),
    Rule("across_heads", _ACROSS, _with(True), (_CUTS,), near=3),
)


@dataclass(frozen=True)
class FuseNormRope(Pass):
    name: ClassVar[str] = "fuse_norm_rope"
    tier: ClassVar[Tier] = "exact"
    produces: ClassVar[tuple[str, ...]] = ("rms_norm_rope",)
    after: ClassVar[tuple[str, ...]] = ("raise_rope",)

    def run(self, graph: Graph) -> PassReport:
        return rewrite(graph, self.report(), RULES)
