"""Which part of a graph works on one rank's share: from a row-parallel linear back to the linears that feed it.

Every value inside is cut along its axis 1: features of [T, N], heads of [T, H, D]. Nothing is changed here; the pass
shard_tensor_parallel applies what is found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from treadle.ir.graph import Graph, Node, Param, Value
from treadle.ir.types import TensorType
from treadle.passes.library.drop_batch_dim import POINTWISE

Users = dict[Value, list[Node]]


class CannotShard(Exception):
    """At which node the walk stopped, and why."""

    def __init__(self, node: Node, reason: str):
        super().__init__(reason)
        self.node = node
        self.reason = reason


@dataclass
class Region:
    """`row` reads the cut features; `columns` make them; `inner` lies between. `shares` of a value: into how many."""

    row: Node
    world: int
    columns: list[Node] = field(default_factory=list)
    inner: list[Node] = field(default_factory=list)
    shares: dict[Value, int] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return "attention" if any(node.op == "attention" for node in self.inner) else "mlp"

    @property
    def is_expected(self) -> bool:
        """Whether this is a place that every model has, so that a refusal is worth telling."""
        return any(node.op in ("attention", "gated_act") for node in self.inner)


def find_region(region: Region, users: Users) -> None:
    """Fills `region` by walking back from its row linear. Raises CannotShard where it cannot be cut."""
    _check_weight(region.row, users)
    _walk(region, region.row, next(region.row.inputs()), region.world)
    members = {*map(id, region.inner), *map(id, region.columns), id(region.row)}
    for node in (*region.inner, *region.columns):
        for value in node.results:
            if outside := [user for user in users.get(value, []) if id(user) not in members]:
                raise CannotShard(node, f"%{value.name} is also read by {outside[0].op}, which needs it whole")
    for column in region.columns:
        _check_weight(column, users)
        column_parts(region, column, users)  # raises if the parts cannot be cut


def column_parts(region: Region, column: Node, users: Users) -> tuple[list[int], list[int]]:
    """(sizes, shares) of the parts of a column linear's rows, one by one as a split after it takes them."""
    reader = users[column.result][0]
    if reader.op != "split":
        return [width(column.result)], [region.shares[column.result]]
    unread = [value for value in reader.results if value not in region.shares]
    if unread:
        raise CannotShard(reader, f"%{unread[0].name} is not part of the sharded work")
    return [width(value) for value in reader.results], [region.shares[value] for value in reader.results]


def width(value: Value) -> int:
    """Elements along the cut axis."""
    return shape(value)[1]


def shape(value: Value) -> tuple[int, ...]:
    assert isinstance(value.type, TensorType), f"%{value.name} is not a tensor"
    return value.type.shape  # type: ignore[return-value]


def weight_of(node: Node) -> Param | None:
    weight = node.operand("weight")
    return weight if isinstance(weight, Param) else None


def _check_weight(linear: Node, users: Users) -> None:
    for name in ("weight", "bias"):
        param = linear.operand(name)
        if param is None:
            continue
        if not isinstance(param, Param):
            raise CannotShard(linear, f"the {name} %{param.name} is computed in the graph")
        if len(users[param]) > 1:
            raise CannotShard(linear, f"the {name} %{param.name} is read by another node")


def _walk(region: Region, reader: Node, value: Value, shares: int) -> None:
    """Marks `value` as cut into `shares`, and goes on to what it is made of."""
    if value in region.shares:
        if region.shares[value] != shares:
            raise CannotShard(reader, f"%{value.name} would be cut in two ways")
        return
    node = value.producer
    if node is None:
        raise CannotShard(reader, f"%{value.name} is no product of a linear, so every rank has it whole")
    region.shares[value] = shares
    if node.op == "linear":
        if node not in region.columns:
            region.columns.append(node)
        _check_width(node, value, shares)
        return
    rule = _RULES.get(node.op, _pointwise if node.op in POINTWISE else None)
    if rule is None:
        raise CannotShard(node, f"{node.op} is not known to work on a share of the features")
    if node not in region.inner:
        region.inner.append(node)
    rule(region, node, shares)  # first: attention has more to say about its heads
    _check_width(node, value, shares)


def _check_width(node: Node, value: Value, shares: int) -> None:
    if width(value) % shares:
        raise CannotShard(node, f"{width(value)} is not a multiple of {shares}")


def _pointwise(region: Region, node: Node, shares: int) -> None:
    for value in node.inputs():
        if shape(value)[1:] != shape(node.results[0])[1:]:
            raise CannotShard(node, f"%{value.name} broadcasts against the features")
        _walk(region, node, value, shares)


def _split(region: Region, node: Node, shares: int) -> None:
    if node.attrs.get("dim", -1) not in (-1, 1) or len(shape(node.results[0])) != 2:
        raise CannotShard(node, "the split must cut the features of [T, N]")
    source = node.operands["x"]
    assert isinstance(source, Value)
    if source.producer is None or source.producer.op != "linear":
        raise CannotShard(node, "what is split must be the result of a linear")
    if source not in region.shares:
        region.shares[source] = region.world
        region.columns.append(source.producer)


def _reshape(region: Region, node: Node, shares: int) -> None:
    (source,) = node.inputs()
    before, after = shape(source), shape(node.result)
    if {len(before), len(after)} != {2, 3} or before[0] != after[0]:
        raise CannotShard(node, "a reshape must join or cut heads: [T, H*D] and [T, H, D]")
    heads = min((before, after), key=lambda dims: dims[1] if len(dims) > 1 else 0)
    _walk(region, node, source, shares)
    if heads[1] % shares:
        raise CannotShard(node, f"{heads[1]} heads are not a multiple of {shares}")


def _per_head(region: Region, node: Node, shares: int) -> None:
    source = next(node.inputs())
    if len(shape(source)) != 3 or node.attrs.get("across_heads", False):
        raise CannotShard(node, f"{node.op} works over all features at once, which no rank has")
    _walk(region, node, source, shares)


def _attention(region: Region, node: Node, shares: int) -> None:
    q, k, v = (node.operands[name] for name in ("q", "k", "v"))
    assert isinstance(q, Value) and isinstance(k, Value) and isinstance(v, Value)
    heads, kv_heads, world = width(q), width(k), region.world
    if heads % world:
        raise CannotShard(node, f"{heads} attention heads are not a multiple of {world} ranks")
    if kv_heads % world and world % kv_heads:
        raise CannotShard(node, f"{kv_heads} key heads neither divide into {world} ranks nor divide {world}")
    sinks = node.operand("sinks")
    if sinks is not None and not isinstance(sinks, Param):
        raise CannotShard(node, f"the sinks %{sinks.name} are computed in the graph")
    _walk(region, node, q, world)
    _walk(region, node, k, min(world, kv_heads))
    _walk(region, node, v, min(world, kv_heads))


Rule = Callable[[Region, Node, int], None]
_RULES: dict[str, Rule] = {
    "gated_act": _pointwise,
    "split": _split,
    "aten.reshape.default": _reshape,
    "rope": _per_head,
    "rms_norm": _per_head,
    "rms_norm_rope": _per_head,
    "layer_norm": _per_head,
    "attention": _attention,
}


def find_head(graph: Graph) -> Node | None:
    """The linear that makes the logits, through elementwise ops of one computed operand."""
    value = graph.outputs[0]
    while value.producer is not None:
        node = value.producer
        if node.op == "linear":
            return node if weight_of(node) is not None else None
        computed = [item for item in node.inputs() if not isinstance(item, Param)]
        if node.op not in POINTWISE or len(computed) != 1:
            return None
        value = computed[0]
    return None
