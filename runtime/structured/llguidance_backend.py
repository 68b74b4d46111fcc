"""The backend on llguidance, which compiles as it goes: limits on its own work keep every step short, so threads will do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from treadle.runtime.structured.close_objects import close_objects
from treadle.runtime.structured.constraint import (
    CHOICE,
    GRAMMAR,
    JSON_OBJECT,
    REGEX,
    STRUCTURAL_TAG,
    Constraint,
    GrammarError,
)
from treadle.runtime.structured.interface import BackendOptions
from treadle.runtime.structured.structural_tags import read_structural_tag
from treadle.runtime.structured.vocabulary import Vocabulary

_BYTES_EACH = 64 << 10
"""About what a matcher holds beside its grammar; the library does not tell."""


class LLGuidanceBackend:
    """One tokenizer for all grammars. Compiling gives the interpreter lock up."""

    package: ClassVar[str] = "llguidance"

    def __init__(self, vocabulary: Vocabulary, options: BackendOptions):
        import llguidance

        self._library = llguidance
        self._options = options
        self._eos = list(vocabulary.eos_token_ids)
        self._tokenizer = llguidance.LLTokenizer(
            vocabulary.tokenizer_json, n_vocab=len(vocabulary.tokens), eos_token=self._eos
        )
        self._limits = llguidance.LLParserLimits(verbose_errors=False)

    def unsupported_reason(self, constraint: Constraint) -> str | None:
        if constraint.kind == STRUCTURAL_TAG:
            return _unsupported_tag(read_structural_tag(constraint.source)["format"])
        return None

    def compile(self, constraint: Constraint) -> LLGuidanceCompiled:
        library = self._library
        try:
            source = self._grammar(constraint)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"{constraint.kind}: {error}") from error
        matcher = library.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        trial = matcher.deep_copy()
        if not trial.is_error():
            trial.compute_bitmask()  # much is built only now; the error stays with the matcher
        if trial.is_error():
            raise GrammarError(f"{constraint.kind}: {_tidy(trial.get_error())}")
        return LLGuidanceCompiled(matcher, self._eos, _BYTES_EACH + 16 * len(constraint.source))

    def _grammar(self, constraint: Constraint) -> str:
        kind, source = constraint.kind, constraint.source
        matcher = self._library.LLMatcher
        if kind == REGEX:
            return matcher.grammar_from_regex(source)
        if kind == GRAMMAR:
            return self._library.grammar_from("ebnf", source)
        if kind == CHOICE:
            return self._library.grammar_from("choice", source)
        if kind == STRUCTURAL_TAG:
            return self._tagged(read_structural_tag(source)["format"])
        schema = {"type": "object"} if kind == JSON_OBJECT else close_objects(json.loads(source), everywhere=constraint.closed)
        return matcher.grammar_from_json_schema(json.dumps(schema), overrides=self._overrides(constraint))

    def _overrides(self, constraint: Constraint) -> dict[str, Any]:
        if constraint.whitespace_pattern is not None:
            return {"whitespace_pattern": constraint.whitespace_pattern}
        if constraint.compact or not self._options.max_whitespace:
            return {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
        return {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{self._options.max_whitespace}}}"}

    def _tagged(self, form: dict[str, Any]) -> str:
        tags = []
        for tag in form["tags"]:
            content = tag["content"]
            inner = content["json_schema"] if content["type"] == "json_schema" else f"start: /{_slashed(content['pattern'])}/"
            trigger = next((trigger for trigger in form["triggers"] if tag["begin"].startswith(trigger)), None)
            if trigger is None:
                raise GrammarError(f"structural_tag: no trigger is the beginning of {tag['begin']!r}")
            tags.append(self._library.StructTag(trigger=trigger, begin=tag["begin"], grammar=inner, end=tag["end"]))
        return self._library.StructTag.to_grammar(tags, assume_special=False)

    def close(self) -> None:
        """Nothing runs."""


class LLGuidanceCompiled:
    """A matcher before its first token, copied for each request."""

    def __init__(self, matcher: Any, eos_token_ids: Sequence[int], num_bytes: int):
        self._matcher = matcher
        self._eos = frozenset(eos_token_ids)
        self.num_bytes = num_bytes

    def start(self) -> LLGuidance:
        return LLGuidance(self._matcher.deep_copy(), self._eos)


class LLGuidance:
    """A matcher of llguidance. The end of the text is counted here: the library takes any number of end tokens."""

    def __init__(self, matcher: Any, eos_token_ids: frozenset[int]):
        self._matcher = matcher
        self._eos = eos_token_ids
        self._ended = False

    @property
    def terminated(self) -> bool:
        return self._ended

    def fill_bitmask(self, mask: np.ndarray, row: int) -> None:
        if self._ended:
            return
        words = mask[row]
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise RuntimeError(_tidy(self._matcher.get_error()))

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        ids = list(token_ids)
        if len(self.validate_tokens(ids)) < len(ids):
            return False
        text = ids[:-1] if ids and ids[-1] in self._eos else ids
        self._consume(text)
        self._ended = len(text) < len(ids)
        return True

    def validate_tokens(self, token_ids: Sequence[int]) -> list[int]:
        ids = list(token_ids)
        if self._ended or not ids:
            return []
        end = next((index for index, token in enumerate(ids) if token in self._eos), len(ids))
        count = self._matcher.validate_tokens(ids[:end]) if end else 0
        if count == end < len(ids) and self._may_end_after(ids[:end]):
            count += 1
        return ids[:count]

    def _may_end_after(self, text: list[int]) -> bool:
        self._consume(text)
        may_end = self._matcher.is_accepting()
        self.rollback(len(text))
        return may_end

    def _consume(self, text: list[int]) -> None:
        if text and not self._matcher.consume_tokens(text):
            raise RuntimeError(_tidy(self._matcher.get_error()))

    def rollback(self, num_tokens: int) -> None:
        if num_tokens and self._ended:
            self._ended = False
            num_tokens -= 1
        if num_tokens and not self._matcher.rollback(num_tokens):
            raise RuntimeError(_tidy(self._matcher.get_error()))


def _unsupported_tag(form: dict[str, Any]) -> str | None:
    """The library has tags that triggers start, with a schema or a pattern inside."""
    if form.get("type") != "triggered_tags":
        return f"structural_tag format {form.get('type')!r} is not supported"
    flags = [name for name in ("at_least_one", "stop_after_first", "excludes") if form.get(name)]
    if flags:
        return f"structural_tag {flags[0]!r} is not supported"
    for index, tag in enumerate(form.get("tags", ())):
        content = tag.get("content", {})
        if content.get("type") not in ("json_schema", "regex"):
            return f"structural_tag at $.tags[{index}].content: type {content.get('type')!r} is not supported"
        if not isinstance(tag.get("begin"), str) or not isinstance(tag.get("end"), str):
            return f"structural_tag at $.tags[{index}]: begin and end should be strings"
        if isinstance(content.get("json_schema"), bool):
            return f"structural_tag at $.tags[{index}].content: the schema should be an object"
    return None


def _slashed(pattern: Any) -> str:
    return str(pattern).replace("\\/", "/").replace("/", "\\/")


def _tidy(error: str) -> str:
    """The library's words without its state, on one line."""
    return " ".join(error.partition("\n<")[0].split())
