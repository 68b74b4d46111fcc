"""A transformers configuration from GGUF metadata, by transformers' own table of field names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.ir.errors import ModelError

_MODEL_TYPES = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gemma3": "gemma3_text"}


def gguf_config(metadata: Mapping[str, Any], tied: bool, where: str) -> Any:
    """The configuration object. Raises ModelError for an architecture that transformers' table lacks."""
    from transformers import AutoConfig
    from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING

    architecture = str(metadata["general.architecture"])
    model_type = _MODEL_TYPES.get(architecture, architecture)
    fields = GGUF_CONFIG_MAPPING.get(model_type) or GGUF_CONFIG_MAPPING.get(architecture)
    if fields is None:
        raise ModelError(
            f"{where}: transformers has no table of GGUF fields for architecture {architecture!r}"
        )
    values: dict[str, Any] = dict(GGUF_CONFIG_DEFAULTS_MAPPING.get(model_type, {}))
    values |= {
        name: metadata[f"{architecture}.{key}"]
        for key, name in fields.items()
        if name and f"{architecture}.{key}" in metadata
    }
    values["tie_word_embeddings"] = tied
    values.setdefault("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())) or None)
    for name, key in {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}.items():
        if f"tokenizer.ggml.{key}_token_id" in metadata:
            values[name] = metadata[f"tokenizer.ggml.{key}_token_id"]
    config = AutoConfig.for_model(model_type, **{k: v for k, v in values.items() if v is not None})
    config.architectures = None
    return config
