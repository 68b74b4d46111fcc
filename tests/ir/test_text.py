"""The text form: any graph prints, parses back to an equal one, and wrong text says where it is wrong."""

from __future__ import annotations

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.ir.build import make_node
from treadle.ir.errors import VerifyError
from treadle.ir.graph import Graph, Node, Param, Source, Value
from treadle.ir.hashing import structural_hash
from treadle.ir.interpret import run
from treadle.ir.text import attr_text, parse_dim, parse_graph, parse_type, print_graph
from treadle.ir.types import DTYPES, StateType, T, TensorType, affine, evaluate, tensor
from treadle.ir.verify import verify
from treadle.ir.weights import Load

WIDTH = 4


def random_graph(data: st.DataObject) -> Graph:
    """A straight-line graph over values f32[T,4], with ops of ours and of torch, several results, lists, attributes."""
    graph = Graph("random", inputs=[Value("x", tensor("f32", (T, WIDTH)))])
    graph.params = [
        Param("w", tensor("f32", (WIDTH, WIDTH)), recipe=Load("w")),
        Param("scale", tensor("f32", (WIDTH,)), recipe=Load("scale")),
    ]
    values: list[Value] = [graph.inputs[0]]
    pick = st.sampled_from
    for _ in range(data.draw(st.integers(1, 8))):
        a, b = data.draw(pick(values)), data.draw(pick(values))
        kind = data.draw(
            pick(["linear", "norm", "add_norm", "gate", "cat", "scale", "fold", "turn", "split"])
        )
        number = data.draw(st.floats(-3, 3, width=32))
        source = data.draw(
            pick([Source(), Source("layers.0.mlp"), Source("", "m.py:3"), Source("a.b", "m.py:12")])
        )

        def add(op: str, *operands: object, **attrs: object) -> Node:
            node = make_node(graph, op, *operands, source=source, **attrs)  # type: ignore[arg-type]  # noqa: B023
            graph.nodes.append(node)
            return node

        match kind:
            case "linear":
                values.append(add("linear", a, graph.params[0]).result)
            case "norm":
                values.append(add("rms_norm", a, graph.params[1], eps=1e-5, offset=number).result)
            case "add_norm":
                values.extend(add("add_rms_norm", a, b, eps=1e-6, scale_in_f32=number > 0).results)
            case "gate":
                values.append(
                    add("gated_act", a, b, act=data.draw(pick(["silu", "gelu_tanh", "relu"]))).result
                )
            case "cat":
                wide = add("aten.cat.default", [a, b], dim=-1).result
                values.append(add("aten.slice.Tensor", wide, dim=1, start=2, end=6).result)
            case "scale":
                values.append(add("aten.mul.Tensor", a, other=number).result)
            case "fold":
                flat = add("aten.reshape.default", a, shape=[T * WIDTH]).result
                values.append(add("aten.reshape.default", flat, shape=[T, WIDTH]).result)
            case "turn":
                turned = add("aten.transpose.int", a, dim0=0, dim1=1).result
                values.append(add("aten.transpose.int", turned, dim0=0, dim1=1).result)
            case "split":
                halves = add("split", a, sizes=[1, 3], dim=-1).results
                values.append(add("aten.cat.default", list(halves[::-1]), dim=-1).result)
    graph.outputs = data.draw(st.lists(pick(values), min_size=1, max_size=3))
    return graph


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_graphs_round_trip(data: st.DataObject) -> None:
    """Print, parse, print: the same text; and verify, hash, sources and results stay the same, bit for bit."""
    graph = random_graph(data)
    verify(graph)
    text = print_graph(graph)
    parsed = parse_graph(text)
    verify(parsed)
    assert print_graph(parsed) == text
    assert structural_hash(parsed) == structural_hash(graph)
    assert [node.source for node in parsed.nodes] == [node.source for node in graph.nodes]
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(p.type.at(1), generator=generator) for p in graph.params]  # type: ignore[union-attr]
    for tokens in (1, 5):
        x = torch.randn(tokens, WIDTH, generator=generator)
        for a, b in zip(run(graph, [x], params), run(parsed, [x], params), strict=True):
            assert torch.equal(a, b) or bool((a.isnan() == b.isnan()).all())


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_copies_are_equal_and_apart(data: st.DataObject) -> None:
    """A copy prints the same; changing it leaves the original alone."""
    graph = random_graph(data)
    text = print_graph(graph)
    twin = graph.copy()
    verify(twin)
    assert print_graph(twin) == text
    twin.nodes[0].attrs["extra"] = 1
    twin.nodes.pop()
    twin.params.clear()
    assert print_graph(graph) == text


GRAPH = """graph @g(T in 1..64) {
  input %x: f32[T,4]
  input %kv.0: kv<2,8>
  param %w: f32[4,4] = load("w")
  %y: f32[T,4] = linear(%x, %w)   // layers.0 | model.py:7
  return %y
}
"""


def test_example_reads_as_written() -> None:
    graph = parse_graph(GRAPH)
    verify(graph)
    assert print_graph(graph) == GRAPH
    assert graph.tokens == (1, 64)
    assert graph.nodes[0].source == Source("layers.0", "model.py:7")
    assert graph.inputs[1].type == StateType("kv", (2, 8))
    assert "//" not in print_graph(graph, sources=False)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("", "line 1"),
        ("graph g {", "line 1"),
        (GRAPH.replace("linear(%x, %w)", "linear(%x, %v)"), r"line 5: %v is not defined"),
        (GRAPH.replace("= linear", "= linaer"), "line 5: unknown op 'linaer'"),
        (GRAPH.replace("%y: f32", "%y: f33"), "line 5: unknown dtype 'f33'"),
        (GRAPH.replace("%y: f32", "%x: f32"), "line 5: %x is defined twice"),
        (GRAPH.replace("(%x, %w)", "(%x, %w, base=3)"), "line 5: linear has no argument 'base'"),
        (GRAPH.replace("return %y", "return %z"), "line 6: %z is not defined"),
        (GRAPH.replace("return", "reutrn"), "line 6: not an input"),
        (GRAPH.replace("[T,4]\n", "[exec,4]\n", 1), "line 2: .*not a dimension"),
        (GRAPH.replace('load("w")', "steal()"), "line 4: unknown weight recipe"),
    ],
)
def test_wrong_text_names_its_line(wrong: str, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        parse_graph(wrong)


@pytest.mark.parametrize("text", ["f32[T,576]", "bf16[]", "i64[2*T,3]", "f32[T + 1]", "kv<3,64>", "batch"])
def test_types_round_trip(text: str) -> None:
    assert str(parse_type(text)) == text


@pytest.mark.parametrize("text", ["f32(T)", "__import__('os')", "f32[T", "f32[S]", "f99[1]"])
def test_other_types_are_refused(text: str) -> None:
    with pytest.raises((VerifyError, SyntaxError)):
        parse_type(text)


@pytest.mark.parametrize(
    ("attr", "text"),
    [
        (1, "1"),
        (-0.5, "-0.5"),
        (float("inf"), "inf"),
        (True, "True"),
        (None, "None"),
        ("silu", "'silu'"),
        (DTYPES["bf16"], "bf16"),
        ([1, T * 2], "[1, 2*T]"),
        (T + 3, "T + 3"),
    ],
)
def test_attributes_print(attr: object, text: str) -> None:
    assert attr_text(attr) == text


@given(st.integers(0, 50), st.integers(-20, 50), st.integers(1, 500))
def test_dims_are_affine_in_t(slope: int, offset: int, tokens: int) -> None:
    """A dimension is found from three sizes, prints, parses back, and gives the size at any other count."""
    dim = affine({t: slope * t + offset for t in (13, 29, 53)})
    assert parse_dim(str(dim)) == dim
    assert evaluate(dim, tokens) == slope * tokens + offset


def test_dims_that_bend_are_refused() -> None:
    with pytest.raises(ValueError, match="not affine"):
        affine({13: 13 * 13, 29: 29 * 29, 53: 53 * 53})
    assert parse_dim("floor(T/2)") == sympy.floor(T / 2)
    assert isinstance(parse_type("f32[2]"), TensorType)
