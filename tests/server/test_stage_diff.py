"""Side by side stages: equal layers fold, renamed lines are the same, changes pair by model source."""

from __future__ import annotations

from treadle.server.stage_diff import diff_stages, fold_layers, normal


def _layer(number: int, op: str = "linear") -> str:
    return (
        f"  %a.{number}: f32[T,8] = {op}(%x.{number}, %model.layers.{number}.w)   // model.layers.{number}.mlp | m.py:3\n"
        f"  %b.{number}: f32[T,8] = aten.neg.default(%a.{number})   // model.layers.{number}.mlp | m.py:4\n"
    )


def _graph(layers: int, op: str = "linear") -> str:
    return "graph @g(T in 1..8) {\n  input %x: f32[T,8]\n" + "".join(_layer(n, op) for n in range(layers)) + "}\n"


def test_equal_layers_are_one_line() -> None:
    lines = fold_layers(_graph(30))
    assert [line.text for line in lines if line.fold] == [
        "layers 1 to 29 repeat what stands above, with other weights and names"
    ]
    assert len(lines) == len(fold_layers(_graph(3)))


def test_a_layer_that_differs_is_shown() -> None:
    text = _graph(3).replace("layers.1.mlp | m.py:4", "layers.1.mlp | m.py:9")
    assert not any(line.fold and "1 to 2" in line.text for line in fold_layers(text))
    assert any("m.py:9" in line.text for line in fold_layers(text))


def test_renumbered_lines_are_the_same() -> None:
    assert normal("%add.3: f32[T,8] = aten.add.Tensor(%mul.1, %kv.7)") == normal(
        "%add.9: f32[T,8] = aten.add.Tensor(%mul, %kv.2)"
    )
    rows = diff_stages(_graph(2), _graph(2).replace("%a.", "%a.1"))
    assert {row.change for row in rows} == {"same"}


def test_changes_pair_by_their_place_in_the_model() -> None:
    after = _graph(1).replace("aten.neg.default(%a.0)", "aten.neg.default(%x)")
    changed = [row for row in diff_stages(_graph(1), after) if row.change != "same"]
    assert [row.change for row in changed] == ["changed"]
    assert changed[0].left and "%a.0)" in changed[0].left.text
    assert changed[0].right and "%x)" in changed[0].right.text


def test_pieces_of_a_split_program_fold() -> None:
    pieces = "".join(f"graph @piece{n}(T in 1..8) {{\n{_layer(n)}}}\n" for n in range(4))
    lines = fold_layers(pieces + "program @g(T in 1..8) {\n  return %b\n}\n")
    assert [line.text.partition(" repeat")[0] for line in lines if line.fold] == ["pieces 1 to 3"]
