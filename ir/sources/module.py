"""A model given as an nn.Module: its state_dict is the checkpoint."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from treadle.ir.errors import ModelError
from treadle.ir.source import ModelSource
from treadle.ir.sources.build_model import build_from_config
from treadle.ir.sources.hf_folder import special_ids
from treadle.ir.types import DType, tensor
from treadle.ir.weights import Load, Recipe


class ModuleSource(ModelSource):
    """A transformers causal model, or a module of the user's own with `forward(input_ids [T], positions [T])`.

    The latter calls attention through `treadle.ir.trace_interfaces.attend` and returns logits [T, V].
    """

    kind = "module"

    def __init__(self, module: nn.Module):
        from transformers import PreTrainedModel

        self.module = module
        self.location = f"{type(module).__module__}.{type(module).__qualname__}"
        self._is_transformers = isinstance(module, PreTrainedModel)
        self.config = getattr(module, "config", None) if self._is_transformers else None
        self._state = module.state_dict()
        if not self._is_transformers:  # of a transformers model, the trace finds the values in its own code
            self._state |= dict(module.named_buffers())
        self.tensors = {
            name: tensor(DType.of(value.dtype), tuple(value.shape)) for name, value in self._state.items()
        }

    @property
    def architecture(self) -> str:
        return type(self.module).__name__

    @property
    def default_dtype(self) -> str:
        kinds = {p.dtype for p in self.module.parameters()}
        return (
            {torch.bfloat16: "bf16", torch.float16: "f16"}.get(kinds.pop(), "f32")
            if len(kinds) == 1
            else "f32"
        )

    @property
    def generation_config(self) -> dict[str, Any]:
        stated: Any = getattr(self.module, "generation_config", None)
        return stated.to_diff_dict() if stated is not None else special_ids(self.config)

    def read(self, name: str) -> torch.Tensor:
        if name not in self._state:
            raise ModelError(f"{self.location}: no tensor {name!r} in its state_dict")
        return self._state[name].detach().cpu()

    def build(self, dtype: torch.dtype) -> nn.Module:
        if self._is_transformers:
            return build_from_config(type(self.module), self.config, dtype)
        return _on_meta(self.module, dtype)

    def recipes(self, model: nn.Module) -> dict[str, Recipe]:
        return {name: Load(name) for name in self._state}


def _on_meta(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A deep copy whose parameters and buffers are on meta, floating-point ones in `dtype`."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(_meta(parameter, dtype), requires_grad=False)
    for buffer in module.buffers():
        memo[id(buffer)] = _meta(buffer, dtype)
    return copy.deepcopy(module, memo).eval()


def _meta(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    kind = dtype if value.is_floating_point() else value.dtype
    return torch.empty(value.shape, dtype=kind, device="meta")
