"""The verifier guards effects: a state is written once, a collective is not repeated, and a rewrite loses neither."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from treadle.ir.build import make_node
from treadle.ir.effects import Effects, effects_of
from treadle.ir.errors import VerifyError
from treadle.ir.graph import Graph
from treadle.ir.ops import registry
from treadle.ir.text import parse_graph
from treadle.ir.verify import verify

TEXT = """graph @g(T in 1..64) {
  input %q: f32[T,4,8]
  input %k: f32[T,2,8]
  input %kv.0: kv<2,8>
  input %kv.1: kv<2,8>
  input %batch: batch
  %a: f32[T,4,8] = attention(%q, %k, %k, %kv.0, %batch, layer=0, scale=1.0)
  %s: f32[T,4,8] = sum_of_ranks(%a, world=2)
  %b: f32[T,4,8] = attention(%s, %k, %k, %kv.1, %batch, layer=1, scale=1.0)
  %t: f32[T,4,8] = sum_of_ranks(%b, world=2)
  return %t
}
"""


@pytest.fixture(autouse=True)
def collective(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An op of this file that is a collective."""
    monkeypatch.setattr(registry, "_DIALECT", registry.dialect())
    registry.get_op.cache_clear()

    @registry.op("sum_of_ranks(Tensor x, *, int world) -> Tensor", collective=True)
    def sum_of_ranks(x: torch.Tensor, *, world: int) -> torch.Tensor:
        """For tests."""
        return x * world

    yield
    monkeypatch.undo()
    registry.get_op.cache_clear()


def _swap(graph: Graph, node: int) -> None:
    """The node passes on its first operand: it is taken out."""
    dead = graph.nodes[node]
    graph.replace_uses({dead.result: next(dead.inputs())})
    graph.erase([dead])


def drop_attention(graph: Graph) -> None:
    _swap(graph, 0)


def drop_the_cache(graph: Graph) -> None:
    del graph.nodes[0].operands["cache"]


def drop_the_batch(graph: Graph) -> None:
    for node in (graph.nodes[0], graph.nodes[2]):
        del node.operands["batch"]


def drop_a_collective(graph: Graph) -> None:
    _swap(graph, 1)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (drop_attention, "nothing writes the state %kv.0 any more"),
        (drop_the_cache, "nothing writes the state %kv.0 any more"),
        (drop_the_batch, "nothing reads the state %batch any more"),
        (drop_a_collective, "there were 2 collectives and 1 are left"),
    ],
)
def test_a_lost_effect(change: Callable[[Graph], None], problem: str) -> None:
    """C09-11: types are right and every value is defined, yet the rewrite is refused, by the pass's name."""
    graph = parse_graph(TEXT)
    before = effects_of(graph)
    verify(graph, after="nothing", before=before)
    change(graph)
    verify(graph)
    with pytest.raises(VerifyError, match=f"graph g after lossy: an effect is lost: {problem}"):
        verify(graph, after="lossy", before=before)


def write_twice(graph: Graph) -> None:
    graph.nodes[2].operands["cache"] = graph.inputs[2]


def _repeat(graph: Graph, index: int, at: int, **swaps: Any) -> None:
    node = graph.nodes[index]
    twin = make_node(graph, node.op, *(swaps.get(n, v) for n, v in node.operands.items()), **node.attrs)
    graph.nodes.insert(at, twin)


def attend_again(graph: Graph) -> None:
    _repeat(graph, 0, 1)


def reduce_again(graph: Graph) -> None:
    _repeat(graph, 1, 2)


def reduce_the_sum(graph: Graph) -> None:
    _repeat(graph, 1, 2, x=graph.nodes[1].result)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (write_twice, "%kv.0 has been written by %a already"),
        (attend_again, "%kv.0 has been written by %a already"),
        (reduce_again, "%s is the same sum_of_ranks of the same values already"),
        (reduce_the_sum, "%s is the result of the same sum_of_ranks already"),
    ],
)
def test_a_repeated_effect(change: Callable[[Graph], None], problem: str) -> None:
    """Doing an effect twice is wrong in any graph, whatever was there before."""
    graph = parse_graph(TEXT)
    change(graph)
    with pytest.raises(VerifyError, match=f"after eager: an effect is done twice: {problem}"):
        verify(graph, after="eager")


def test_effects_are_what_the_ops_declare() -> None:
    assert effects_of(parse_graph(TEXT)) == Effects(frozenset({"batch"}), frozenset({"kv.0", "kv.1"}), 2)
