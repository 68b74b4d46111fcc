"""Everything the stateless sampler needs for one step. Legend: R rows, S rows drawn at random, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

ALL_LOGPROBS = -1


class Stage(Protocol):
    """One step of the chain over its rows' float32 logits; it may work in place and returns the result."""

    def apply(self, logits: Tensor) -> Tensor: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TopKTopP:
    """Filters of the S random rows. A row without top-k has k = V, one without top-p has p = 1.

    `window` is how many of the best logits to look at first; it changes the cost, never the result.
    """

    k_S: Tensor
    p_S: Tensor
    window: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobPlan:
    """Which rows report logprobs: how many (`ALL_LOGPROBS` for all) and which further ids, one entry a row."""

    rows: Tensor
    counts: list[int]
    token_ids: list[list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingMetadata:
    """The batch as the sampler sees it; a field that is None or empty costs nothing.

    `random_rows` are the row numbers drawn at random, or None when all are; `uniforms_S` holds one float64 in
    [0, 1) for each; `races` lists those that draw by a key of their own instead, as (index among S, key). `changing` stages may change the argmax and see all rows; `invariant` ones cannot and see
    only the random rows, as do `temperature_S` and `top_k_top_p`.
    `grammar_bitmask` is int32 [R, ceil(V / 32)], bit 1 = allowed; structured output sets it.
    """

    num_rows: int
    all_greedy: bool
    random_rows: Tensor | None = None
    temperature_S: Tensor | None = None
    uniforms_S: Tensor | None = None
    races: tuple[tuple[int, np.uint64], ...] = ()
    top_k_top_p: TopKTopP | None = None
    grammar_bitmask: Tensor | None = None
    allowed: Stage | None = None
    banned: Stage | None = None
    changing: tuple[Stage, ...] = ()
    penalties: Stage | None = None
    invariant: tuple[Stage, ...] = ()
    logprobs: LogprobPlan | None = None

    @property
    def only_argmax(self) -> bool:
        """Whether nothing but the argmax of the raw logits is wanted from any row."""
        masks = (self.grammar_bitmask, self.allowed, self.banned, self.penalties, self.logprobs)
        return self.all_greedy and not self.changing and all(mask is None for mask in masks)


def apply_bitmask(logits: Tensor, bitmask: Tensor) -> Tensor:
    """Sets to -inf, in place, every logit whose bit is 0 in the int32 [R, ceil(V / 32)] mask."""
    if logits.is_cpu:  # NumPy unpacks bits and skips what is not masked 10 to 20 times faster than torch
        bits = np.unpackbits(~bitmask.numpy().view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
        np.copyto(logits.numpy(), -np.inf, where=bits.view(bool))
        return logits
    bits = bitmask.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=bitmask.device)
    forbidden = (bits & 1).flatten(1)[:, : logits.shape[1]] == 0
    return logits.masked_fill_(forbidden, -torch.inf)
