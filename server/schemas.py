"""What requests may carry. Types are strict: a string where a number belongs is refused, not converted.

Unknown fields are accepted, as OpenAI's own servers and clients of this field expect, but logged with the
names they resemble. Fields that would change the answer and cannot be honoured here are refused by name.
"""

from __future__ import annotations

import difflib
import logging
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from treadle.server.errors import bad_request

logger = logging.getLogger(__name__)

UNSUPPORTED = {
    "suffix": "text is only ever continued at its end",
    "use_beam_search": "sampling is by token",
    "prompt_embeds": "prompts are text or token ids",
    "audio": "answers are text",
    "prediction": "there is no predicted output",
    "functions": "send tools instead",
    "function_call": "send tools instead",
    "chat_template": "the template is the model's own",
    "documents": "put documents into messages",
}
"""Fields that would silently change nothing if they were ignored -> why they cannot be honoured."""

HARMLESS = {"user", "store", "metadata", "service_tier", "safety_identifier", "verbosity"}
HARMLESS |= {"prompt_cache_key", "prompt_cache_retention", "modalities", "web_search_options"}
"""Fields of OpenAI's API that change nothing here and are not worth a warning."""


class Body(BaseModel):
    """Base of request bodies."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=(), arbitrary_types_allowed=False)
    model: str | None = None

    warned: ClassVar[set[str]] = set()

    def check_extra(self) -> None:
        """Refuses what cannot be honoured, and logs once what is not known."""
        for name, value in (self.model_extra or {}).items():
            if name in UNSUPPORTED and value not in (None, False, "", [], {}):
                raise bad_request(f"{name} is not supported: {UNSUPPORTED[name]}", name, "unsupported_parameter")
            if name not in UNSUPPORTED and name not in HARMLESS and len(Body.warned) < 1000 and name not in Body.warned:
                Body.warned.add(name)
                close = difflib.get_close_matches(name[:64], type(self).model_fields, n=3)
                hint = f"; did the caller mean {' or '.join(close)}?" if close else ""
                logger.warning("ignoring the unknown field %r of a request%s", name[:64], hint)


class StreamOptions(BaseModel):
    """`include_usage`: one last chunk with the usage. `continuous_usage_stats`: usage in every chunk as well."""

    model_config = ConfigDict(strict=True, extra="ignore")
    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchemaFormat(BaseModel):
    """OpenAI's wrapping of a JSON schema. `strict` changes nothing: the schema always holds."""

    model_config = ConfigDict(strict=True, extra="ignore", populate_by_name=True)
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """`text`, `json_object`, `json_schema`, or `structural_tag` with its own fields beside."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: str
    json_schema: JsonSchemaFormat | None = None


class SamplingBody(Body):
    """Sampling fields of both generating endpoints, in OpenAI's names and, for the rest, vLLM's."""

    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    priority: int = 0
    cache_salt: str | None = None
    request_id: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def check(self) -> None:
        """Refuses combinations that cannot be honoured; raises ApiError naming the field."""
        self.check_extra()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise bad_request(f"best_of={self.best_of} is not supported; leave it out or set it to n", "best_of")
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options is only allowed together with stream: true", "stream_options")
        if self.cache_salt == "":
            raise bad_request("cache_salt should not be empty; leave it out to share the prefix cache", "cache_salt")

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.include_usage and self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionBody(SamplingBody):
    """Body of /v1/completions. `prompt` is text, a list of texts, token ids, or a list of lists of token ids."""

    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = None


class ChatBody(SamplingBody):
    """Body of /v1/chat/completions. The shape of messages is checked where they are normalised."""

    messages: Any = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")


class TokenizeBody(Body):
    """Body of /tokenize: a `prompt`, or `messages` as in a chat."""

    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool = False


class DetokenizeBody(Body):
    tokens: list[int] = Field(...)
    skip_special_tokens: bool = False
