"""What a request may ask for, and when it has got it."""

from __future__ import annotations

import logging

from treadle.ir.errors import UserError
from treadle.runtime.request import FinishReason, Request
from treadle.runtime.scheduler.kv_manager import KVManager

logger = logging.getLogger(__name__)


def check_servable(request: Request, kv: KVManager) -> None:
    """Raises UserError for a request that could never be served to its end, however long it waits."""
    limit, num_prompt = kv.config.max_model_len, request.num_prompt_tokens
    if num_prompt == 0:
        raise UserError(f"request {request.request_id!r} has an empty prompt; give it at least one token")
    if num_prompt >= limit:
        raise UserError(
            f"request {request.request_id!r} has a prompt of {num_prompt} tokens; the model's limit is {limit} "
            f"tokens, prompt and output together; shorten the prompt to at most {limit - 1} tokens"
        )
    total = request.max_total_tokens(limit)
    needed = kv.peak_blocks(min(total - 1 + kv.config.num_lookahead_tokens, limit))
    if needed > kv.pool.num_usable:
        raise UserError(
            f"request {request.request_id!r} may grow to {total} tokens ({num_prompt} of prompt), which takes "
            f"{needed} KV-cache blocks, but there are {kv.pool.num_usable}; lower max_tokens, shorten the "
            f"prompt, or give the KV cache more memory"
        )


def check_end(request: Request, token: int, max_model_len: int) -> tuple[FinishReason, int | None] | None:
    """Returns why the request ends with `token`, which was just appended, and the stop id if that is why.

    A constrained text that is complete ends the request, whatever `min_tokens` and `ignore_eos` say.
    """
    params, grammar = request.sampling_params, request.grammar
    if grammar is not None and not grammar.accept(token):
        request.error = grammar.fault
        logger.error("request %s ends with an error: %s", request.request_id, grammar.fault)
        return FinishReason.ERROR, None
    complete = grammar is not None and grammar.terminated
    if complete or request.num_output_tokens >= params.min_tokens:
        if token == params.eos_token_id and (complete or not params.ignore_eos):
            return FinishReason.STOP, None
        if token in params.all_stop_token_ids:
            return FinishReason.STOP, token
        if complete:
            return FinishReason.STOP, None
    if request.num_tokens >= request.max_total_tokens(max_model_len):
        return FinishReason.LENGTH, None
    return None
