"""From checkpoint names to parameter names: transformers' conversion mapping, read as weight recipes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from treadle.ir.errors import ModelError
from treadle.ir.types import TensorType
from treadle.ir.weights import Concat, Load, Recipe, Slice, Stack, Transpose, UnpermuteRope

Collected = dict[str, list[Recipe]]


def checkpoint_recipes(model: Any, tensors: Mapping[str, TensorType]) -> dict[str, Recipe]:
    """For each parameter (or persistent buffer) of a transformers model that the checkpoint fills, its recipe.

    Raises ModelError for a conversion that has no recipe, naming it.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    wanted = model.state_dict()
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    recipes: dict[str, Recipe] = {}
    groups: dict[str, Collected] = defaultdict(lambda: defaultdict(list))
    owners: dict[str, Any] = {}
    for name in sorted(tensors, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, wanted)
        if renamed not in wanted and name in wanted:
            renamed, pattern = name, None
        if renamed not in wanted:
            continue
        if pattern is None:
            recipes[renamed] = Load(name)
        else:
            groups[renamed][pattern].append(Load(name))
            owners[renamed] = by_pattern[pattern]
    for first_target, collected in groups.items():
        recipes.update(_converted(owners[first_target], first_target, dict(collected), model, tensors))
    return recipes


def _converted(
    converter: Any, first_target: str, collected: Collected, model: Any, tensors: Mapping[str, TensorType]
) -> dict[str, Recipe]:
    """Runs a converter's operations on recipes: source patterns in, full parameter names out."""
    ordered = {p: collected[p] for p in converter.source_patterns if p in collected}
    state: dict[str, list[Recipe]] = ordered
    for operation in converter.operations:
        state = _apply(operation, state, converter, model, tensors)
    first = converter.target_patterns[0]
    return {first_target.replace(first, target, 1): recipes[0] for target, recipes in state.items()}


def _apply(
    operation: Any, state: Collected, converter: Any, model: Any, tensors: Mapping[str, TensorType]
) -> Collected:
    kind, targets = type(operation).__name__, converter.target_patterns
    parts = [recipe for recipes in state.values() for recipe in recipes]
    match kind:
        case "MergeModulelist":
            merged: Collected = {
                pattern: [Stack(tuple(recipes), operation.dim)] for pattern, recipes in state.items()
            }
            return {targets[0]: next(iter(merged.values()))} if len(merged) == 1 == len(targets) else merged
        case "Concatenate":
            return {targets[0]: [Concat(tuple(parts), operation.dim)]}
        case "Transpose" if not operation.check_dims:
            name = targets[0] if len(targets) == 1 else next(iter(state))
            return {name: [Transpose(parts[0], operation.dim0, operation.dim1)]}
        case "Chunk":
            size = recipe_shape(parts[0], tensors)[operation.dim] // len(targets)
            cuts = (Slice(parts[0], operation.dim, i * size, (i + 1) * size) for i in range(len(targets)))
            return {target: [cut] for target, cut in zip(targets, cuts, strict=True)}
        case "PermuteForRope" if not operation.inverse and operation.permute_layer_names is None:
            heads = getattr(model.config, "num_attention_heads", 1)
            names = targets if len(targets) == len(state) == 1 else list(state)
            return {name: [UnpermuteRope(part, heads)] for name, part in zip(names, parts, strict=True)}
    raise ModelError(
        f"the checkpoint needs transformers' weight conversion {operation!r} "
        f"({', '.join(converter.source_patterns)} -> {', '.join(targets)}), which has no weight recipe here"
    )


def recipe_shape(recipe: Recipe, tensors: Mapping[str, TensorType]) -> tuple[int, ...]:
    """The shape a recipe gives, from the shapes of the checkpoint tensors."""

    def read(name: str) -> torch.Tensor:
        kind = tensors[name]
        return torch.empty(kind.at(1), dtype=kind.dtype.torch, device="meta")

    return tuple(recipe.evaluate(read).shape)


def nearest_names(name: str, names: Mapping[str, Any], count: int = 3) -> list[str]:
    """Checkpoint names most like a parameter's, for an error message."""
    import difflib

    same_layer = re.findall(r"\.\d+\.", name)
    pool = [n for n in names if re.findall(r"\.\d+\.", n) == same_layer] or list(names)
    return difflib.get_close_matches(name, pool[:4000], n=count, cutoff=0.3)
