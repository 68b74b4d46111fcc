"""Messages and texts to token ids and back, from a `tokenizer/` folder alone: tokenizers and jinja2, nothing else.

One renderer belongs to an engine and is shared by every way in, so that each gives the same ids. Imports
neither torch nor transformers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from treadle.ir.errors import ModelError, UserError
from treadle.runtime.chat.messages import ChatError
from treadle.runtime.chat.template import ChatTemplate
from treadle.runtime.token_text import TokenText

INLINE_CHARS = 4096
"""Longest text that is tokenised on the event loop itself (about 2 ms); longer ones go to a thread.

Tokenising was measured linear from 1,000 to 4,000,000 characters of one class (letters, spaces, line ends,
emoji) for byte-level BPE with the patterns of GPT-2, cl100k, o200k and DeepSeek: 0.3 to 2 s a million.
"""

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What of a model's generation_config.json changes how an engine samples by default."""

_TEMPLATE_NAMES = ("default", "tool_use")


class PromptTooLong(UserError):
    """A text that cannot fit the model however it is tokenised."""


@dataclass(frozen=True)
class Prompt:
    """A rendered prompt: its ids and, where it was given or rendered as text, that text."""

    token_ids: list[int]
    text: str | None = None


class Renderer:
    """Encodes, decodes and renders for one model. Built once by `load`; safe to share between threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        templates: Mapping[str, ChatTemplate] | None = None,
        special_tokens: Mapping[str, str] | None = None,
        generation_config: Mapping[str, Any] | None = None,
        eos_token_ids: Sequence[int] | None = None,
        max_model_len: int | None = None,
    ):
        """`max_model_len`, once known, lets `encode` refuse texts that are too long before tokenising them."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.templates = dict(templates or {})
        self.special_tokens = dict(special_tokens or {})
        self.generation_config = dict(generation_config or {})
        self.token_text = TokenText(tokenizer)
        self.eos_token_ids = list(eos_token_ids) if eos_token_ids is not None else self._eos_token_ids()
        self.max_model_len = max_model_len

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        only: Collection[str] | None = None,
        max_model_len: int | None = None,
        eos_token_ids: Sequence[int] | None = None,
    ) -> Renderer:
        """Reads a folder with tokenizer.json and, if present, tokenizer_config.json, special_tokens_map.json,
        chat_template.jinja, additional_chat_templates/, generation_config.json and config.json (for its eos).

        With `only` no other file is looked at (paths within the folder): a bundle lists what may be read. Raises
        ModelError naming the file that is missing or cannot be read.
        """
        files = _Files(Path(folder), only)
        config = files.json("tokenizer_config.json")
        special = _special_tokens({**files.json("special_tokens_map.json"), **config})
        sources = _template_sources(files, config)
        eos = files.json("config.json").get("eos_token_id")
        generation = {"eos_token_id": eos} if eos is not None else {}
        generation |= {k: v for k, v in files.json("generation_config.json").items() if v is not None}
        return cls(
            _read_tokenizer(files),
            templates={name: ChatTemplate(source, special) for name, source in sources.items()},
            special_tokens=special,
            generation_config=generation,
            eos_token_ids=eos_token_ids,
            max_model_len=max_model_len,
        )

    @property
    def vocab_size(self) -> int:
        """Number of ids the tokenizer knows; a model's logits may be wider."""
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def sampling_defaults(self) -> dict[str, float | int]:
        """The model's own sampling defaults, as arguments of SamplingParams; `max_tokens` from max_new_tokens."""
        found = {name: self.generation_config[name] for name in SAMPLING_DEFAULTS if name in self.generation_config}
        if "max_new_tokens" in self.generation_config:
            found["max_tokens"] = self.generation_config["max_new_tokens"]
        return found

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of `text`. Raises PromptTooLong, or UserError for text that is not valid Unicode."""
        self._check_text(text)
        # The batch call releases the interpreter lock, which the single call does not.
        return self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    async def encode_async(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Like `encode`; a long text is tokenised in a thread, so that the event loop goes on."""
        if len(text) <= INLINE_CHARS:
            return self.encode(text, add_special_tokens=add_special_tokens)
        self._check_text(text)
        return await asyncio.to_thread(self.encode, text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Returns the text of `token_ids`; ids outside the vocabulary add nothing."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def count(self, text: str, *, add_special_tokens: bool = True) -> int:
        """Returns the number of tokens of `text`."""
        return len(self.encode(text, add_special_tokens=add_special_tokens))

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Prompt:
        """Returns the prompt for chat messages; `options` are those of `ChatTemplate.render`.

        Special tokens come from the template, so the tokenizer adds none. Raises ChatError.
        """
        text = self.chat_text(messages, **options)
        return Prompt(self.encode(text, add_special_tokens=False), text)

    async def render_chat_async(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Prompt:
        """Like `render_chat`, in a thread when it is long."""
        if _size(messages) <= INLINE_CHARS:
            return self.render_chat(messages, **options)
        return await asyncio.to_thread(self.render_chat, messages, **options)

    def chat_text(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Returns the text of a chat prompt, before tokenising."""
        return self.chat_template(with_tools=bool(options.get("tools"))).render(messages, **options)

    def chat_template(self, *, with_tools: bool = False) -> ChatTemplate:
        """Returns the template in use; models may have another one for tools. Raises ChatError if there is none."""
        for name in reversed(_TEMPLATE_NAMES) if with_tools else _TEMPLATE_NAMES[:1]:
            if name in self.templates:
                return self.templates[name]
        raise ChatError(
            "this model has no chat template; use /v1/completions (generate), or build the bundle from a model"
            " with a chat_template.jinja"
        )

    @cached_property
    def special_marks(self) -> frozenset[str]:
        """The texts of special tokens, which `skip_special_tokens` leaves out."""
        added = self.tokenizer.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    @property
    def template_source(self) -> str | None:
        """The template that requests with tools use; None without any. Shows what form a model writes calls in."""
        return next((self.templates[name].source for name in reversed(_TEMPLATE_NAMES) if name in self.templates), None)

    def warm_up(self) -> None:
        """Does once what the first request would otherwise pay for: probes the template, encodes and decodes."""
        self.decode(self.encode("warm-up"))
        for template in self.templates.values():
            _ = template.content_format, template.shows_tools, template.shows_tool_calls, template.shows_system
        _ = self.token_text.longest_bytes

    def _check_text(self, text: str) -> None:
        if not isinstance(text, str):
            raise UserError(f"a prompt's text should be a string, not {type(text).__name__}")
        if self.max_model_len is not None and len(text) > self.max_model_len:
            self._check_length(text, self.max_model_len)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            what = f"U+{ord(text[error.start]):04X} at character {error.start}"
            raise UserError(f"the prompt is not valid Unicode: {what} is half of a surrogate pair") from error

    def _check_length(self, text: str, limit: int) -> None:
        """Apart from `_check_text`: to know the longest token takes a look at each, which a short text need not pay."""
        longest = self.token_text.longest_bytes
        if longest is not None and len(text) > limit * longest:
            raise PromptTooLong(
                f"the prompt has {len(text)} characters, which is more than {limit} tokens can hold:"
                f" the model's limit is {limit} tokens and no token has more than {longest} bytes"
            )

    def _eos_token_ids(self) -> list[int]:
        """The ids that end a generation, the primary one first: the model's configuration, else the tokenizer's."""
        configured = self.generation_config.get("eos_token_id")
        if configured is not None:
            return [configured] if isinstance(configured, int) else list(configured)
        token_id = self.tokenizer.token_to_id(self.special_tokens.get("eos_token", ""))
        return [] if token_id is None else [token_id]


def _size(value: Any) -> int:
    """About how many characters messages hold, without writing them out."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return 16 + sum(_size(inner) for inner in value.values())
    if isinstance(value, Sequence):
        return 16 + sum(_size(inner) for inner in value)
    return 16


class _Files:
    """The files of a tokenizer folder that may be read."""

    def __init__(self, folder: Path, only: Collection[str] | None):
        self.folder = folder
        self._only = only

    def has(self, name: str) -> bool:
        return (self._only is None or name in self._only) and (self.folder / name).exists()

    def text(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8")

    def json(self, name: str) -> dict[str, Any]:
        """The object in a file; an empty one if there is no such file."""
        if not self.has(name):
            return {}
        path = self.folder / name
        try:
            content = json.loads(self.text(name))
        except ValueError as error:
            raise ModelError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(content, dict):
            raise ModelError(f"{path} should hold a JSON object, not {type(content).__name__}")
        return content

    def templates(self) -> list[str]:
        found = (path.relative_to(self.folder).as_posix() for path in self.folder.glob("additional_chat_templates/*.jinja"))
        return sorted(name for name in found if self.has(name))


def _read_tokenizer(files: _Files) -> Tokenizer:
    path = files.folder / "tokenizer.json"
    if not files.has("tokenizer.json"):
        raise ModelError(f"{path} is missing; a model needs a fast tokenizer (tokenizer.json)")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise ModelError(f"{path} cannot be read as a tokenizer: {error}") from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text of the special tokens; a token may be written as a string or as an object with a content."""
    found: dict[str, str] = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, Mapping) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _template_sources(files: _Files, config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> source of the chat templates; files win over the key in tokenizer_config.json."""
    declared = config.get("chat_template")
    sources: dict[str, str] = {}
    if isinstance(declared, str):
        sources["default"] = declared
    elif isinstance(declared, list):
        sources = {entry["name"]: entry["template"] for entry in declared}
    if files.has("chat_template.jinja"):
        sources["default"] = files.text("chat_template.jinja")
    for name in files.templates():
        sources[Path(name).stem] = files.text(name)
    return sources
