"""Builds a transformers model on the meta device, with attention and experts going to ops of ours."""

from __future__ import annotations

import copy
import traceback
from typing import Any

import torch

from treadle.ir.errors import ModelError, TraceError
from treadle.ir.trace_interfaces import IMPLEMENTATION, register_interfaces
from treadle.ir.trace_source import is_model_file


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
    try:
        with torch.device("meta"):
            model = model_class._from_config(
                config, dtype=dtype, attn_implementation=IMPLEMENTATION, experts_implementation=IMPLEMENTATION
            )
    except KeyError as error:
        if error.args != (IMPLEMENTATION,):
            raise
        raise TraceError(
            f"{model_class.__name__} looks its attention up in a table of its own instead of transformers' attention "
            f"interface, at {_raised_at(error)}; a dense fallback would be wrong for batches, so it cannot be served"
        ) from error
    return model.eval()


def _raised_at(error: BaseException) -> str:
    """file:line of the innermost frame in model code."""
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if is_model_file(frame.filename)]
    return f"{lines[-1].filename}:{lines[-1].lineno}" if lines else "an unknown line"
