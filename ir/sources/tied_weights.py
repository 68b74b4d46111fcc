"""Parameters that share one tensor: which name stands for them, and which only claim to be shared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from treadle.ir.source import ModelSource
from treadle.ir.weights import Recipe


def canonical_names(model: nn.Module, recipes: Mapping[str, Recipe]) -> dict[str, str]:
    """For every parameter name, the name of its tied group: the first one the checkpoint has."""
    names = {}
    for group in _tied_groups(model):
        chosen = next((name for name in group if name in recipes), group[0])
        names.update(dict.fromkeys(group, chosen))
    return names


def untie_different(model: nn.Module, recipes: Mapping[str, Recipe], source: ModelSource) -> None:
    """Separates tied parameters for which the checkpoint holds different values, as transformers does."""
    for group in _tied_groups(model):
        stored = [name for name in group if name in recipes]
        for name in stored[1:]:
            if recipes[name] != recipes[stored[0]] and not _equal(recipes[stored[0]], recipes[name], source):
                parent, _, leaf = name.rpartition(".")
                owner = model.get_submodule(parent)
                kept = getattr(owner, leaf)
                setattr(owner, leaf, nn.Parameter(torch.empty_like(kept), requires_grad=False))


def _equal(a: Recipe, b: Recipe, source: ModelSource) -> bool:
    return torch.equal(a.evaluate(source.read), b.evaluate(source.read))


def _tied_groups(model: nn.Module) -> Iterator[list[str]]:
    groups: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups[id(parameter)].append(name)
    return (group for group in groups.values() if len(group) > 1)
