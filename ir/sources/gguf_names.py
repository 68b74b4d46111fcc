"""From GGUF tensor names and layouts to parameters, by the name map of gguf-py and a rule for each architecture.

The rules undo what llama.cpp's converter does to a model's tensors (convert_hf_to_gguf.py in its repository).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from treadle.ir.errors import ModelError
from treadle.ir.types import TensorType
from treadle.ir.weights import AddScalar, Concat, Load, Recipe, Reshape, Transpose, UnpermuteRope

Rule = Callable[[str, Recipe, Any, TensorType], Recipe]


def _as_stored(name: str, recipe: Recipe, config: Any, kind: TensorType) -> Recipe:
    return recipe


def _permuted_rope(name: str, recipe: Recipe, config: Any, kind: TensorType) -> Recipe:
    if ".attn_q." in name:
        return UnpermuteRope(recipe, config.num_attention_heads)
    if ".attn_k." in name:
        return UnpermuteRope(recipe, config.num_key_value_heads)
    return recipe


def _norms_plus_one(name: str, recipe: Recipe, config: Any, kind: TensorType) -> Recipe:
    return AddScalar(recipe, -1.0) if "norm.weight" in name else recipe


def _transposed_products(name: str, recipe: Recipe, config: Any, kind: TensorType) -> Recipe:
    products = (".attn_qkv.weight", ".attn_output.weight", ".ffn_up.weight", ".ffn_down.weight")
    return Transpose(recipe) if name.endswith(products) else recipe


def _shared_expert_row(name: str, recipe: Recipe, config: Any, kind: TensorType) -> Recipe:
    return (
        Reshape(recipe, (1, *kind.at(1))) if "ffn_gate_inp_shexp" in name and len(kind.shape) == 1 else recipe
    )


RULES: dict[str, Rule] = {
    "llama": _permuted_rope,
    "qwen2": _as_stored,
    "qwen3": _as_stored,
    "qwen2moe": _shared_expert_row,
    "qwen3moe": _shared_expert_row,
    "gemma2": _norms_plus_one,
    "gemma3": _norms_plus_one,
    "phi3": _as_stored,
    "gpt2": _transposed_products,
    "nemotron": _norms_plus_one,
    "starcoder2": _as_stored,
    "stablelm": _as_stored,
}


def check_architecture(architecture: str, where: str) -> None:
    """Raises ModelError for an architecture without a rule."""
    if architecture not in RULES:
        raise ModelError(
            f"{where}: GGUF architecture {architecture!r} is not known; known: {', '.join(sorted(RULES))}"
        )


def gguf_recipes(
    architecture: str, names: Iterable[str], config: Any, tensors: Mapping[str, TensorType]
) -> dict[str, Recipe]:
    """For each of the model's parameter names that the file fills, its recipe."""
    import gguf

    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    name_map = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    rule = RULES[architecture]

    def stored(base: str | None, suffix: str) -> Recipe | None:
        name = f"{base}{suffix}"
        return rule(name, Load(name), config, tensors[name]) if name in tensors else None

    recipes: dict[str, Recipe] = {}
    for name in names:
        base, _, leaf = name.rpartition(".")
        suffix = f".{leaf}" if leaf in ("weight", "bias") else ""
        module = base if suffix else name
        if module.endswith(".experts.gate_up_proj"):
            recipe = _gate_up(name_map.get_name(module.replace("gate_up_proj", "down_proj")), stored)
        else:
            recipe = stored(name_map.get_name(module), suffix or ".weight")
        if recipe is not None:
            recipes[name] = recipe
    return recipes


def _gate_up(down: str | None, stored: Callable[[str | None, str], Recipe | None]) -> Recipe | None:
    """Experts' gate and up projections, separate in the file, one above the other in the model."""
    block = str(down).replace("ffn_down_exps", "ffn_{}_exps")
    parts = [stored(block.format(part), ".weight") for part in ("gate", "up")]
    return Concat(tuple(part for part in parts if part is not None), dim=1) if all(parts) else None
