"""Cuts a model over the ranks of a tensor-parallel group, in the graph and in the weight plan together.

    %qkv = linear(%x, %wqkv)                   param %wqkv = shard(..., dim=0, world=2, sizes=[64, 32, 32])
    %q, %k, %v = split(%qkv, [64, 32, 32])     %qkv = linear(%x, %wqkv)
    %o = attention(...)  [T,4,16]        ->    %q, %k, %v = split(%qkv, [32, 16, 16])
    %y = linear(%o, %wo)                       %o = attention(...)  [T,2,16]
                                               %partial = linear(%o, %wo)      %wo = shard(..., dim=1, world=2)
                                               %y = all_reduce(%partial, world=2)

Attention and MLP blocks become column-parallel linears, work on a share of heads or features, and a row-parallel
linear whose results are summed; a bias of the latter goes into the sum once. Key and value heads that are fewer than
ranks are repeated. Experts are cut along their inner features, so that every rank runs the same tokens through a share
of every expert; the router stays whole. The vocabulary is cut too, padded to a multiple of the ranks: look-ups give
zeros for ids of other ranks and are summed, logits are gathered. All ranks have the same graph; only their weights
differ (`bind_rank`). Changing: sums run in another order. Does not handle norms over all heads at once (that block
stays whole on every rank), head counts that the ranks do not divide, nor blocks that branch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from treadle.ir.errors import ConfigError
from treadle.ir.graph import Graph, Node, Param, Value
from treadle.ir.infer import infer_node
from treadle.ir.ops.registry import get_op
from treadle.ir.types import StateType, tensor
from treadle.ir.weights import OnFirstRank, RankOffset, Shard
from treadle.passes.base import NearMiss, Pass, PassReport, Site, Tier
from treadle.passes.rewriter import Rewriter
from treadle.passes.sharding import (
    CannotShard,
    Region,
    Users,
    column_parts,
    find_head,
    find_region,
    shape,
    weight_of,
    width,
)


@dataclass(frozen=True)
class ShardTensorParallel(Pass):
    """`world` is the number of ranks. A graph that has collectives already is left as it is."""

    name: ClassVar[str] = "shard_tensor_parallel"
    tier: ClassVar[Tier] = "changing"
    stage: ClassVar[str] = "lower"
    requires: ClassVar[tuple[str, ...]] = ("raise_linear", "raise_embedding")
    after: ClassVar[tuple[str, ...]] = ("fuse_qkv", "fuse_gate_up", "fuse_add_rms_norm", "select_logit_rows")
    expects: ClassVar[bool] = True

    world: int = 2

    def __post_init__(self) -> None:
        if self.world < 1:
            raise ConfigError(f"shard_tensor_parallel: world={self.world} should be a number of ranks, at least 1")

    def run(self, graph: Graph) -> PassReport:
        report = self.report()
        if self.world == 1 or any(get_op(node.op).collective for node in graph.nodes):
            return report
        job = _Job(graph, self.world, report)
        job.shard_blocks()
        job.shard_experts()
        job.shard_vocabulary()
        job.rewriter.apply(job.dead)
        return report


class _Job:
    """One run: the regions found so far and the changes under way."""

    def __init__(self, graph: Graph, world: int, report: PassReport):
        self.graph = graph
        self.world = world
        self.report = report
        self.rewriter = Rewriter(graph)
        self.users: Users = graph.users()
        self.dead: list[Node] = []
        self._taken: set[int] = set()

    def done(self, kind: str, node: Node) -> None:
        self.report.count(kind)
        self.report.sites.append(Site.of(node))

    def refused(self, stop: CannotShard, matched: int = 1) -> None:
        self.report.near_misses.append(NearMiss.of(stop.node, stop.reason, matched))

    # Attention and MLP

    def shard_blocks(self) -> None:
        for row in [node for node in self.graph.nodes if node.op == "linear"]:
            region = Region(row, self.world)
            try:
                find_region(region, self.users)
                if any(id(node) in self._taken for node in (row, *region.columns)):
                    raise CannotShard(row, "one of its linears is part of another sharded block")
            except CannotShard as stop:
                if region.is_expected:
                    self.refused(stop, len(region.inner))
                continue
            self._taken.update(map(id, (row, *region.columns)))
            self.done(region.kind, row)
            self._apply(region)

    def _apply(self, region: Region) -> None:
        for column in region.columns:
            sizes, shares = column_parts(region, column, self.users)
            for name in ("weight", "bias"):
                self._shard(column.operand(name), 0, sizes, shares)
        order = {id(node): number for number, node in enumerate(self.graph.nodes)}
        local = {value: width(value) // shares for value, shares in region.shares.items()}
        for node in sorted((*region.columns, *region.inner), key=lambda node: order[id(node)]):
            _shrink(self, node, local)
        self._shard(weight_of(region.row), 1)
        bias = region.row.operand("bias")
        if isinstance(bias, Param):
            bias.recipe = OnFirstRank(bias.recipe)
        self.sum_after(region.row)

    def _shard(
        self, param: Value | None, dim: int, sizes: list[int] | None = None, shares: list[int] | None = None
    ) -> None:
        """Makes a parameter its rank's share along `dim`."""
        if param is None:
            return
        assert isinstance(param, Param)
        whole = list(shape(param))
        sizes, shares = sizes or [whole[dim]], shares or [self.world]
        plain = len(sizes) == 1 and shares == [self.world]
        parts, counts = ((), ()) if plain else (tuple(sizes), tuple(shares))
        param.recipe = Shard(param.recipe, dim, self.world, parts, counts)
        whole[dim] = sum(size // count for size, count in zip(sizes, shares, strict=True))
        param.type = tensor(param.type.dtype, whole)  # type: ignore[union-attr]

    def sum_after(self, node: Node) -> None:
        """`node` now makes a part of its result; an all_reduce after it makes the result."""
        whole, part = self._part_of(node)
        call = self.rewriter.at(node, after=True).call("all_reduce", part, world=self.world, source=node.source)
        _produces(call, whole)

    def _part_of(self, node: Node) -> tuple[Value, Value]:
        """(the value that others read, a new value that `node` makes instead)."""
        whole = node.result
        (kind,) = infer_node(node)
        part = Value(self.rewriter.fresh("partial"), kind, node)
        node.results = (part,)
        return whole, part

    # Experts

    def shard_experts(self) -> None:
        for node in [node for node in self.graph.nodes if node.op in ("experts", "moe")]:
            if node.operands.get("shared") is not None:
                self.refused(CannotShard(node, "the shared expert's part would be summed once for each rank"))
                continue
            weights = [node.operand(name) for name in ("gate_up", "down")]
            shared = [w for w in weights if not isinstance(w, Param) or len(self.users[w]) > 1]
            if shared or width(weights[0]) % (2 * self.world):  # type: ignore[arg-type]
                reason = "their weights are computed or shared" if shared else "their inner features do not divide"
                self.refused(CannotShard(node, f"the experts cannot be cut over {self.world} ranks: {reason}"))
                continue
            inner = width(weights[0]) // 2  # type: ignore[arg-type]
            self.done("experts", node)
            self._shard(weights[0], 1, [inner, inner], [self.world, self.world])
            self._shard(weights[1], 2)
            self.sum_after(node)

    # Vocabulary

    def shard_vocabulary(self) -> None:
        if not any(value.name == "input_ids" for value in self.graph.inputs):
            return  # a part of a model: its last linear makes no logits
        head = find_head(self.graph)
        if head is not None and id(head) in self._taken:
            head = None
        look_ups = [node for node in self.graph.nodes if node.op == "embedding" and self._reads_ids(node)]
        tables = dict.fromkeys(table for node in (*look_ups, head) if (table := _table(node)) is not None)
        for table in tables:
            known = {id(node) for node in (*look_ups, head) if node is not None}
            if other := [node for node in self.users[table] if id(node) not in known]:
                reason = f"%{table.name} is also read by {other[0].op}, which needs it whole"
                self.refused(CannotShard(other[0], reason))
                continue
            rows = shape(table)[0]
            self._cut_rows(table)
            for node in look_ups:
                if _table(node) is table:
                    self._mask_look_up(node, table)
            if head is not None and _table(head) is table:
                self._gather_logits(head, rows)

    def _reads_ids(self, node: Node) -> bool:
        ids = node.operand("ids")
        return ids is not None and ids in self.graph.inputs and ids.name == "input_ids"

    def _cut_rows(self, table: Param) -> None:
        """The share is padded: the vocabulary need not be a multiple of the ranks."""
        rows, *rest = shape(table)
        table.recipe = Shard(table.recipe, 0, self.world, pad=bool(rows % self.world))
        table.type = tensor(table.type.dtype, (-(-rows // self.world), *rest))  # type: ignore[union-attr]

    def _mask_look_up(self, node: Node, table: Param) -> None:
        self.done("embedding", node)
        start = self.rewriter.param("vocabulary_start", tensor("i64", ()), RankOffset(shape(table)[0]))
        names = ["partial"]
        place = self.rewriter.at(node)
        part = place.call("embedding_shard", table, node.operand("ids"), start, source=node.source, names=names)
        summed = place.call("all_reduce", part.result, world=self.world, source=node.source, names=["embedding"])
        self.rewriter.replace(node.result, summed.result)
        self.dead.append(node)

    def _gather_logits(self, head: Node, rows: int) -> None:
        self.done("head", head)
        bias = head.operand("bias")
        if isinstance(bias, Param):
            self._cut_rows(bias)
        whole, part = self._part_of(head)
        place = self.rewriter.at(head, after=True)
        last = place.call("all_gather", part, world=self.world, source=head.source)
        if width(last.result) != rows:
            last = place.call("aten.slice.Tensor", last.result, dim=1, end=rows, source=head.source)
        _produces(last, whole)


def _table(node: Node | None) -> Param | None:
    """The vocabulary's weight that a look-up or the head reads."""
    if node is None:
        return None
    table = node.operand("table" if node.op == "embedding" else "weight")
    return table if isinstance(table, Param) else None


def _produces(node: Node, value: Value) -> None:
    """`node` makes `value` from now on, so that its readers need no change."""
    assert node.result.type == value.type, f"{node.op} gives {node.result.type}, %{value.name} is {value.type}"
    node.results, value.producer = (value,), node


def _shrink(job: _Job, node: Node, local: dict[Value, int]) -> None:
    """Makes the node work on a share: its attributes that hold sizes, its state, the types of its results."""
    if node.op == "split":
        node.attrs["sizes"] = [local[value] for value in node.results]
    elif node.op == "aten.reshape.default":
        sizes = list(node.attrs["shape"])
        sizes[1] = local[node.result]
        node.attrs["shape"] = sizes
    elif node.op == "attention":
        cache, sinks = node.operand("cache"), node.operand("sinks")
        if cache is not None:
            assert isinstance(cache.type, StateType)
            key = node.operands["k"]
            assert isinstance(key, Value)
            cache.type = StateType(cache.type.kind, (width(key), *cache.type.params[1:]))
        job._shard(sinks, 0)
    for value, kind in zip(node.results, infer_node(node), strict=True):
        value.type = kind
