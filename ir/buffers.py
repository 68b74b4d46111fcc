"""Values of tensors that exist in the model code only (rotary frequencies, scales), for a model on meta."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def code_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Non-persistent buffers by name, with the values that the model's own initialisation gives them.

    A buffer that stays unset is left out. The model itself keeps its meta buffers.
    """
    values: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        names = [n for n in module._non_persistent_buffers_set if module._buffers.get(n) is not None]
        if not names:
            continue
        for name, value in _initialised(model, path, module, names).items():
            values[f"{path}.{name}" if path else name] = value
    return values


def _initialised(model: nn.Module, path: str, module: nn.Module, names: list[str]) -> dict[str, torch.Tensor]:
    known = {n: b for n in names if (b := module._buffers[n]) is not None}
    if all(not buffer.is_meta for buffer in known.values()):
        return {name: buffer.detach().clone() for name, buffer in known.items()}
    initialise: Any = getattr(_owner(model, path), "_init_weights", None)
    if initialise is None:
        return {}
    try:
        for name, buffer in known.items():
            module._buffers[name] = _unset_like(buffer)
        with torch.no_grad():
            initialise(module)
        filled = {name: module._buffers[name] for name in names}
    finally:
        module._buffers.update(known)
    return {n: b.detach() for n, b in filled.items() if b is not None and not _is_unset(b)}


def _owner(model: nn.Module, path: str) -> nn.Module:
    """The innermost module on the path that knows how to initialise its parts."""
    owner, current = model, model
    for part in path.split(".") if path else []:
        current = getattr(current, part)
        if hasattr(current, "_init_weights"):
            owner = current
    return owner


def _unset_like(buffer: torch.Tensor) -> torch.Tensor:
    if buffer.is_floating_point():
        return torch.full(buffer.shape, float("nan"), dtype=buffer.dtype)
    if buffer.dtype == torch.bool:
        return torch.zeros(buffer.shape, dtype=torch.bool)
    return torch.full(buffer.shape, torch.iinfo(buffer.dtype).min, dtype=buffer.dtype)


def _is_unset(buffer: torch.Tensor) -> bool:
    if buffer.is_floating_point():
        return bool(buffer.isnan().any())
    if buffer.dtype == torch.bool:
        return not bool(buffer.any())
    return bool((buffer == torch.iinfo(buffer.dtype).min).any())
