"""From what a caller passes as a prompt to core requests: token ids, checked parameters, one request for each of n.

Lengths: prompt and answer together have at most `max_model_len` tokens. A prompt that leaves no room for one token is
refused; a `max_tokens` beyond the room is clamped to it, so such a request ends with `length` at the model's limit.
Imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from treadle.ir.errors import UserError
from treadle.runtime.engine.model_info import ModelInfo
from treadle.runtime.protocol import CoreRequest
from treadle.runtime.renderer import INLINE_CHARS, Renderer
from treadle.runtime.sampling_params import SamplingParams

PromptInput = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text}, or {"prompt_token_ids": ids}; a mapping may add "cache_salt"."""

PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


class ProcessedRequest(msgspec.Struct, kw_only=True):
    """One request as the front end keeps it: the caller's view, and what the core gets for each completion."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float
    children: list[CoreRequest]


class InputProcessor:
    """Belongs to an engine front end. Without a renderer only token ids are accepted."""

    def __init__(self, info: ModelInfo, renderer: Renderer | None, *, generation_config: str = "auto"):
        self.info = info
        self.renderer = renderer
        self._defaults: dict[str, Any] = {}
        if renderer is not None and generation_config == "auto":
            self._defaults = dict(renderer.sampling_defaults)
        self._eos = list(renderer.eos_token_ids) if renderer is not None else []

    def default_params(self) -> SamplingParams:
        """What a request without parameters gets: the model's own sampling defaults, or neutral ones."""
        return SamplingParams(**self._defaults)

    def is_long(self, prompt: PromptInput) -> bool:
        """Whether tokenising the prompt takes so long that it does not belong on an event loop."""
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        return isinstance(text, str) and len(text) > INLINE_CHARS

    def process(
        self,
        prompt: PromptInput,
        params: SamplingParams | None,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> ProcessedRequest:
        """Checks and tokenises. Raises UserError naming what is wrong; nothing has been sent then."""
        text, token_ids, salt = self._read_prompt(prompt)
        self._check_tokens(token_ids)
        own = self._complete_params(params, len(token_ids))
        arrival = time.time()
        children = [
            CoreRequest(
                request_id=child_id(request_id, index, own.n),
                prompt_token_ids=token_ids,
                sampling_params=own.child(index),
                arrival_time=arrival,
                priority=priority,
                cache_salt=cache_salt or salt,
            )
            for index in range(own.n)
        ]
        return ProcessedRequest(
            request_id=request_id,
            prompt=text,
            prompt_token_ids=token_ids,
            params=own,
            arrival_time=arrival,
            children=children,
        )

    def _read_prompt(self, prompt: PromptInput) -> tuple[str | None, list[int], str | None]:
        """(text if there is one, token ids, cache salt)."""
        if isinstance(prompt, Mapping):
            return self._read_mapping(prompt)
        if isinstance(prompt, str):
            return prompt, self._encoder()(prompt), None
        if isinstance(prompt, Sequence):
            return None, _as_ids(prompt), None
        raise UserError(f"a prompt should be text, token ids or a mapping of them, not {type(prompt).__name__}")

    def _read_mapping(self, prompt: Mapping[str, Any]) -> tuple[str | None, list[int], str | None]:
        unknown = [key for key in prompt if key not in PROMPT_KEYS]
        if unknown:
            raise UserError(f"a prompt has no key {unknown[0]!r}; it takes {', '.join(PROMPT_KEYS)}")
        text, ids, salt = (prompt.get(key) for key in PROMPT_KEYS)
        if ids is not None:
            if not isinstance(ids, Sequence) or isinstance(ids, str):
                raise UserError(f"prompt_token_ids should be a list of token ids, not {type(ids).__name__}")
            return text, _as_ids(ids), salt
        if not isinstance(text, str):
            raise UserError('a prompt mapping needs "prompt" with a text or "prompt_token_ids" with token ids')
        return text, self._encoder()(text), salt

    def _encoder(self) -> Callable[[str], list[int]]:
        if self.renderer is None:
            raise UserError("this model has no tokenizer; pass prompts as token ids")
        return self.renderer.encode

    def _check_tokens(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise UserError("the prompt is empty; give it at least one token")
        limit, vocab_size = self.info.max_model_len, self.info.vocab_size
        if max(token_ids) >= vocab_size or min(token_ids) < 0:
            index = next(i for i, token in enumerate(token_ids) if not 0 <= token < vocab_size)
            raise UserError(
                f"prompt token {index} has id {token_ids[index]}, which is outside the model's vocabulary; "
                f"use ids from 0 to {vocab_size - 1}"
            )
        if len(token_ids) >= limit:
            raise UserError(
                f"the prompt has {len(token_ids)} tokens, but the model's limit is {limit} tokens, prompt and output "
                f"together; shorten the prompt to at most {limit - 1} tokens"
            )

    def _complete_params(self, params: SamplingParams | None, num_prompt: int) -> SamplingParams:
        """A copy with the model's stop ids, the bad words' ids and a `max_tokens` that fits."""
        own = (params if params is not None else self.default_params()).clone()
        own.fill_eos(self._eos)
        if own.bad_words:
            encode = self._encoder()
            own.fill_bad_words(lambda text: encode(text, add_special_tokens=False))  # type: ignore[call-arg]
        own.validate(vocab_size=self.info.vocab_size, max_model_len=self.info.max_model_len)
        room = self.info.max_model_len - num_prompt
        own.max_tokens = room if own.max_tokens is None else min(own.max_tokens, room)
        own.min_tokens = min(own.min_tokens, own.max_tokens)
        return own


def child_id(request_id: str, index: int, count: int) -> str:
    """Id of completion `index` in the core; a request with one completion keeps its own."""
    return request_id if count == 1 else f"{index}_{request_id}"


def _as_ids(prompt: Sequence[Any]) -> list[int]:
    ids = list(prompt)
    for index, token in enumerate(ids):
        if type(token) is not int:  # bool is no token id
            if hasattr(token, "__index__") and not isinstance(token, bool):
                ids[index] = int(token)  # numpy and torch integers
                continue
            raise UserError(f"prompt token {index} is {token!r}; a list of ints is expected")
    return ids
