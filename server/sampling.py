"""From a request's sampling fields to SamplingParams, and the check that prompt and answer fit the model.

Precedence: the request, then the model's generation config (unless the server is told to be neutral), then
the defaults of SamplingParams. Without max_tokens a generation may run to the model's limit.
"""

from __future__ import annotations

from typing import Any

from treadle.ir.errors import UserError
from treadle.runtime.sampling_params import RequestOutputKind, SamplingParams
from treadle.server.answers import keeps_special_tokens
from treadle.server.errors import ApiError, as_api_error, bad_request
from treadle.server.schemas import ChatBody, CompletionBody, SamplingBody
from treadle.server.state import ServerState
from treadle.server.structured import structured_outputs
from treadle.server.tools import tool_constraint, tool_use

_SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "prompt_logprobs",
)


def sampling_params(body: SamplingBody, state: ServerState, num_prompt_tokens: int) -> SamplingParams:
    """Returns checked parameters for one prompt of that many tokens. Raises ApiError naming the field."""
    asked = {name: getattr(body, name) for name in _SAME_NAME if getattr(body, name) is not None}
    defaults: dict[str, Any] = {}
    if state.config.generation_config == "auto":
        defaults = dict(state.renderer.sampling_defaults)
    default_limit = defaults.pop("max_tokens", None)
    field, wanted = _asked_length(body)
    room = check_length(num_prompt_tokens, wanted, field, state.max_model_len)
    limit = wanted if wanted is not None else min(room, default_limit or room)
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    options = {**defaults, **asked, **_logprobs(body, state.config.max_logprobs)}
    options["structured_outputs"] = structured_outputs(body)
    try:
        if isinstance(body, ChatBody):
            options |= _chat_options(body, state, options)
        params = SamplingParams(**options, max_tokens=limit, output_kind=kind)
        params.validate(vocab_size=state.vocab_size, max_model_len=state.max_model_len)
    except UserError as error:
        raise as_api_error(error) from error
    return params


def _chat_options(body: ChatBody, state: ServerState, options: dict[str, Any]) -> dict[str, Any]:
    """What tools and reasoning make of the options: another constraint, special tokens that stay in the text."""
    use = tool_use(body)
    found: dict[str, Any] = {"structured_outputs": tool_constraint(use, state.tool_format, options["structured_outputs"])}
    if "skip_special_tokens" not in options and keeps_special_tokens(body, use, state):
        found["skip_special_tokens"] = False
    return found


def check_length(num_prompt_tokens: int, wanted: int | None, field: str, max_model_len: int) -> int:
    """Returns the room for an answer. Raises a 400 that states the model's limit, the prompt and the request."""
    limit = f"this model's maximum context length is {max_model_len} tokens, prompt and answer together"
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise too_long(f"{limit}; the prompt alone has {num_prompt_tokens} tokens, so shorten it", None)
    if wanted is not None and wanted > room:
        asked = f"{num_prompt_tokens} of the prompt and {field}={wanted}, {num_prompt_tokens + wanted} in all"
        raise too_long(f"{limit}; this request asks for {asked}, so shorten the prompt or lower {field}", field)
    return room


def too_long(message: str, param: str | None) -> ApiError:
    """The 400 for a request that does not fit the model."""
    return bad_request(message, param, "context_length_exceeded")


def _asked_length(body: SamplingBody) -> tuple[str, int | None]:
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        if body.max_tokens not in (None, body.max_completion_tokens):
            raise bad_request("max_tokens and max_completion_tokens differ; send one of them", "max_tokens")
        return _positive("max_completion_tokens", body.max_completion_tokens)
    if isinstance(body, CompletionBody) and body.echo and body.max_tokens == 0:
        return "max_tokens", 1  # scoring a prompt: one token is computed and left out of the answer
    return _positive("max_tokens", body.max_tokens)


def _positive(field: str, value: int | None) -> tuple[str, int | None]:
    if value is not None and value < 1:
        raise bad_request(f"{field}={value} should be at least 1", field)
    return field, value


def _logprobs(body: SamplingBody, most: int) -> dict[str, Any]:
    """The arguments about logprobs; a completion with echo wants those of its prompt as well."""
    if isinstance(body, ChatBody):
        field, count = "top_logprobs", (body.top_logprobs or 0) if body.logprobs else None
    else:
        field, count = "logprobs", body.logprobs if isinstance(body, CompletionBody) else None
    for name, value in ((field, count), ("prompt_logprobs", body.prompt_logprobs)):
        if value is not None and not 0 <= value <= most:
            raise bad_request(f"{name}={value} should be from 0 to {most}", name)
    found: dict[str, Any] = {} if count is None else {"logprobs": count}
    if count is not None and isinstance(body, CompletionBody) and body.echo and body.prompt_logprobs is None:
        found["prompt_logprobs"] = count
    return found
