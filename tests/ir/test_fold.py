"""Folded text: equal layers print once, and expanding gives a graph that computes the same."""

from __future__ import annotations

import pytest

from treadle.ir.errors import VerifyError
from treadle.ir.fold import fold_text
from treadle.ir.hashing import structural_hash
from treadle.ir.repeat_text import expand_text
from treadle.ir.text import parse_graph, print_graph
from treadle.ir.verify import verify

LAYER = """  %add{n}: f32[T,4] = aten.add.Tensor(%{x}, %{x})   // layers.{i}.mlp | model.py:3
  %mul{n}: f32[T,4] = aten.mul.Tensor(%add{n}, %layers.{i}.w)   // layers.{i}.mlp | model.py:4
"""


def stack(layers: int, **changes: str) -> str:
    """A graph of equal layers; `changes` replaces words in the last one."""
    body = ""
    for i in range(layers):
        n, x = (f".{i}" if i else ""), ("x2" if i == 0 else f"mul.{i - 1}" if i > 1 else "mul")
        part = LAYER.format(n=n, i=i, x=x)
        for old, new in changes.items() if i == layers - 1 else ():
            part = part.replace(old, new)
        body += part
    last = f"mul.{layers - 1}" if layers > 1 else "mul"
    params = "".join(f'  param %layers.{i}.w: f32[4] = load("layers.{i}.w")\n' for i in range(layers))
    head = "graph @g(T in 1..64) {\n  input %x: f32[T,4]\n" + params
    return f"{head}  %x2: f32[T,4] = aten.abs.default(%x)   // embed | model.py:1\n{body}  return %{last}\n}}\n"


FOLDED = """graph @g(T in 1..64) {
  input %x: f32[T,4]
  repeat i in 0..4 {
    param %layers.{i}.w: f32[4] = load("layers.{i}.w")
  }
  %L0.mul: f32[T,4] = aten.abs.default(%x)   // embed | model.py:1
  repeat i in 0..4 {
    %L{i}.add: f32[T,4] = aten.add.Tensor(%L{i}.mul, %L{i}.mul)   // layers.{i}.mlp | model.py:3
    %L{i+1}.mul: f32[T,4] = aten.mul.Tensor(%L{i}.add, %layers.{i}.w)   // layers.{i}.mlp | model.py:4
  }
  return %L5.mul
}
"""


def test_equal_layers_print_once() -> None:
    """What a layer makes is named by its number; what the next layer reads counts as the next one's."""
    assert fold_text(stack(5)) == FOLDED
    graph = parse_graph(FOLDED)
    verify(graph)
    assert structural_hash(graph) == structural_hash(parse_graph(stack(5)))
    assert [param.name for param in graph.params] == [f"layers.{i}.w" for i in range(5)]
    assert print_graph(graph) == expand_text(FOLDED)


def test_folding_folded_text_changes_nothing() -> None:
    assert fold_text(FOLDED) == FOLDED == fold_text(expand_text(FOLDED))


@pytest.mark.parametrize(
    "changes",
    [{"aten.add": "aten.sub"}, {"layers.4.w": "layers.3.w"}, {"model.py:4": "model.py:9"}, {"mul.3, %mul.3": "mul.3, %x"}],
)
def test_a_layer_that_differs_stays_apart(changes: dict[str, str]) -> None:
    """Another op, weight, line of source or operand: the layer is printed in full, and nothing is lost."""
    text = stack(5, **changes)
    folded = fold_text(text)
    assert "repeat i in 0..3 {\n    %L{i}.add" in folded
    assert structural_hash(parse_graph(folded)) == structural_hash(parse_graph(text))


def test_two_layers_alternate() -> None:
    """Layers of two kinds fold two at a time, with a step."""
    text = stack(6)
    for i in (1, 3, 5):
        text = text.replace(f"= aten.mul.Tensor(%add.{i},", f"= aten.div.Tensor(%add.{i},")
    folded = fold_text(text)
    assert "repeat i in 0..4 step 2 {\n    %L{i}.add" in folded and "%layers.{i+1}.w" in folded
    assert structural_hash(parse_graph(folded)) == structural_hash(parse_graph(text))


def test_a_value_of_every_layer_can_be_returned() -> None:
    text = stack(4).replace("return %mul.3", "return %mul.3, %mul.1, %add, %x2")
    folded = fold_text(text)
    assert "return %L4.mul, %L2.mul, %L0.add, %L0.mul" in folded
    assert structural_hash(parse_graph(folded)) == structural_hash(parse_graph(text))


def test_names_of_the_rule_that_are_taken() -> None:
    """A graph that uses such a name for something else is left as it is."""
    clash = stack(4).replace("  return", "  %L3.add: f32[T,4] = aten.abs.default(%x)   // head | model.py:9\n  return")
    assert fold_text(clash) == clash


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (FOLDED.replace("0..4", "4..0", 1), "line 3: a repeat needs a rising range"),
        (FOLDED.replace("repeat i in", "repeat j in", 1), "line 3: expected `repeat i in"),
        (FOLDED.replace("L{i}.mul, ", "L{i-1}.mul, "), r"line 8: \{i-1\} is -1 for i = 0"),
        (FOLDED.replace("    %L{i}.add:", "    repeat i in 0..1 {\n    %L{i}.add:"), "line 8: a repeat cannot stand in a repeat"),
        (FOLDED.split("  }\n")[0], "line 3: the repeat is never closed"),
        (FOLDED.replace("L{i+1}.mul", "L{i+1}.mal"), "line 8: %L1.mul is not defined"),
    ],
)
def test_wrong_blocks_name_their_line(wrong: str, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        parse_graph(wrong)
