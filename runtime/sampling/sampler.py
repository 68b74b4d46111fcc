"""The sampler: a pure function from logits and metadata to token ids. The order of its stages is semantics.

Legend: R rows, S rows drawn at random, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.ir.errors import ConfigError
from treadle.runtime.protocol import LogprobRow
from treadle.runtime.sampling.logprobs import LOGPROBS_MODES, logprob_rows, reported_values
from treadle.runtime.sampling.metadata import SamplingMetadata, apply_bitmask
from treadle.runtime.sampling.random_pick import argmax_rows, pick_random, race
from treadle.runtime.sampling.topk_topp import filter_top_k_top_p


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """`token_ids` is int32 [R, 1]; `logprobs` has one entry a row, None for a row that asked for none."""

    token_ids: Tensor
    logprobs: list[LogprobRow | None] | None = None


class Sampler:
    """Holds no request state. `logprobs_mode` says whether logprobs or logits, raw or processed, are reported."""

    def __init__(self, logprobs_mode: str = "raw_logprobs"):
        if logprobs_mode not in LOGPROBS_MODES:
            raise ConfigError(f"logprobs_mode={logprobs_mode!r} is not one of: {', '.join(LOGPROBS_MODES)}")
        self.logprobs_mode = logprobs_mode

    def __call__(self, logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """Samples one token for each row of `logits` [R, V] of any float type; float32 logits are overwritten.

        A greedy row's processed values are those after the penalties: temperature and filters do not touch it.
        """
        assert logits.shape[0] == metadata.num_rows, (logits.shape, metadata.num_rows)
        reported = self._raw_values(logits, metadata)
        logits = logits.to(torch.float32)
        logits = self._change_argmax(logits, metadata)
        sampled, logits = self._pick(logits, metadata)
        if metadata.logprobs is None:
            return SamplerOutput(sampled.to(torch.int32).unsqueeze(1))
        if reported is None:
            reported = reported_values(logits.index_select(0, metadata.logprobs.rows), self.logprobs_mode)
        return SamplerOutput(
            sampled.to(torch.int32).unsqueeze(1), _gather_logprobs(reported, sampled, metadata)
        )

    def _raw_values(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor | None:
        """A copy of what the model said, taken before any mask, penalty or temperature."""
        if metadata.logprobs is None or self.logprobs_mode.startswith("processed_"):
            return None
        return reported_values(logits.index_select(0, metadata.logprobs.rows), self.logprobs_mode)

    def _change_argmax(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        logits = self._mask(logits, metadata)
        # Bias comes before penalties: a repetition penalty scales the biased logit. Penalties come before
        # temperature: their strength must not depend on it.
        for stage in (*metadata.changing, metadata.penalties):
            if stage is not None:
                logits = stage.apply(logits)
        return logits

    def _mask(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        """Grammar, allowed tokens and bans. Where these leave nothing together, the grammar alone decides."""
        others = [stage for stage in (metadata.allowed, metadata.banned) if stage is not None]
        if metadata.grammar_bitmask is None:
            for stage in others:
                logits = stage.apply(logits)
            return logits
        logits = apply_bitmask(logits, metadata.grammar_bitmask)
        if not others:
            return logits
        by_grammar = logits.clone()
        for stage in others:
            logits = stage.apply(logits)
        nothing = logits.amax(-1) == -torch.inf
        logits[nothing] = by_grammar[nothing]
        return logits

    def _pick(self, logits: Tensor, metadata: SamplingMetadata) -> tuple[Tensor, Tensor]:
        """Returns int64 ids [R] and the processed logits [R, V]."""
        if metadata.all_greedy:
            return argmax_rows(logits), logits
        if metadata.random_rows is None:
            return self._pick_random(logits, metadata)
        sampled = argmax_rows(logits)
        picked, processed_SV = self._pick_random(logits.index_select(0, metadata.random_rows), metadata)
        sampled.index_copy_(0, metadata.random_rows, picked)
        if metadata.logprobs is not None and self.logprobs_mode.startswith("processed_"):
            logits.index_copy_(0, metadata.random_rows, processed_SV)
        return sampled, logits

    def _pick_random(self, logits_SV: Tensor, metadata: SamplingMetadata) -> tuple[Tensor, Tensor]:
        assert metadata.temperature_S is not None and metadata.uniforms_S is not None
        logits_SV = logits_SV.div_(metadata.temperature_S.unsqueeze(1))
        for stage in metadata.invariant:
            logits_SV = stage.apply(logits_SV)
        if metadata.top_k_top_p is not None:
            logits_SV = filter_top_k_top_p(logits_SV, metadata.top_k_top_p)
        picked_S = pick_random(logits_SV, metadata.uniforms_S)
        for row, key in metadata.races:
            picked_S[row] = race(logits_SV[row], key)
        return picked_S, logits_SV


def _gather_logprobs(
    values_NV: Tensor, sampled: Tensor, metadata: SamplingMetadata
) -> list[LogprobRow | None]:
    plan = metadata.logprobs
    assert plan is not None
    found = logprob_rows(values_NV, sampled.index_select(0, plan.rows), plan.counts, plan.token_ids)
    rows: list[LogprobRow | None] = [None] * metadata.num_rows
    for row, logprobs in zip(plan.rows.tolist(), found, strict=True):
        rows[row] = logprobs
    return rows
