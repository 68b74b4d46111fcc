"""How transformers' attention, masks and experts reach the trace: one op call each, through its interfaces.

A mask is not built. It becomes a `MaskNote`, which travels to the attention call in the mask's place and says
which keys a query may see; `check_masks` compares it with the model's own mask function afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from treadle.ir.errors import TraceError

IMPLEMENTATION = "treadle"


@dataclass(frozen=True)
class MaskNote:
    """What a mask would have said: the window (tokens visible, the query's own included) and the rule itself."""

    window: int | None
    rule: Callable[..., Any] = field(compare=False)


@dataclass
class Notes:
    """What the interfaces saw during one trace."""

    masks: list[MaskNote] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)


_NOTES: ContextVar[Notes | None] = ContextVar("treadle_trace_notes", default=None)


@torch.library.custom_op("treadle::traced_attention", mutates_args=())
def traced_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    layer: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Stands for the IR op `attention` while tracing: q [T, Hq, D], k [T, Hk, D], v [T, Hk, Dv] -> [T, Hq, Dv]."""
    raise AssertionError("traced_attention is only traced, never run")


@traced_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


@torch.library.custom_op("treadle::traced_experts", mutates_args=())
def traced_experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, act: str
) -> Tensor:
    """Stands for the IR op `experts` while tracing; same arguments."""
    raise AssertionError("traced_experts is only traced, never run")


@traced_experts.register_fake
def _(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, act: str) -> Tensor:
    return torch.empty_like(x)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layer: int,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal self-attention for a module of your own: q [T, Hq, D], k [T, Hk, D], v [T, Hk, Dv] -> [T, Hq, Dv].

    Each layer has a number of its own. Only for tracing: it has no eager implementation.
    """
    notes = _NOTES.get()
    if notes is not None:
        notes.layers.append(layer)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return torch.ops.treadle.traced_attention(q, k, v, sinks, layer, scale, window, softcap)


@cache
def register_interfaces() -> None:
    """Makes `IMPLEMENTATION` known to transformers, once in a process."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attention_interface)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _mask_interface)
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts_interface)


@contextmanager
def noting() -> Iterator[Notes]:
    """Collects notes, and keeps transformers from looking for packed sequences in the positions."""
    from transformers import masking_utils

    notes = Notes()
    token = _NOTES.set(notes)
    find_packed = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield notes
    finally:
        masking_utils.find_packed_sequence_indices = find_packed
        _NOTES.reset(token)


def _mask_interface(
    *, mask_function: Callable[..., Any], local_size: int | None = None, **_: Any
) -> MaskNote:
    note = MaskNote(local_size, mask_function)
    notes = _NOTES.get()
    if notes is not None:
        notes.masks.append(note)
    return note


def _attention_interface(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskNote | Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, Hq, T, D] and so on -> ([1, T, Hq, Dv], no weights)."""
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise TraceError(f"{type(module).__name__} has no layer_idx, so its KV cache has no number")
    if isinstance(attention_mask, Tensor):
        raise TraceError(f"{type(module).__name__} (layer {layer}) builds an attention mask of its own")
    if extra.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise TraceError(f"{type(module).__name__} (layer {layer}) is not causal")
    window = attention_mask.window if isinstance(attention_mask, MaskNote) else sliding_window
    out = attend(
        *(x.squeeze(0).transpose(0, 1) for x in (query, key, value)),
        layer=layer,
        scale=scaling,
        window=window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out.unsqueeze(0), None


_ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELU": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_new",
    "ReLU": "relu",
}


def _experts_interface(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """transformers' experts interface: hidden [T, H], ids and weights [T, K] -> [T, H]."""
    from transformers.integrations.moe import _default_apply_gate

    name, act = type(module).__name__, type(getattr(module, "act_fn", None)).__name__
    problems = {
        "has no gate": not module.has_gate,
        "has biases": module.has_bias,
        "stores its weights transposed": module.is_transposed,
        "interleaves gate and up": not module.is_concatenated,
        "norms after each expert": module.has_post_expert_norm,
        "has a gate of its own (_apply_gate)": type(module)._apply_gate is not _default_apply_gate,
        f"has activation {act}": act not in _ACTIVATIONS,
    }
    for problem, holds in problems.items():
        if holds:
            raise TraceError(f"{name} {problem}, which the op `experts` cannot express")
    return torch.ops.treadle.traced_experts(
        hidden_states, top_k_index, top_k_weights, module.gate_up_proj, module.down_proj, _ACTIVATIONS[act]
    )


def check_masks(notes: Notes, architecture: str) -> None:
    """Raises TraceError if a mask of the model is anything but causal, or causal within its window.

    Called after tracing, on real numbers: the rule is evaluated around each edge that it should have.
    """
    for note in dict.fromkeys(notes.masks):
        reach = (note.window or 8) + 3
        queries = torch.tensor([0, 1, reach - 1, reach, 2 * reach])[:, None]
        keys = torch.arange(2 * reach + 2)[None, :]
        expected = keys <= queries
        if note.window is not None:
            expected &= keys > queries - note.window
        zero = torch.zeros((), dtype=torch.int64)
        seen = torch.as_tensor(note.rule(zero, zero, queries, keys)).expand(expected.shape)
        if not torch.equal(seen, expected):
            raise TraceError(
                f"{architecture} masks attention by a rule of its own ({getattr(note.rule, '__qualname__', note.rule)}, "
                f"window {note.window}); treadle serves causal attention, whole or within a sliding window"
            )
