"""Small models with seeded random weights, one for each architecture the main job promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _SMALL | {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", _SMALL | {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", _SMALL),
    "qwen3": ("Qwen3Config", _SMALL | {"head_dim": 32}),
    "gemma2": (
        "Gemma2Config",
        _SMALL
        | {
            "head_dim": 32,
            "sliding_window": 8,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "num_hidden_layers": 4,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        _SMALL | {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 24, "num_hidden_layers": 4},
    ),
    "phi3": ("Phi3Config", _SMALL),
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": 320,
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 256,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "olmo2": ("Olmo2Config", _SMALL),
    "mixtral": ("MixtralConfig", _SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        _SMALL
        | {
            "head_dim": 32,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
        },
    ),
}

_ROPE = {"rope_theta": 500.0, "factor": 4.0}
_GPT = {"vocab_size": 320, "n_embd": 64, "n_layer": 3, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gptj": ("GPTJConfig", _GPT | {"n_positions": 256, "rotary_dim": 8}),
    "gpt_neox": ("GPTNeoXConfig", {k: v for k, v in _SMALL.items() if k != "num_key_value_heads"}),
    "llama_linear": ("LlamaConfig", _SMALL | {"rope_parameters": _ROPE | {"rope_type": "linear"}}),
    "llama_llama3": (
        "LlamaConfig",
        _SMALL
        | {
            "rope_parameters": _ROPE
            | {
                "rope_type": "llama3",
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "llama_yarn": (
        "LlamaConfig",
        _SMALL | {"rope_parameters": _ROPE | {"rope_type": "yarn", "original_max_position_embeddings": 64}},
    ),
    "gemma_erf": ("Gemma2Config", _SMALL | {"head_dim": 16, "hidden_activation": "gelu", "sliding_window": 8}),
    "gemma_new": ("GemmaConfig", _SMALL | {"head_dim": 16, "hidden_act": "gelu_new"}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        _SMALL
        | {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        _SMALL
        | {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 48,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": None,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
    ),
}
"""Configurations that differ in one thing (rotation, activation, routing): traced and fused, not compiled in tests."""


def make_config(name: str, **changes: Any) -> Any:
    """The configuration of a small model; `changes` override its fields."""
    import transformers

    cls, settings = (ARCHITECTURES | VARIANTS)[name]
    return getattr(transformers, cls)(**(settings | changes))


def make_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """The transformers model in float32 with weights drawn so that logits differ clearly between tokens."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(make_config(name, **changes), dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.12)
            elif "norm" in parameter_name or "ln_" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.normal_(0.0, 0.05)
    return model.eval()


def save_model(name: str, folder: Path, seed: int = 0, **changes: Any) -> Any:
    """Makes the model, saves it as a Hugging Face folder, and returns it."""
    model = make_model(name, seed, **changes)
    model.save_pretrained(folder)
    return model
