"""Token ids to text, one step at a time, and stop strings. Imports no torch.

Text is emitted only when later tokens can no longer change it: an incomplete UTF-8 character waits, as does
what could be the beginning of a stop string. All pieces joined are the text of the whole.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import DecodeStream

from treadle.runtime.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_REPLACEMENT = "\ufffd"
_INVALID_PREFIX = "Invalid prefix encountered"
_CONTEXT_TOKENS = 6


class TextDecoder(Protocol):
    """The part of `tokenizers.Tokenizer` that is needed here."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def get_added_tokens_decoder(self) -> Mapping[int, AddedToken]: ...


class PlainStream:
    """Streaming decoder in pure Python, for any `TextDecoder`; the same text as `FastStream`.

    It keeps two runs of ids: `context`, whose text has been emitted, and `pending`, whose text has not.
    The next text is what decoding both gives beyond decoding the context alone.

        ids:   ... already emitted | context | pending
        text:  ................... | prefix  | (withheld while it ends in an incomplete character)
    """

    def __init__(self, tokenizer: TextDecoder, context: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self.pending: list[int] = []
        self._restart(context)

    def step(self, token_id: int) -> str:
        """Takes one id; returns the text that is complete now. Raises OverflowError or TypeError for a non-id."""
        self.pending.append(token_id)
        try:
            text = self._complete_text()
        except (OverflowError, TypeError):
            self.pending.pop()
            raise
        if text is None:
            self._restart(())
            text = self._complete_text()
        if text:
            self._restart(self.pending)
            self.pending = []
        return text or ""

    def flush(self) -> str:
        """Returns what was withheld, incomplete characters as U+FFFD."""
        if not self.pending:
            return ""
        full, prefix = self._decode([*self._context, *self.pending]), self._decode(self._context)
        text = full[len(prefix) :] if full.startswith(prefix) else self._decode(self.pending)
        self.pending = []
        return text

    def _restart(self, context: Sequence[int]) -> None:
        self._context = list(context)
        self._prefix = self._decode(self._context)

    def _complete_text(self) -> str | None:
        """New text, "" if it must wait, None if the context's text changed (bytes that turned out invalid)."""
        full = self._decode([*self._context, *self.pending])
        if full.endswith(_REPLACEMENT) or len(full.encode()) <= len(self._prefix.encode()):
            return ""
        return full[len(self._prefix) :] if full.startswith(self._prefix) else None

    def _decode(self, ids: Sequence[int]) -> str:
        # Special tokens to be skipped never get here.
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class FastStream(PlainStream):
    """The same through the tokenizers library's own streaming decoder."""

    _tokenizer: Tokenizer  # type: ignore[override]

    def step(self, token_id: int) -> str:
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception as error:  # the library raises a bare Exception
            if not str(error).startswith(_INVALID_PREFIX):
                raise
            logger.warning("Streaming decoder restarted at token %d: %s", token_id, error)
            self._restart(())
            text = self._stream.step(self._tokenizer, [*self.pending, token_id])
        self.pending.append(token_id)
        if text:
            self._context, self.pending = self.pending, []
        return text or ""

    def _restart(self, context: Sequence[int]) -> None:
        self._context = list(context)
        self._stream = DecodeStream(ids=list(context), skip_special_tokens=False)


class Detokenizers:
    """Makes detokenizers for one tokenizer and keeps what they share. `tokenizer=None` gives no text at all."""

    def __init__(self, tokenizer: TextDecoder | None, *, fast: bool | None = None):
        self.tokenizer = tokenizer
        self.fast = isinstance(tokenizer, Tokenizer) if fast is None else fast
        added = tokenizer.get_added_tokens_decoder() if tokenizer is not None else {}
        self.added_tokens = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    def create(self, params: SamplingParams, prompt_token_ids: Sequence[int] = ()) -> IncrementalDetokenizer:
        """A detokenizer of one completion; the prompt's end decides whether the first word keeps its space."""
        return IncrementalDetokenizer(self, params, prompt_token_ids)

    def stream(self, context: Sequence[int]) -> PlainStream:
        """A streaming decoder whose first text continues `context`."""
        assert self.tokenizer is not None
        kind: Any = FastStream if self.fast else PlainStream
        tail = list(context)[-_CONTEXT_TOKENS:]
        # A context that ends inside a character has no definite text to continue.
        if self.tokenizer.decode(tail, skip_special_tokens=False).endswith(_REPLACEMENT):
            tail = []
        return kind(self.tokenizer, tail)

    def token_text(self, token_id: int) -> str:
        """One token by itself, special ones included, as logprobs show it."""
        return self.tokenizer.decode([token_id], skip_special_tokens=False) if self.tokenizer else ""


class IncrementalDetokenizer:
    """The text of one completion so far, without what may not be shown yet. Ends at the first stop string."""

    def __init__(self, shared: Detokenizers, params: SamplingParams, prompt_token_ids: Sequence[int] = ()):
        self.token_ids: list[int] = []
        self.text = ""
        self._shared = shared
        self._skipped = shared.special_ids if params.skip_special_tokens else frozenset()
        self._stream: PlainStream | None = None
        if shared.tokenizer is not None and params.detokenize:
            self._stream = shared.stream([i for i in prompt_token_ids[-64:] if i not in self._skipped])
        joins_specials = params.skip_special_tokens or params.spaces_between_special_tokens
        self._added_tokens = {} if joins_specials else shared.added_tokens
        self._after_added_token = False

        self._stops = params.stop_strings
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._num_withheld = 0 if self._include_stop else max(map(len, self._stops), default=1) - 1
        self._num_emitted = 0

    def update(
        self, new_token_ids: Sequence[int], *, finished: bool = False, stop_terminated: bool = False
    ) -> str | None:
        """Decodes new ids; returns the stop string that was found, if one was.

        `finished`: the engine says that these are the last ids, so everything withheld becomes text.
        `stop_terminated`: the last id is a stop token that ended the request; it gives no text unless the stop
        is to be included.
        After a stop string: `text` and `token_ids` end with it, the request must be aborted in the engine core
        (unless `finished`), and the completion's finish reason is "stop" with this string as stop reason.
        """
        num_silent = 1 if stop_terminated and not self._include_stop and new_token_ids else 0
        num_decoded = len(new_token_ids) - num_silent
        for token_id in new_token_ids[:num_decoded]:
            self.token_ids.append(token_id)
            if stop := self._append(self._decode(token_id)):
                return stop
        self.token_ids.extend(new_token_ids[num_decoded:])
        if (finished or stop_terminated) and self._stream is not None:
            return self._append(self._stream.flush())
        return None

    def next_output_text(self, finished: bool, delta: bool) -> str:
        """All text so far, or with `delta` what was not returned yet; the end is withheld until `finished`."""
        end = len(self.text) if finished else max(0, len(self.text) - self._num_withheld)
        if not delta:
            return self.text[:end]
        start, self._num_emitted = self._num_emitted, max(self._num_emitted, end)
        return self.text[start:end]

    def _append(self, text: str) -> str | None:
        """Adds text, then looks for stop strings that end in it; nothing ends a text within `min_tokens`."""
        self.text += text
        if not text or len(self.token_ids) <= self._min_tokens:
            return None
        found = find_stop(self.text, len(text), self._stops, include_stop=self._include_stop)
        if found is None:
            return None
        stop, end = found
        self.text = self.text[:end]
        return stop

    def _decode(self, token_id: int) -> str:
        if self._stream is None or token_id in self._skipped:
            return ""
        try:
            text = self._stream.step(token_id)
        except (OverflowError, TypeError):
            logger.exception("Token id %r cannot be decoded and gives no text", token_id)
            return ""
        content = self._added_tokens.get(token_id)
        if text and content is not None and self._after_added_token:
            text = content  # without the space that the decoder puts between tokens
        self._after_added_token = content is not None
        return text


def find_stop(text: str, num_new: int, stops: Sequence[str], *, include_stop: bool) -> tuple[str, int] | None:
    """Returns the stop string that ends first within the last `num_new` characters, and where to cut the text.

    Of two that end together, the longer one wins.
    """
    best: tuple[int, int, str] | None = None
    for stop in stops:
        start = text.find(stop, max(0, len(text) - num_new - len(stop) + 1))
        if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
            best = (start + len(stop), start, stop)
    if best is None:
        return None
    end, start, stop = best
    return stop, end if include_stop else start
