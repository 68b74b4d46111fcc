"""A declarative matcher: patterns over op names, operands and attributes, matched from a root node upwards.

    norm = op("aten.mul.Tensor", bind("x"), op("aten.rsqrt.default", ...))

A pattern that fails leaves a trail: the furthest node it reached and the predicate that stopped it there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from treadle.ir.graph import Node, Operand, Param, Value
from treadle.ir.ops.registry import get_op

COMMUTATIVE = frozenset({"aten.mul.Tensor", "aten.add.Tensor"})


@dataclass(frozen=True)
class Env:
    """What has been matched so far: names bound to values or attributes, and the nodes of the pattern in order."""

    bound: Mapping[str, Any] = field(default_factory=dict)
    nodes: tuple[Node, ...] = ()
    shared: frozenset[int] = frozenset()

    def with_bound(self, name: str, item: Any) -> Env:
        return Env({**self.bound, name: item}, self.nodes, self.shared)

    def with_node(self, node: Node, shared: bool) -> Env:
        marked = self.shared | {id(node)} if shared else self.shared
        return Env(self.bound, (*self.nodes, node), marked)


@dataclass
class Trail:
    """The failure that came furthest: where, why, and the nodes matched before it."""

    node: Node | None = None
    predicate: str = ""
    nodes: tuple[Node, ...] = ()

    @property
    def matched(self) -> int:
        return len(self.nodes)

    def fail(self, env: Env, value: Value | None, predicate: Callable[[], str]) -> None:
        """Records a failure at `value`'s producer; at the last matched node if nothing produced it."""
        if len(env.nodes) <= self.matched:
            return
        self.nodes = env.nodes
        self.node = value.producer if value is not None and value.producer else (env.nodes or (None,))[-1]
        self.predicate = predicate()


class Pattern:
    """Matches one value. `match` yields every way to do so, extending the environment."""

    def match(self, value: Value, env: Env, trail: Trail) -> Iterator[Env]:
        raise NotImplementedError


@dataclass(frozen=True)
class Bind(Pattern):
    """Any value (that passes `check`), bound to a name; a name that is bound already must be the same value."""

    name: str
    check: Callable[[Value], bool] | None = None
    what: str = "any value"

    def match(self, value: Value, env: Env, trail: Trail) -> Iterator[Env]:
        known = env.bound.get(self.name, value)
        if known is not value:
            trail.fail(
                env, value, lambda: f"%{value.name} must be %{known.name}, bound to {self.name!r} before"
            )
        elif self.check is not None and not self.check(value):
            trail.fail(env, value, lambda: f"{self.name!r} must be {self.what}, %{value.name} is not")
        else:
            yield env.with_bound(self.name, value)


@dataclass(frozen=True)
class Attr:
    """Predicate on an attribute: a test with words for reports; bound to `name` if there is one."""

    what: str
    test: Callable[[Any], bool]
    name: str = ""


def keep(name: str) -> Attr:
    """Any attribute, bound to `name`."""
    return Attr("anything", lambda _: True, name)


@dataclass(frozen=True)
class OpCall(Pattern):
    """A call of one of `ops` whose operands and attributes match. See `op`."""

    ops: tuple[str, ...]
    operands: tuple[Pattern | Sequence[Pattern] | None, ...]
    attrs: Mapping[str, Any]
    name: str = ""
    shared: bool = False
    result: int = 0

    def match(self, value: Value, env: Env, trail: Trail) -> Iterator[Env]:
        node = value.producer
        if node is None or node.op not in self.ops:
            trail.fail(env, value, lambda: f"expected {' or '.join(self.ops)}, found {_describe(value)}")
        elif node.results[self.result] is not value:
            trail.fail(env, value, lambda: f"expected result {self.result} of {node.op}")
        else:
            yield from self.match_node(node, env, trail)

    def match_node(self, node: Node, env: Env, trail: Trail) -> Iterator[Env]:
        """As `match`, for a node whose op is known to be right."""
        env = env.with_node(node, self.shared)
        if self.name:
            env = env.with_bound(self.name, node)
        bound = self._match_attrs(node, env, trail)
        if bound is None:
            return
        for order in self._orders(node):
            yield from _match_operands(self.operands, order, bound, trail, node)

    def _match_attrs(self, node: Node, env: Env, trail: Trail) -> Env | None:
        row = get_op(node.op)
        for name, wanted in self.attrs.items():
            actual = node.attrs.get(name, row.defaults.get(name))
            fits = wanted.test(actual) if isinstance(wanted, Attr) else same_attr(actual, wanted)
            if not fits:
                shown = wanted.what if isinstance(wanted, Attr) else repr(wanted)
                trail.fail(env, node.results[0], lambda: f"{node.op}: {name} must be {shown}, is {actual!r}")  # noqa: B023
                return None
            if isinstance(wanted, Attr) and wanted.name:
                env = env.with_bound(wanted.name, actual)
        return env

    def _orders(self, node: Node) -> list[list[Operand | None]]:
        """The operands in schema order, and swapped where the op commutes."""
        given: list[Operand | None] = [node.operands.get(name) for name in get_op(node.op).tensors]
        if node.op in COMMUTATIVE and given[1] is not None and node.attrs.get("alpha", 1) == 1:
            return [given, [given[1], given[0]]]
        return [given]


def _match_operands(
    patterns: Sequence[Any], given: Sequence[Operand | None], env: Env, trail: Trail, node: Node
) -> Iterator[Env]:
    if not patterns:
        if any(item is not None for item in given):
            trail.fail(env, node.results[0], lambda: f"{node.op} has more operands than the pattern")
            return
        yield env
        return
    first, operand = patterns[0], given[0] if given else None
    if first is None or operand is None:
        if first is not None or operand is not None:
            trail.fail(
                env,
                node.results[0],
                lambda: f"{node.op}: an operand is {'' if first is None else 'not '}given",
            )
            return
        yield from _match_operands(patterns[1:], given[1:], env, trail, node)
        return
    for extended in _match_one(first, operand, env, trail, node):
        yield from _match_operands(patterns[1:], given[1:], extended, trail, node)


def _match_one(
    pattern: Pattern | Sequence[Pattern], operand: Operand, env: Env, trail: Trail, node: Node
) -> Iterator[Env]:
    if isinstance(pattern, Pattern):
        if isinstance(operand, Value):
            yield from pattern.match(operand, env, trail)
        return
    if not isinstance(operand, tuple) or len(operand) != len(pattern):
        trail.fail(env, node.results[0], lambda: f"{node.op}: expected a list of {len(pattern)}")
        return
    yield from _match_operands(pattern, operand, env, trail, node)


@dataclass(frozen=True)
class Either(Pattern):
    """The first pattern that matches, others on backtracking."""

    options: tuple[Pattern, ...]

    def match(self, value: Value, env: Env, trail: Trail) -> Iterator[Env]:
        for option in self.options:
            yield from option.match(value, env, trail)


def op(
    names: str | tuple[str, ...],
    *operands: Pattern | Sequence[Pattern] | None,
    name: str = "",
    shared: bool = False,
    result: int = 0,
    **attrs: Any,
) -> OpCall:
    """A call: operands in schema order (None where one must be absent), attributes as values or `Attr` predicates.

    `name` binds the node. A node inside a match must have no other user, unless `shared`. Operands of add and mul
    match in either order.
    """
    return OpCall((names,) if isinstance(names, str) else names, operands, attrs, name, shared, result)


def bind(name: str) -> Bind:
    return Bind(name)


def weight(name: str) -> Bind:
    """A parameter of the graph."""
    return Bind(name, lambda value: isinstance(value, Param), "a parameter")


def either(*options: Pattern) -> Either:
    return Either(options)


@dataclass(frozen=True)
class MaybeCast(Pattern):
    """The operand of a cast, or the value itself. That there is no cast is no failure."""

    pattern: Pattern
    shared: bool

    def match(self, value: Value, env: Env, trail: Trail) -> Iterator[Env]:
        node = value.producer
        if node is not None and node.op == "aten.to.dtype":
            yield from self.pattern.match(next(node.inputs()), env.with_node(node, self.shared), trail)
        yield from self.pattern.match(value, env, trail)


def cast_of(pattern: Pattern, *, shared: bool = False) -> MaybeCast:
    """`pattern`, or a cast of it."""
    return MaybeCast(pattern, shared)


@dataclass(frozen=True)
class Called(Pattern):
    """`pattern`, whose value must be the same in every place of this name."""

    name: str
    pattern: Pattern

    def match(self, value: Value, env: Env, trail: Trail) -> Iterator[Env]:
        for extended in Bind(self.name).match(value, env, trail):
            yield from self.pattern.match(value, extended, trail)


def called(name: str, pattern: Pattern) -> Called:
    """Names the value that `pattern` matches, for a pattern that meets one value in several places."""
    return Called(name, pattern)


def same_attr(actual: Any, wanted: Any) -> bool:
    """Equality of attributes that keeps booleans and numbers apart."""
    return actual == wanted and isinstance(actual, bool) == isinstance(wanted, bool)


def _describe(value: Value) -> str:
    if value.producer is not None:
        return value.producer.op
    return f"parameter %{value.name}" if isinstance(value, Param) else f"input %{value.name}"
