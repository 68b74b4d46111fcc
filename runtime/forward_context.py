"""The bulletin board of one step: what layers and graph wrappers may read without being passed it.

A deliberate exception to explicit passing: the signatures of layers are fixed, a step's metadata is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from treadle.runtime.dispatch import BatchDescriptor, GraphMode


@dataclass(kw_only=True)
class ForwardContext:
    """What holds during one forward. The mappings are keyed by attention layer index."""

    attn_metadata: Mapping[int, Any]
    slot_mapping: Mapping[int, torch.Tensor]
    kv_caches: Mapping[int, torch.Tensor]
    graph_mode: GraphMode = GraphMode.NONE
    batch_descriptor: BatchDescriptor | None = None
    is_padding: torch.Tensor | None = None
    """bool [T], True for rows whose work may be skipped; None when no row is padding."""
    no_compile_layers: Mapping[str, Any] = field(default_factory=dict)
    moe_layers: Sequence[str] = ()
    skip_compiled: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    """A platform's own entries."""
    _next_moe_layer: int = 0

    def next_moe_layer(self) -> str:
        """The name of the next mixture layer; relies on layers running in program order."""
        assert self._next_moe_layer < len(self.moe_layers), "more mixture layers ran than the context lists"
        name = self.moe_layers[self._next_moe_layer]
        self._next_moe_layer += 1
        return name


_current: ForwardContext | None = None


def current() -> ForwardContext:
    """The context of the step that runs now."""
    assert _current is not None, "no forward context is set: run the model inside `with using(context):`"
    return _current


def is_set() -> bool:
    """Whether a step runs now; a graph wrapper outside of one calls through."""
    return _current is not None


@contextmanager
def using(context: ForwardContext) -> Iterator[ForwardContext]:
    """Makes `context` current and restores the one before, on errors too. Nests."""
    global _current
    before, _current = _current, context
    try:
        yield context
    finally:
        _current = before


@contextmanager
def forward_step(
    *,
    num_tokens: int,
    num_padded_tokens: int | None = None,
    batch_descriptor: BatchDescriptor | None = None,
    **entries: Any,
) -> Iterator[ForwardContext]:
    """Sets the context of one step: derives the descriptor if there is none, and marks the padded rows."""
    padded = num_tokens if num_padded_tokens is None else num_padded_tokens
    assert padded >= num_tokens, f"{num_tokens} tokens cannot be padded to {padded}"
    descriptor = batch_descriptor or BatchDescriptor(num_tokens=padded)
    mask = torch.arange(padded) >= num_tokens if padded > num_tokens else None
    with using(ForwardContext(batch_descriptor=descriptor, is_padding=mask, **entries)) as context:
        yield context
