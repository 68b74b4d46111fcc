"""Tiny models with seeded random weights, one for each architecture that must be served exactly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

VOCAB = 128
WINDOW = 5
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}


@dataclass(frozen=True)
class Family:
    """A configuration class with its settings, and the window each layer must have."""

    config: str
    settings: dict[str, Any]
    windows: tuple[int | None, ...] = (None, None)


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaConfig", _COMMON | {"tie_word_embeddings": True}),
    "llama3_rope": Family(
        "LlamaConfig",
        _COMMON
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "mistral": Family("MistralConfig", _COMMON | {"sliding_window": WINDOW}, (WINDOW, WINDOW)),
    "qwen2": Family(
        "Qwen2Config",
        _COMMON | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        (None, WINDOW),
    ),
    "qwen3": Family("Qwen3Config", _COMMON | {"head_dim": 24}),
    "gemma2": Family(
        "Gemma2Config",
        _COMMON
        | _ALTERNATING
        | {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
        (WINDOW, None),
    ),
    "gemma3": Family("Gemma3TextConfig", _COMMON | _ALTERNATING | {"head_dim": 16}, (WINDOW, None)),
    "phi3": Family("Phi3Config", _COMMON | {"sliding_window": WINDOW}, (WINDOW, WINDOW)),
    "gpt2": Family(
        "GPT2Config", {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
    ),
    "olmo2": Family("Olmo2Config", _COMMON),
    "mixtral": Family("MixtralConfig", _COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": Family(
        "Qwen3MoeConfig",
        _COMMON
        | {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
        },
    ),
}


def make_model(name: str, **changes: Any) -> Any:
    """The transformers model of a family in float32, with weights that make every layer matter."""
    import transformers

    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**(family.settings | changes))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def save_model(name: str, folder: Path, **changes: Any) -> Any:
    """Writes a family's model as a Hugging Face folder and returns it."""
    model = make_model(name, **changes)
    model.save_pretrained(folder)
    return model
