"""From the prompt fields of a request to token ids, with errors that name the field and the place in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.ir.errors import UserError
from treadle.runtime.renderer import Prompt, PromptTooLong
from treadle.server.errors import ApiError, as_api_error, bad_request
from treadle.server.sampling import too_long
from treadle.server.schemas import ChatBody, CompletionBody, TokenizeBody
from treadle.server.state import ServerState
from treadle.server.tools import tool_use


async def completion_prompts(body: CompletionBody, state: ServerState) -> list[Prompt]:
    """Returns the prompts of a completion: text, token ids, or a list of either. None may be empty."""
    given = _as_list(body.prompt)
    if len(given) * (body.n or 1) > state.config.max_sequences_per_request:
        most = state.config.max_sequences_per_request
        raise bad_request(f"{len(given)} prompts times n={body.n or 1} is more than {most} sequences", "prompt")
    add_special = body.add_special_tokens is not False
    return [truncated(await _prompt(item, where, add_special, state), body, state) for where, item in given]


async def chat_prompt(body: ChatBody, state: ServerState) -> Prompt:
    """Returns the prompt of a chat. Raises ApiError for messages that cannot be rendered."""
    kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    options = {
        "tools": tool_use(body).tools or None if body.tool_choice != "none" else None,
        **generation_prompt_options(body),
        "kwargs": kwargs,
    }
    if (body.n or 1) > state.config.max_sequences_per_request:
        raise bad_request(f"n={body.n} is more than {state.config.max_sequences_per_request} sequences", "n")
    return truncated(await rendered_chat(body.messages, options, state), body, state)


def generation_prompt_options(body: ChatBody | TokenizeBody) -> dict[str, bool]:
    """How a chat prompt ends: with the head of a new answer, unless told not to or the last message goes on."""
    return {
        "add_generation_prompt": body.add_generation_prompt is not False and not body.continue_final_message,
        "continue_final_message": bool(body.continue_final_message),
    }


async def rendered_chat(messages: Any, options: Mapping[str, Any], state: ServerState) -> Prompt:
    """Returns rendered messages; `options` are those of the renderer."""
    if messages is None:
        raise bad_request("messages is missing; send a list of messages", "messages")
    try:
        return await state.renderer.render_chat_async(messages, **options)
    except UserError as error:
        raise _refusal(error, "messages") from error


async def encoded(text: str, where: str, add_special_tokens: bool, state: ServerState) -> list[int]:
    """Returns the ids of a text; errors name `where` it stands."""
    try:
        return await state.renderer.encode_async(text, add_special_tokens=add_special_tokens)
    except UserError as error:
        raise _refusal(error, where) from error


def checked_ids(ids: list[Any], where: str, vocab_size: int, param: str = "prompt") -> list[int]:
    """Returns `ids` if each is an id of the vocabulary; raises a 400 on `param` that names the first that is not."""
    for place, token in enumerate(ids):
        if not isinstance(token, int) or isinstance(token, bool):
            raise bad_request(f"{where}[{place}] should be a token id, not {type(token).__name__}", param)
        if not 0 <= token < vocab_size:
            raise bad_request(f"{where}[{place}]={token} is no token id; they go from 0 to {vocab_size - 1}", param)
    return ids


def truncated(prompt: Prompt, body: CompletionBody | ChatBody, state: ServerState) -> Prompt:
    """Returns the last `truncate_prompt_tokens` tokens of a prompt (-1: as many as the model takes)."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return prompt
    if keep != -1 and not 1 <= keep <= state.max_model_len:
        what = f"truncate_prompt_tokens={keep} should be -1 or from 1 to {state.max_model_len}"
        raise bad_request(what, "truncate_prompt_tokens")
    keep = state.max_model_len - 1 if keep == -1 else keep
    return prompt if len(prompt.token_ids) <= keep else Prompt(prompt.token_ids[-keep:])


def _as_list(prompt: Any) -> list[tuple[str, Any]]:
    """Each prompt with the place it stands at; a flat list of numbers is one prompt of token ids."""
    if prompt is None:
        raise bad_request("prompt is missing; send text, token ids, or a list of either", "prompt")
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and not isinstance(prompt[0], str | list)):
        return [("prompt", prompt)]
    if not isinstance(prompt, list):
        raise bad_request(f"prompt should be text or a list, not {type(prompt).__name__}", "prompt")
    if not prompt:
        raise bad_request("prompt is an empty list; send at least one prompt", "prompt")
    return [(f"prompt[{i}]", item) for i, item in enumerate(prompt)]


async def _prompt(item: Any, where: str, add_special_tokens: bool, state: ServerState) -> Prompt:
    if isinstance(item, str):
        prompt = Prompt(await encoded(item, where, add_special_tokens, state), item)
    elif isinstance(item, list):
        prompt = Prompt(checked_ids(item, where, state.vocab_size))
    else:
        raise bad_request(f"{where} should be text or a list of token ids, not {type(item).__name__}", "prompt")
    if not prompt.token_ids:
        raise bad_request(f"{where} is empty; a prompt needs at least one token", "prompt")
    return prompt


def _refusal(error: UserError, field: str) -> ApiError:
    if isinstance(error, PromptTooLong):
        return too_long(str(error), field)
    return as_api_error(error, field)
