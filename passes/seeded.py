"""Seeded weights and inputs for a graph, so that every rewritten form of it can be run on the very same numbers.

Weights are drawn for the recipes of the traced graph; a rewritten graph's recipes are evaluated over those.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from treadle.ir.errors import VerifyError
from treadle.ir.graph import Graph, Param, Value
from treadle.ir.types import StateType, TensorType
from treadle.ir.weights import Literal, Load, Recipe, bind_rank

VECTOR_SPREAD = 0.1


class SeededWeights:
    """Weights by recipe. Equal recipes (tied weights) give equal tensors; each tensor is made once and shared."""

    def __init__(self, traced: Graph, seed: int):
        self._drawn: dict[Recipe, torch.Tensor] = {}
        self._made: dict[Recipe, torch.Tensor] = {}
        for param in traced.params:
            if not isinstance(param.recipe, Literal) and param.recipe not in self._drawn:
                self._drawn[param.recipe] = draw(param, _generator(seed, str(param.recipe)))
        self._names = {recipe: str(number) for number, recipe in enumerate(self._drawn)}
        self._by_name = dict(zip(self._names.values(), self._drawn.values(), strict=True))

    def of(self, params: Sequence[Param], rank: int | None = None) -> list[torch.Tensor]:
        """Contiguous tensors for the parameters of a rewritten graph, in order; of a graph cut over ranks, those of `rank`.

        Raises VerifyError for a recipe that reads what no parameter of the traced graph is made of.
        """
        return [self._tensor(param, param.recipe if rank is None else bind_rank(param.recipe, rank)) for param in params]

    def _tensor(self, param: Param, wanted: Recipe) -> torch.Tensor:
        if wanted not in self._made:
            recipe = self._rebase(wanted)
            try:
                self._made[wanted] = recipe.evaluate(self._by_name.__getitem__).contiguous()
            except KeyError as error:
                raise VerifyError(
                    f"weight %{param.name} reads {error.args[0]!r} in a way that the traced graph does not; "
                    "a pass may only combine whole weights of the traced graph"
                ) from error
        return self._made[wanted]

    def _rebase(self, recipe: Recipe) -> Recipe:
        """The recipe over drawn tensors: the largest parts that are a traced parameter's recipe become loads of them."""
        if recipe in self._names:
            return Load(self._names[recipe])
        changes: dict[str, Any] = {}
        for item in dataclasses.fields(recipe):
            part = getattr(recipe, item.name)
            if isinstance(part, Recipe):
                changes[item.name] = self._rebase(part)
            elif isinstance(part, tuple) and any(isinstance(one, Recipe) for one in part):
                changes[item.name] = tuple(self._rebase(one) if isinstance(one, Recipe) else one for one in part)
        return dataclasses.replace(recipe, **changes)


def draw(value: Value, generator: torch.Generator) -> torch.Tensor:
    """A weight of the value's type: matrices scaled by their width, vectors about 1, small integers."""
    assert isinstance(value.type, TensorType), f"%{value.name} is not a tensor"
    shape, dtype = value.type.at(1), value.type.dtype.torch
    if not dtype.is_floating_point:
        return torch.randint(0, 8, shape, generator=generator).to(dtype)
    numbers = torch.randn(shape, generator=generator)
    scaled = numbers * shape[-1] ** -0.5 if len(shape) > 1 else 1 + VECTOR_SPREAD * numbers
    return scaled.to(dtype)


def seeded_inputs(values: Sequence[Value], tokens: int, vocabulary: int, seed: int) -> dict[str, Any]:
    """Inputs of a whole model by name: random `input_ids` [T], counting positions and rows, None for state."""
    inputs: dict[str, Any] = {}
    for value in values:
        if isinstance(value.type, StateType):
            inputs[value.name] = None
        elif value.name == "input_ids":
            generator = _generator(seed, f"{value.name} {tokens}")
            inputs[value.name] = torch.randint(0, vocabulary, (tokens,), generator=generator)
        elif not value.type.dtype.torch.is_floating_point:
            inputs[value.name] = torch.arange(tokens).expand(value.type.at(tokens))
        else:
            drawn = torch.randn(value.type.at(tokens), generator=_generator(seed, value.name))
            inputs[value.name] = drawn.to(value.type.dtype.torch)
    return inputs


def pick(inputs: Mapping[str, Any], values: Sequence[Value]) -> list[Any]:
    """The inputs of a graph in its order."""
    return [inputs[value.name] for value in values]


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
