"""Attention over one sequence without a cache, in float32: what every attention backend must equal."""

from __future__ import annotations

import torch
from torch import Tensor


def attend_one_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    causal: bool = True,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [T, Hq, D], k [T, Hk, D], v [T, Hk, Dv] -> [T, Hq, Dv]; sinks [Hq] join the softmax's denominator."""
    tokens, group = q.shape[0], q.shape[1] // k.shape[1]
    keys = k.float().repeat_interleave(group, dim=1)
    values = v.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if causal:
        hidden |= distance < 0
    if window is not None:
        hidden |= distance >= window
        if not causal:
            hidden |= distance <= -window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        sink = sinks.float()[:, None, None].expand(-1, tokens, 1)
        weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
