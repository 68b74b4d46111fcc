"""Moves permutes below norms and casts, so that they meet the permutes of rope and attention and cancel.

    %p = aten.permute(%x, [1,0,2])          %n = rms_norm(%x, %w)
    %y = rms_norm(%p, %w)             ->    %y = aten.permute(%n, [1,0,2])

Exact. The permute must leave the last dimension, over which a norm is taken, in its place, and have no other reader.
Does not move permutes past anything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from treadle.ir.graph import Graph, Value
from treadle.passes.base import Pass, PassReport, Tier
from treadle.passes.match import Attr, bind, op
from treadle.passes.rewrite import Match, Rule, rewrite
from treadle.passes.rewriter import Rewriter

_KEEPS_LAST = Attr(
    "a reordering that keeps the last dimension", lambda dims: dims[-1] == len(dims) - 1, "dims"
)
_MOVED = op("aten.permute.default", bind("x"), dims=_KEEPS_LAST)


def _build(rewriter: Rewriter, match: Match) -> Value:
    root = match.root
    names = [root.result.name]
    rest = list(root.operands.values())[1:]
    moved = rewriter.call(root.op, match["x"], *rest, source=root.source, names=names, **root.attrs)
    return rewriter.call("aten.permute.default", moved.result, dims=match["dims"], source=root.source).result


RULES = (
    Rule("cast", op("aten.to.dtype", _MOVED), _build),
    Rule("rms_norm", op("rms_norm", _MOVED, bind("w")), _build),
    Rule("rms_norm", op("rms_norm", _MOVED, None), _build),
    Rule("layer_norm", op("layer_norm", _MOVED, bind("w"), bind("b")), _build),
    Rule("layer_norm", op("layer_norm", _MOVED, bind("w"), None), _build),
)


@dataclass(frozen=True)
class SinkPermutes(Pass):
    name: ClassVar[str] = "sink_permutes"
    tier: ClassVar[Tier] = "exact"
    stage: ClassVar[str] = "raise"

    def run(self, graph: Graph) -> PassReport:
        return rewrite(graph, self.report(), RULES)
