"""Logprobs of prompt tokens, computed for the prompt positions of a step from the body's result, some rows at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from treadle.runtime.protocol import LogprobRow
from treadle.runtime.runner.input_batch import InputBatch
from treadle.runtime.runner.request_state import RequestState
from treadle.runtime.sampling.logprobs import prompt_logprob_rows

if TYPE_CHECKING:
    from treadle.runtime.runner.model_runner import ExecuteState

ROWS_AT_ONCE = 128
"""Rows whose logits are held at once: 128 x 49152 float32 are 24 MiB."""

PromptRows = dict[str, list[LogprobRow | None]]


def prompt_logprobs_of_step(
    state: ExecuteState, batch: InputBatch, requests: dict[str, RequestState], mode: str
) -> PromptRows:
    """The rows that became known in this step, by request; empty unless a request asked for prompt logprobs.

    The row of token p comes from position p - 1; token 0, which nothing predicts, gives None.
    """
    found: PromptRows = {}
    taken = slice(state.shape.num_reqs)
    for slot in (batch.num_computed[taken] < batch.num_prompt_tokens[taken]).nonzero()[0].tolist():
        request = requests[batch.req_ids[slot]]
        count = request.sampling_params.prompt_logprobs
        if count is None:
            continue
        first = int(batch.num_computed[slot])
        last = min(int(state.shape.seq_lens[slot]), len(request.prompt) - 1)
        rows: list[LogprobRow | None] = [None] if first == 0 else []
        offset = int(state.shape.ends[slot] - state.shape.counts[slot]) - first
        for start in range(first, last, ROWS_AT_ONCE):
            end = min(start + ROWS_AT_ONCE, last)
            logits = state.program.logits(state.values, torch.arange(offset + start, offset + end))
            rows += prompt_logprob_rows(logits, request.prompt[start + 1 : end + 1].tolist(), count, mode)
        found[request.req_id] = rows
    return found
