"""One token a row: the argmax, by inverting the cumulative distribution (unseeded), or by a race (seeded).

The noise of a seeded request depends on its seed, position and token alone, so nothing else in the batch, no
preemption and no chunking of its prompt can change what it draws. Legend: R and S rows, V vocabulary, B blocks.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_BLOCK = 256
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_REACH = 42.0
"""No noise of 52 bits spans more: a token this far below the best logit cannot win."""


def argmax_rows(logits_RV: Tensor) -> Tensor:
    """Index of the first largest logit of each row, int64 [R]."""
    if logits_RV.is_cpu and logits_RV.dtype == torch.float32:
        return torch.from_numpy(
            logits_RV.detach().numpy().argmax(1)
        )  # vectorised, 20 times faster than torch's
    return logits_RV.argmax(-1)


def pick_random(logits_SV: Tensor, uniforms_S: Tensor) -> Tensor:
    """Draws from softmax(logits) with one float64 uniform in [0, 1) a row; int64 [S].

    A token of probability 0 is never drawn; a row of NaN gives some token of the vocabulary. First the block of 256 tokens is found, then the token in it.
    """
    num_rows, vocab_size = logits_SV.shape
    share_SV = logits_SV.softmax(-1)
    if vocab_size % _BLOCK:
        share_SV = torch.nn.functional.pad(share_SV, (0, -vocab_size % _BLOCK))
    mass_SBb = share_SV.view(num_rows, -1, _BLOCK)

    block_S, fraction_S = _invert(mass_SBb.sum(-1), uniforms_S)
    chosen_Sb = mass_SBb[torch.arange(num_rows, device=block_S.device), block_S]
    token_S, _ = _invert(chosen_Sb, fraction_S)
    return (block_S * _BLOCK + token_S).clamp_(max=vocab_size - 1)


def _invert(mass_SN: Tensor, uniforms_S: Tensor) -> tuple[Tensor, Tensor]:
    """The index whose share of the cumulative mass covers the uniform, and how far into it, in [0, 1)."""
    cumulative = mass_SN.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    largest = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniforms_S.unsqueeze(1) * total, largest)
    # The first entry whose cumulative mass exceeds the target: its own mass is above zero.
    index = torch.searchsorted(cumulative, target, right=True).clamp_(max=mass_SN.shape[1] - 1)
    mass = mass_SN.gather(1, index).double()
    fraction = (target - (cumulative.gather(1, index) - mass)) / mass
    return index.squeeze(1), fraction.squeeze(1).clamp_(0, 1 - 2**-53)


def race(logits_V: Tensor, key: np.uint64) -> int:
    """Draws from softmax(logits) of one row as the argmax of logits plus Gumbel noise, a pure function of `key`.

    Each token has noise of its own, so a logit that is a rounding error off (another batch, another chunking of the
    prompt) changes the draw only where two tokens finish that close; inverting a cumulative sum would shift every
    boundary after it. A row of NaN gives token 0. Source: Gumbel 1954, as the Gumbel-max trick.
    """
    logits = logits_V.detach().cpu().numpy()
    tokens = np.flatnonzero(logits >= logits.max() - _REACH)
    if not len(tokens):
        return 0
    noise = -np.log(-np.log(token_uniforms(key, tokens.astype(np.uint64))))
    return int(tokens[np.argmax(logits[tokens] + noise)])


def draw_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One uint64 for each (seed, position) of uint64; a pure function, the same on any machine.

    Counter-based: two rounds of the SplitMix64 finaliser (Steele, Lea and Flood 2014).
    """
    with np.errstate(over="ignore"):
        return _mix(_mix(seeds + _GOLDEN) + (positions + np.uint64(1)) * _GOLDEN)


def token_uniforms(keys: np.ndarray | np.uint64, tokens: np.ndarray) -> np.ndarray:
    """Uniform float64 in (0, 1) for each (key, token) of uint64, by one more round."""
    with np.errstate(over="ignore"):
        mixed = _mix(keys + (tokens + np.uint64(1)) * _GOLDEN)
    return ((mixed >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
