"""Logprobs of sampled and of prompt tokens. Legend: N rows that report, V vocabulary.

A rank is one more than the number of likelier tokens, so the argmax has rank 1 even among equals. Values below
`FLOOR` (a filtered token is at -inf) are reported as `FLOOR`, since JSON has no infinity.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import torch
from torch import Tensor

from treadle.runtime.protocol import LogprobRow
from treadle.runtime.sampling.metadata import ALL_LOGPROBS

FLOOR = -9999.0
LOGPROBS_MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
_PROMPT_CHUNK = 64


def reported_values(logits_NV: Tensor, mode: str) -> Tensor:
    """What a logprobs mode reports of logits: float32 log-softmax, or the float32 logits themselves."""
    values = logits_NV.to(torch.float32)
    return values if mode.endswith("_logits") else values.log_softmax(-1)


def prompt_logprob_rows(
    logits_NV: Tensor, target_ids: Sequence[int], count: int, mode: str = "raw_logprobs"
) -> list[LogprobRow]:
    """One row for each prompt token `target_ids[i]`, which the logits at `i` (one position before it) predict.

    Always of the unfiltered distribution: nothing is processed in a prompt. Works a few rows at a time.
    """
    rows: list[LogprobRow] = []
    for start in range(0, len(target_ids), _PROMPT_CHUNK):
        values = reported_values(logits_NV[start : start + _PROMPT_CHUNK], mode)
        targets = torch.tensor(target_ids[start : start + _PROMPT_CHUNK], device=values.device)
        rows += logprob_rows(values, targets, [count] * len(targets))
    return rows


def logprob_rows(
    values_NV: Tensor, chosen_N: Tensor, counts: Sequence[int], token_ids: Sequence[Sequence[int]] = ()
) -> list[LogprobRow]:
    """The chosen token, then the `counts[i]` best (`ALL_LOGPROBS`: all in id order), then `token_ids[i]`."""
    chosen = values_NV.gather(1, chosen_N.unsqueeze(1))
    heads = LogprobRow(
        chosen_N.tolist(), _finite(chosen).squeeze(1).tolist(), _ranks(values_NV, chosen).tolist()
    )
    best = _best_rows(values_NV, max(counts, default=0))
    rows = []
    for i, (count, extra) in enumerate(zip(counts, token_ids or repeat(()), strict=False)):
        row = LogprobRow([heads.token_ids[i]], [heads.logprobs[i]], [heads.ranks[i]])
        if count == ALL_LOGPROBS:
            _extend(row, _whole_row(values_NV[i]), values_NV.shape[1])
        elif count > 0:
            _extend(row, best[i], count)
        if extra:
            _extend(row, _named_row(values_NV[i], list(extra)), len(extra))
        rows.append(row)
    return rows


def _extend(row: LogprobRow, more: LogprobRow, count: int) -> None:
    row.token_ids += more.token_ids[:count]
    row.logprobs += more.logprobs[:count]
    row.ranks += more.ranks[:count]


def _best_rows(values_NV: Tensor, count: int) -> list[LogprobRow]:
    count = min(count, values_NV.shape[1])
    if count <= 0:
        return []
    values, ids = values_NV.topk(count, -1)
    place = torch.arange(1, count + 1, device=values.device).expand_as(ids)
    tied = torch.zeros_like(ids, dtype=torch.bool)
    tied[:, 1:] = values[:, 1:] == values[:, :-1]
    ranks = place.masked_fill(tied, 0).cummax(-1).values
    parts = zip(ids.tolist(), _finite(values).tolist(), ranks.tolist(), strict=True)
    return [LogprobRow(*part) for part in parts]


def _whole_row(values_V: Tensor) -> LogprobRow:
    ascending = values_V.sort().values
    num_likelier = len(values_V) - torch.searchsorted(ascending, values_V, right=True)
    return LogprobRow(list(range(len(values_V))), _finite(values_V).tolist(), (num_likelier + 1).tolist())


def _named_row(values_V: Tensor, ids: list[int]) -> LogprobRow:
    named = values_V[torch.tensor(ids, device=values_V.device)]
    return LogprobRow(
        ids, _finite(named).tolist(), _ranks(values_V.expand(len(ids), -1), named[:, None]).tolist()
    )


def _ranks(values_NV: Tensor, chosen_N1: Tensor) -> Tensor:
    return (values_NV > chosen_N1).sum(-1) + 1


def _finite(values: Tensor) -> Tensor:
    return values.clamp_min(FLOOR)
