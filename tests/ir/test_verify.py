"""The verifier: one broken graph for each rule. And inference and hashing, which it and the passes stand on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from treadle.ir.build import make_node
from treadle.ir.errors import VerifyError
from treadle.ir.graph import Graph, Node, Value
from treadle.ir.hashing import canonical_text, structural_hash
from treadle.ir.infer import infer
from treadle.ir.interpret import as_module, run
from treadle.ir.ops.registry import dialect, get_op, op
from treadle.ir.text import parse_graph
from treadle.ir.types import T, tensor
from treadle.ir.verify import verify
from treadle.ir.weights import Load

TEXT = """graph @g(T in 1..64) {
  input %x: f32[T,4]
  param %w: f32[8,4] = load("layer.3.w")
  %h: f32[T,8] = linear(%x, %w)   // layers.3 | model.py:7
  %a, %b: f32[T,8], f32[T,8] = add_rms_norm(%h, %h, eps=1e-05)
  return %a, %b
}
"""


def good() -> Graph:
    return parse_graph(TEXT)


def swap_order(graph: Graph) -> None:
    graph.nodes.reverse()


def repeat_name(graph: Graph) -> None:
    graph.nodes[1].results[0].name = "h"


def wrong_type(graph: Graph) -> None:
    graph.nodes[0].result.type = tensor("f32", (T, 9))


def wrong_dtype(graph: Graph) -> None:
    graph.params[0].type = tensor("bf16", (8, 4))


def unknown_op(graph: Graph) -> None:
    graph.nodes[0].op = "lineer"


def unknown_argument(graph: Graph) -> None:
    graph.nodes[0].attrs["bais"] = 1


def missing_operand(graph: Graph) -> None:
    del graph.nodes[0].operands["weight"]


def missing_attribute(graph: Graph) -> None:
    graph.nodes[1].attrs.clear()


def stray_output(graph: Graph) -> None:
    graph.outputs.append(Value("elsewhere", tensor("f32", (T, 4))))


def wrong_producer(graph: Graph) -> None:
    graph.nodes[0].result.producer = None


def too_few_results(graph: Graph) -> None:
    graph.nodes[1].results = graph.nodes[1].results[:1]
    graph.outputs.pop()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (swap_order, "%h is used before it is defined"),
        (repeat_name, "%h is defined twice"),
        (wrong_type, r"gives f32\[T,8\] but the results are declared as f32\[T,9\]"),
        (wrong_dtype, r"linear\(x: f32\[T,4\], weight: bf16\[8,4\]\) is not valid"),
        (unknown_op, "unknown op 'lineer'"),
        (unknown_argument, "linear has no argument 'bais'"),
        (missing_operand, "linear needs 'weight'"),
        (missing_attribute, "add_rms_norm needs 'eps'"),
        (stray_output, "output %elsewhere is not defined"),
        (wrong_producer, "%h does not name its producer"),
        (too_few_results, "but the results are declared as"),
    ],
)
def test_each_rule_has_its_message(damage: Callable[[Graph], None], message: str) -> None:
    graph = good()
    verify(graph)
    damage(graph)
    with pytest.raises(VerifyError, match=rf"(?s)after fuse_it.*{message}"):
        verify(graph, after="fuse_it")


def test_inference_knows_affine_sizes() -> None:
    x = Value("x", tensor("f32", (T, 4)))
    y = Value("y", tensor("f32", (2, 4)))
    assert [str(kind) for kind in infer("aten.cat.default", {"tensors": (x, x, y)}, {"dim": 0})] == [
        "f32[2*T + 2,4]"
    ]
    assert str(infer("aten.reshape.default", {"self": x}, {"shape": [T * 4]})[0]) == "f32[4*T]"


def test_inference_refuses_sizes_that_are_not_affine() -> None:
    x = Value("x", tensor("f32", (T, T)))
    with pytest.raises(VerifyError, match="not affine"):
        infer("aten.reshape.default", {"self": x}, {"shape": [-1]})


def test_make_node_orders_names_and_defaults() -> None:
    graph = good()
    node = make_node(graph, "rms_norm", graph.nodes[0].result, offset=0.0, eps=1e-5, names=["h"])
    assert node.attrs == {"eps": 1e-5}
    assert node.result.name == "h.1"
    assert str(node.result.type) == "f32[T,8]"


def test_hash_ignores_names_weights_and_sources() -> None:
    """Two layers that differ in names, checkpoint tensors and places are one piece."""
    graph = good()
    other = parse_graph(
        TEXT.replace("layer.3", "layer.9").replace("layers.3 | model.py:7", "z").replace("%h", "%q")
    )
    assert structural_hash(graph) == structural_hash(other)
    assert "layer" not in canonical_text(graph)


@pytest.mark.parametrize(
    "change",
    [
        ("1e-05", "1e-06"),
        ("(%h, %h,", "(%h, %h, scale_in_f32=True,"),
        ("return %a, %b", "return %b, %a"),
        ("64", "32"),
    ],
)
def test_hash_sees_what_is_computed(change: tuple[str, str]) -> None:
    assert structural_hash(parse_graph(TEXT.replace(*change))) != structural_hash(good())


def test_hashing_leaves_the_graph_alone() -> None:
    graph = good()
    structural_hash(graph)
    assert graph.params[0].recipe == Load("layer.3.w")
    verify(graph)


def test_graph_edits() -> None:
    """replace_uses follows chains, erase removes, insert_before keeps order, users lists each once."""
    graph = good()
    h = graph.nodes[0].result
    assert graph.users()[h] == [graph.nodes[1]]
    scaled = make_node(graph, "aten.mul.Tensor", h, other=2.0, names=["scaled"])
    graph.insert_before(graph.nodes[1], [scaled])
    graph.nodes[2].replace_operands(lambda value: scaled.result if value is h else value)
    verify(graph)
    again = make_node(graph, "aten.mul.Tensor", h, other=3.0, names=["again"])
    graph.insert_before(graph.nodes[1], [again])
    graph.replace_uses({scaled.result: again.result})
    graph.erase([scaled])
    verify(graph)
    assert [node.result.name for node in graph.nodes[:2]] == ["h", "again"]
    assert graph.fresh_name("h") == "h.1"


def test_graph_runs_as_a_module_that_export_accepts() -> None:
    graph = good()
    x, w = torch.randn(5, 4), torch.randn(8, 4)
    tokens = torch.export.Dim("T", min=1, max=64)
    program = torch.export.export(
        as_module(graph), (x, w), dynamic_shapes=(({0: tokens}, None),), strict=False
    )
    for a, b in zip(program.module()(x, w), run(graph, [x], [w]), strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(VerifyError, match="takes 1 inputs and 1 params"):
        run(graph, [x, x], [w])


def test_ops_are_registered_once() -> None:
    with pytest.raises(VerifyError, match="already registered"):
        op("linear(Tensor x) -> Tensor")(lambda x: x)
    assert get_op("attention").splits and not get_op("attention").pure
    assert get_op("aten.add.Tensor").tensors == ("self", "other")
    assert all(row.doc for row in dialect().values())


def test_node_operand_helpers() -> None:
    node: Node = good().nodes[0]
    assert node.operand("bias") is None
    assert [value.name for value in node.inputs()] == ["x", "w"]
