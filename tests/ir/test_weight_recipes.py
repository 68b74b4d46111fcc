"""Recipes: text form, evaluation, and transformers' conversion mapping read as recipes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ir.families import save_model
from treadle.ir.errors import ModelError
from treadle.ir.source import open_source
from treadle.ir.sources.convert_names import _apply, checkpoint_recipes, nearest_names, recipe_shape
from treadle.ir.types import DTYPES, TensorType, tensor
from treadle.ir.weights import (
    AddScalar,
    Cast,
    Concat,
    Literal,
    Load,
    Recipe,
    Reshape,
    Slice,
    Stack,
    Transpose,
    UnpermuteRope,
    parse_recipe,
)

STORE = {
    "a": torch.arange(24.0).reshape(4, 6),
    "b": torch.arange(24.0, 48.0).reshape(4, 6),
    "c": torch.ones(4),
}
TYPES: dict[str, TensorType] = {name: tensor("f32", tuple(value.shape)) for name, value in STORE.items()}

_names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=12) | st.just('q"\\')
_numbers = st.floats(width=32, allow_nan=False)
_literals = st.lists(_numbers, max_size=4).map(lambda v: Literal(DTYPES["f32"], (len(v),), tuple(v)))
_dims = st.integers(-3, 3)


def _grown(inner: st.SearchStrategy[Recipe]) -> st.SearchStrategy[Recipe]:
    many = st.lists(inner, min_size=1, max_size=3).map(tuple)
    return (
        st.builds(Concat, many, _dims)
        | st.builds(Stack, many, _dims)
        | st.builds(Slice, inner, _dims, st.integers(0, 9), st.integers(0, 99))
        | st.builds(Transpose, inner, _dims, _dims)
        | st.builds(Reshape, inner, st.lists(st.integers(1, 9), max_size=3).map(tuple))
        | st.builds(AddScalar, inner, _numbers)
        | st.builds(UnpermuteRope, inner, st.integers(1, 64))
        | st.builds(Cast, inner, st.sampled_from(sorted(DTYPES.values())))
    )


recipes = st.recursive(st.builds(Load, _names) | _literals, _grown, max_leaves=8)


@given(recipes)
def test_text_form_round_trips(recipe: Recipe) -> None:
    """Any recipe prints on one line and parses back to an equal one."""
    text = str(recipe)
    assert "\n" not in text
    assert parse_recipe(text) == recipe


@pytest.mark.parametrize(
    "text", ["load(", "steal('x')", "load('x') + 1", "concat(__import__('os'))", "1 if x else 2"]
)
def test_other_text_is_refused(text: str) -> None:
    """Nothing is evaluated: only recipes are read."""
    with pytest.raises(ModelError):
        recipe = parse_recipe(text)
        assert isinstance(recipe, Recipe)


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (Concat((Load("a"), Load("b")), 0), torch.cat([STORE["a"], STORE["b"]])),
        (Stack((Load("a"), Load("b")), 1), torch.stack([STORE["a"], STORE["b"]], 1)),
        (Slice(Load("a"), 1, 2, 5), STORE["a"][:, 2:5]),
        (Transpose(Load("a")), STORE["a"].T),
        (Reshape(Load("a"), (2, 12)), STORE["a"].reshape(2, 12)),
        (AddScalar(Load("c"), -1.0), torch.zeros(4)),
        (Cast(Load("c"), DTYPES["bf16"]), torch.ones(4, dtype=torch.bfloat16)),
        (Literal.of(torch.tensor([[1, 2], [3, 4]])), torch.tensor([[1, 2], [3, 4]])),
    ],
)
def test_evaluation(recipe: Recipe, expected: torch.Tensor) -> None:
    actual = recipe.evaluate(STORE.__getitem__)
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected)
    assert recipe_shape(recipe, TYPES) == tuple(expected.shape)


def test_unpermute_rope_undoes_the_converter() -> None:
    """llama.cpp interleaves the two halves of each head's rows; the recipe puts them back."""
    weight = torch.arange(2 * 8 * 3.0).reshape(16, 3)
    stored = weight.reshape(2, 2, 4, 3).swapaxes(1, 2).reshape(16, 3)
    assert torch.equal(UnpermuteRope(Load("w"), 2).evaluate(lambda name: stored), weight)


def test_sources_are_listed_in_order() -> None:
    recipe = Concat(
        (Stack((Load("x"), Load("y"))), Slice(Load("x"), 0, 0, 1), Literal(DTYPES["f32"], (0,), ()))
    )
    assert list(recipe.sources()) == ["x", "y", "x"]


@dataclass
class Converter:
    source_patterns: list[str]
    target_patterns: list[str]
    operations: tuple[Any, ...] = ()


def test_chunk_becomes_slices() -> None:
    """A fused tensor that the model holds in parts."""
    from transformers.core_model_loading import Chunk

    converter = Converter(["qkv"], ["q", "k"])
    parts = _apply(Chunk(dim=1), {"qkv": [Load("a")]}, converter, None, TYPES)
    assert parts == {"q": [Slice(Load("a"), 1, 0, 3)], "k": [Slice(Load("a"), 1, 3, 6)]}


def test_conversion_without_a_recipe_is_named() -> None:
    from transformers.core_model_loading import Interleave

    with pytest.raises(ModelError, match=r"Interleave.*gate_up -> fused"):
        _apply(Interleave(dim=0), {"gate_up": [Load("a")]}, Converter(["gate_up"], ["fused"]), None, TYPES)


def test_expert_tensors_are_stacked_in_number_order(tmp_path: Path) -> None:
    """Eleven experts: expert 10 comes after 9, not after 1."""
    save_model("mixtral", tmp_path, num_local_experts=11)
    source = open_source(tmp_path)
    model = source.build(torch.float32)
    recipe = checkpoint_recipes(model, source.tensors)["model.layers.0.mlp.experts.down_proj"]
    numbers = [int(name.split("experts.")[1].split(".")[0]) for name in recipe.sources()]
    assert numbers == list(range(11))


def test_nearest_names_stay_in_the_layer() -> None:
    names = dict.fromkeys(["m.0.up.w", "m.1.upp.w", "m.1.down.w", "other"])
    assert nearest_names("m.1.up.w", names)[0] == "m.1.upp.w"
