"""Top-k and top-p as one cutoff a row, found without sorting the vocabulary.

Legend: S rows, V vocabulary, W the window of best logits. Both filters keep a prefix of the tokens in order of
likelihood, so a row's result is "every logit >= cutoff"; tokens that tie with the last kept one stay. Only the
best W logits are looked at; a row whose cutoff might lie beyond them is done again with all of V, so the result
is exact.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from treadle.runtime.sampling.metadata import TopKTopP

P_WINDOW = 2048
MAX_WINDOW = 8192


def filter_top_k_top_p(logits_SV: Tensor, filters: TopKTopP) -> Tensor:
    """Sets to -inf, in place, what top-k and then top-p remove; top-p is of the mass that top-k left.

    Top-p keeps a token if the tokens that are more likely hold less than p (Holtzman et al. 2020).
    """
    return mask_below(logits_SV, find_cutoffs(logits_SV, filters))


def mask_below(logits_SV: Tensor, cutoff_S: Tensor) -> Tensor:
    """Sets to -inf, in place, every logit below its row's cutoff. A cutoff of -inf keeps the whole row."""
    if not logits_SV.is_cpu:
        return logits_SV.masked_fill_(logits_SV < cutoff_S.unsqueeze(1), -torch.inf)
    # On a CPU a scalar threshold over one row is vectorised and masked_fill is not: 40 times faster.
    below = torch.nextafter(cutoff_S, torch.full_like(cutoff_S, -torch.inf)).tolist()
    for row, bound in enumerate(below):
        if bound > -torch.inf:
            torch.threshold_(logits_SV[row], bound, -torch.inf)
    return logits_SV


def find_cutoffs(logits_SV: Tensor, filters: TopKTopP) -> Tensor:
    """Returns each row's lowest logit to keep, or -inf where nothing is to be removed, as float32 [S]."""
    window = min(filters.window, logits_SV.shape[1])
    cutoff, found = _cutoffs_within(_best(logits_SV, window), logits_SV, filters.k_S, filters.p_S)
    if not bool(found.all()):  # synchronises with the device, as reading the sampled ids does right after
        rows = (~found).nonzero().squeeze(1)
        some = logits_SV[rows]
        everything = _best(some, some.shape[1])
        cutoff[rows], _ = _cutoffs_within(everything, some, filters.k_S[rows], filters.p_S[rows])
    return cutoff


def _best(logits_SV: Tensor, window: int) -> Tensor:
    """The largest `window` logits of each row, in descending order."""
    if not logits_SV.is_cpu:
        return logits_SV.topk(window, -1).values
    # NumPy's vectorised partition and sort take a tenth of the time of torch's on a CPU.
    logits, rest = logits_SV.numpy(), logits_SV.shape[1] - window
    if rest:
        logits = np.partition(logits, rest, axis=1)[:, rest:]
    return torch.from_numpy(np.sort(logits, axis=1)).flip(1)


def _cutoffs_within(best_SW: Tensor, logits_SV: Tensor, k_S: Tensor, p_S: Tensor) -> tuple[Tensor, Tensor]:
    """Cutoffs as far as the best W logits tell, and for which rows they tell."""
    window, vocab_size = best_SW.shape[1], logits_SV.shape[1]
    no_k, no_p = k_S >= vocab_size, p_S >= 1
    kth_S = best_SW.gather(1, (k_S - 1).clamp(0, window - 1).unsqueeze(1)).squeeze(1)
    kth_S = kth_S.masked_fill(no_k, -torch.inf)
    # Top-k is settled if the window reaches past the k-th logit and everything tied with it.
    k_found = no_k | ((k_S <= window) & ((best_SW[:, -1] < kth_S) | (kth_S == -torch.inf)))

    mass_SW = (best_SW - best_SW[:, :1]).double().exp().masked_fill(best_SW < kth_S.unsqueeze(1), 0)
    total_S = mass_SW.sum(-1)
    if window < vocab_size and bool((no_k & ~no_p).any()):
        largest_share_S = logits_SV.softmax(-1).amax(-1).double()
        total_S = torch.where(no_k, 1 / largest_share_S, total_S)
    before_SW = mass_SW.cumsum(-1) - mass_SW
    kept_SW = (before_SW < (p_S * total_S).unsqueeze(1)) & (mass_SW > 0)
    last_S = (kept_SW.sum(-1) - 1).clamp_min(0)
    pth_S = best_SW.gather(1, last_S.unsqueeze(1)).squeeze(1).masked_fill(no_p, -torch.inf)
    p_found = no_p | ~no_k | ~kept_SW[:, -1]

    found = (k_found & p_found) if window < vocab_size else torch.ones_like(k_found)
    return torch.maximum(kth_S, pth_S), found
