"""What a user may ask of one generation, with vLLM's argument names and defaults, and the checks on it.

Imports no torch. Sampling itself lives in `runtime.sampling`, stop strings in `runtime.detokenizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any

import msgspec

from treadle.ir.errors import UserError
from treadle.runtime.structured.constraint import StructuredOutputsParams

MAX_N = 16384
"""Most completions of one request."""

MIN_TEMPERATURE = 1e-3
"""A lower temperature is greedy: in float32 it differs from the argmax only by how it breaks near ties."""

MAX_LOGIT_BIAS = 1e9
MIN_INT64, MAX_INT64 = -(2**63), 2**63 - 1


class RequestOutputKind(IntEnum):
    """What each output carries: all text so far, the text since the last output, or only the finished text."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sampling options of one request; construction raises `UserError` naming the field and its valid range.

    `stop` is normalised to a list; every int64 is a seed (-1 too); `top_k` 0 or -1 is off; `max_tokens=None`
    means up to the model's length. A temperature under `MIN_TEMPERATURE` is greedy.
    The last three fields are filled by the front end (`fill_eos`, `fill_bad_words`).
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    extra_args: dict[str, Any] | None = None
    structured_outputs: StructuredOutputsParams | None = None

    eos_token_id: int | None = None
    all_stop_token_ids: set[int] = msgspec.field(default_factory=set)
    bad_words_token_ids: list[list[int]] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        self.stop = _as_list("stop", [self.stop] if isinstance(self.stop, str) else self.stop)
        self.stop_token_ids = _as_list("stop_token_ids", self.stop_token_ids)
        self.bad_words = _as_list("bad_words", self.bad_words)
        if self.logit_bias is not None:
            self.logit_bias = _int_keys(self.logit_bias)
        self.structured_outputs = _structured(self.structured_outputs)
        self._check_values()
        self.all_stop_token_ids = self.all_stop_token_ids | set(self.stop_token_ids)

    @property
    def greedy(self) -> bool:
        """Whether every token is the argmax of the processed logits."""
        return self.temperature < MIN_TEMPERATURE

    @property
    def wants_logprobs(self) -> bool:
        """Whether each sampled token comes with logprobs: of the likeliest tokens, or of named ones."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    @property
    def stop_strings(self) -> list[str]:
        """`stop` in its normalised form."""
        return self.stop if isinstance(self.stop, list) else []

    def validate(self, *, vocab_size: int, max_model_len: int) -> None:
        """Raises UserError unless every value is in range for a model of this vocabulary and length.

        The prompt's length is not known here: whoever adds a prompt checks or clamps `max_tokens` against it.
        """
        self._check_values()
        for field in ("logprobs", "prompt_logprobs"):
            _check_range(field, getattr(self, field) or 0, -1, vocab_size)
        _check_range("min_tokens", self.min_tokens, 0, max_model_len - 1)
        _check_token_ids("stop_token_ids", self.stop_token_ids or (), vocab_size)
        _check_token_ids("allowed_token_ids", self.allowed_token_ids or (), vocab_size)
        _check_token_ids("logprob_token_ids", self.logprob_token_ids or (), vocab_size)
        _check_token_ids("logit_bias", self.logit_bias or (), vocab_size)
        for word in self.bad_words_token_ids:
            _check_token_ids("bad_words_token_ids", word, vocab_size)

    def fill_eos(self, eos_token_ids: Sequence[int]) -> None:
        """Fills the stop ids from the model's end-of-sequence ids, the primary one first.

        Afterwards `all_stop_token_ids` holds every id that ends the request (none of the model's with
        `ignore_eos`), and the secondary ones stand in `stop_token_ids` too.
        """
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else None
        if not self.ignore_eos:
            own = list(self.stop_token_ids or ())
            self.stop_token_ids = own + [i for i in eos_token_ids[1:] if i not in own]
            self.all_stop_token_ids = {*own, *eos_token_ids}

    def fill_bad_words(self, encode: Callable[[str], list[int]]) -> None:
        """Fills `bad_words_token_ids`; `encode` maps text to ids without special tokens.

        A word is forbidden both at the start of a text and after a space, as one token sequence each.
        """
        sequences: list[list[int]] = []
        for word in self.bad_words or ():
            bare = word.lstrip()
            for text in (bare, " " + bare):
                ids = encode(text)
                if ids and ids not in sequences:
                    sequences.append(ids)
        self.bad_words_token_ids = sequences

    def clone(self) -> SamplingParams:
        """Returns a copy that shares no list, dict or set with this one."""
        return msgspec.structs.replace(
            self,
            stop=list(self.stop_strings),
            stop_token_ids=list(self.stop_token_ids or ()),
            bad_words=list(self.bad_words or ()),
            logit_bias=dict(self.logit_bias) if self.logit_bias is not None else None,
            allowed_token_ids=list(self.allowed_token_ids) if self.allowed_token_ids is not None else None,
            logprob_token_ids=list(self.logprob_token_ids) if self.logprob_token_ids is not None else None,
            extra_args=dict(self.extra_args) if self.extra_args is not None else None,
            all_stop_token_ids=set(self.all_stop_token_ids),
            bad_words_token_ids=[list(word) for word in self.bad_words_token_ids],
        )

    def child(self, index: int) -> SamplingParams:
        """Returns the parameters of completion `index` of `n`: n is 1 and the seed, if any, is `seed + index`."""
        params = self.clone()
        params.n = 1
        if self.seed is not None:
            params.seed = (self.seed + index - MIN_INT64) % 2**64 + MIN_INT64
        return params

    def _check_values(self) -> None:
        _check_range("n", self.n, 1, MAX_N)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        _check_range("temperature", self.temperature, 0.0, 1e6)
        _check_range("top_p", self.top_p, 0.0, 1.0, above=True)
        _check_range("top_k", self.top_k, -1, MAX_INT64, integer=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_range("seed", self.seed, MIN_INT64, MAX_INT64, integer=True)
        if self.max_tokens is not None:
            _check_range("max_tokens", self.max_tokens, 1, MAX_INT64, integer=True)
        top = self.max_tokens if self.max_tokens is not None else MAX_INT64
        _check_range("min_tokens", self.min_tokens, 0, top, integer=True, note=" (max_tokens)")
        for field in ("logprobs", "prompt_logprobs"):
            if getattr(self, field) is not None:
                _check_range(field, getattr(self, field), -1, MAX_INT64, integer=True, note=", -1 for all")
        self._check_collections()

    def _check_collections(self) -> None:
        for field, words in (("stop", self.stop_strings), ("bad_words", self.bad_words or ())):
            for word in words:
                if not isinstance(word, str) or not word.strip("" if field == "stop" else " "):
                    raise _bad(field, word, "made of non-empty strings")
        if self.stop_strings and not self.detokenize:
            raise _bad("stop", self.stop, "empty when detokenize is False: stop strings are found in text")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise _bad("allowed_token_ids", [], "None or at least one token id")
        for field in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
            for token in getattr(self, field) or ():
                _check_range(field, token, 0, MAX_INT64, integer=True)
        for bias in (self.logit_bias or {}).values():
            _check_range("logit_bias", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
        if not isinstance(self.output_kind, RequestOutputKind):
            raise _bad("output_kind", self.output_kind, "one of: " + ", ".join(RequestOutputKind.__members__))


def _bad(field: str, value: object, should: str) -> UserError:
    return UserError(f"SamplingParams.{field}={value!r} should be {should}")


def _check_range(
    field: str,
    value: object,
    low: float,
    high: float,
    *,
    above: bool = False,
    integer: bool | None = None,
    note: str = "",
) -> None:
    """Rejects a non-number, NaN, and anything outside [low, high], or (low, high] with `above`."""
    whole = isinstance(low, int) if integer is None else integer
    kinds = (int,) if whole else (int, float)
    right_kind = isinstance(value, kinds) and not isinstance(value, bool)
    if right_kind and (low < value if above else low <= value) and value <= high:  # type: ignore[operator]
        return
    what = "an integer" if whole else "a number"
    bounds = f"above {low} and at most {high}" if above else f"from {low} to {high}"
    if whole and high == MAX_INT64 and low != MIN_INT64:
        bounds = f"of at least {low}"
    raise _bad(field, value, f"{what} {bounds}{note}")


def _check_token_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise UserError(
                f"SamplingParams.{field} names token id {token}, which is outside the model's vocabulary; "
                f"use ids from 0 to {vocab_size - 1}"
            )


def _as_list(field: str, value: object) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    raise _bad(field, value, "a list")


def _structured(value: Any) -> StructuredOutputsParams | None:
    """A mapping is taken for the arguments of StructuredOutputsParams."""
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, dict):
        raise _bad("structured_outputs", value, "a StructuredOutputsParams or a mapping of its fields")
    unknown = sorted(set(value) - set(StructuredOutputsParams.__struct_fields__))
    if unknown:
        fields = ", ".join(StructuredOutputsParams.__struct_fields__)
        raise UserError(f"SamplingParams.structured_outputs has no field {unknown[0]!r}; it takes {fields}")
    return StructuredOutputsParams(**value)


def _int_keys(bias: object) -> dict[int, float]:
    """Token ids may arrive as decimal strings, as JSON spells object keys."""
    if not isinstance(bias, dict):
        raise _bad("logit_bias", bias, "a mapping of token ids to numbers")
    keys: dict[int, float] = {}
    for key, value in bias.items():
        text = str(key)
        if isinstance(key, bool) or not text.isascii() or not text.isdigit():
            raise _bad("logit_bias", bias, f"keyed by token ids, not {key!r}")
        keys[int(text)] = value
    return keys
