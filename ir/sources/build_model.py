"""Builds a transformers model on the meta device, with attention and experts going to ops of ours."""

from __future__ import annotations

import copy
from typing import Any

import torch

from treadle.ir.errors import ModelError
from treadle.ir.trace_interfaces import IMPLEMENTATION, register_interfaces


def causal_class(config: Any, where: str) -> Any:
    """The causal language model class of a configuration, or ModelError."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"{where}: model type {config.model_type!r} has no causal language model in transformers; "
            "treadle serves decoder-only text models"
        )
    chosen = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return chosen[0] if isinstance(chosen, tuple | list) else chosen


def build_from_config(model_class: Any, config: Any, dtype: torch.dtype) -> torch.nn.Module:
    """An instance in evaluation mode with its parameters on the meta device in `dtype`."""
    register_interfaces()
    config = copy.deepcopy(config)
    text_class = config.sub_configs.get("text_config")
    if text_class is not None and getattr(model_class, "config_class", None) is text_class:
        config = config.get_text_config()
    config.use_cache = False
    with torch.device("meta"):
        model = model_class._from_config(
            config, dtype=dtype, attn_implementation=IMPLEMENTATION, experts_implementation=IMPLEMENTATION
        )
    return model.eval()
