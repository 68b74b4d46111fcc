"""The backend on xgrammar. Compiling, which may take any time and memory, happens in forks of a process of its own.

xgrammar passes over keywords that it does not know; `schema_audit` finds those before.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from treadle.codegen.workers import WorkerPool
from treadle.runtime.structured.constraint import (
    CHOICE,
    JSON,
    REGEX,
    STRUCTURAL_TAG,
    Constraint,
    GrammarError,
    GrammarTimeout,
)
from treadle.runtime.structured.exact_lengths import with_exact_lengths
from treadle.runtime.structured.interface import BackendOptions
from treadle.runtime.structured.schema_audit import ignored_by_xgrammar, regular_language_reason
from treadle.runtime.structured.structural_tags import parts, read_structural_tag
from treadle.runtime.structured.vocabulary import Vocabulary

_WORKER = "treadle.runtime.structured.xgrammar_worker"
_ALARM = -14
"""Exit code of a process that its alarm clock has ended."""


class XGrammarBackend:
    """Makes one worker process; each compilation is a fork of it that ends after `options.timeout` seconds."""

    package: ClassVar[str] = "xgrammar"

    def __init__(self, vocabulary: Vocabulary, options: BackendOptions):
        self._folder = tempfile.TemporaryDirectory(prefix="treadle-grammar-")
        self._options = options
        scratch = Path(self._folder.name)
        listed = [list(token) for token in vocabulary.tokens]
        (scratch / "vocabulary.json").write_text(json.dumps({"tokens": listed, "stop": vocabulary.eos_token_ids}))
        self._pool = WorkerPool(_WORKER, options.jobs, scratch, {}, [{"op": "prepare"}])
        self._pool.start()  # it starts while this process imports the library, too
        import xgrammar

        self._xgrammar = xgrammar
        self._tokens = xgrammar.TokenizerInfo(
            vocabulary.tokens,
            xgrammar.VocabType.RAW,
            vocab_size=len(vocabulary.tokens),
            stop_token_ids=vocabulary.eos_token_ids,
        )

    def unsupported_reason(self, constraint: Constraint) -> str | None:
        if constraint.kind == JSON:
            return ignored_by_xgrammar(json.loads(constraint.source))
        if constraint.kind == REGEX and (reason := regular_language_reason(constraint.source)):
            return f"regex: {reason}"
        if constraint.whitespace_pattern is not None:
            return "whitespace_pattern is not supported"
        if constraint.kind == STRUCTURAL_TAG:
            return _ignored_in_tag(read_structural_tag(constraint.source)["format"])
        return None

    def compile(self, constraint: Constraint) -> XGrammarCompiled:
        request = {"op": "compile", "kind": constraint.kind, "source": _source(constraint), "seconds": self._options.timeout}
        request |= {"whitespace": 0 if constraint.compact else self._options.max_whitespace, "closed": constraint.closed}
        start = time.monotonic()
        answer = self._pool.ask(request)
        if "error" in answer:
            raise self._error(constraint.kind, answer, time.monotonic() - start)
        path = Path(answer["path"])
        text = path.read_text()
        path.unlink()
        return XGrammarCompiled(self._xgrammar, self._xgrammar.CompiledGrammar.deserialize_json(text, self._tokens))

    def _error(self, kind: str, answer: dict[str, Any], seconds: float) -> GrammarError:
        status = answer.get("status")
        if status == _ALARM:
            limit = f"{self._options.timeout:g} s (structured_output_timeout)"
            return GrammarTimeout(f"{kind}: compiling took longer than {limit} and was stopped; simplify it")
        if status is not None:
            return GrammarTimeout(f"{kind}: the compiler ended with status {status} after {seconds:.1f} s; simplify it")
        if answer.get("slow"):
            return GrammarTimeout(f"{kind}: {answer['error']}: repetitions in it overlap; simplify it")
        return GrammarError(f"{kind}: {_tidy(answer['error'])}")

    def close(self) -> None:
        self._pool.close()
        self._folder.cleanup()


class XGrammarCompiled:
    """A compiled grammar of xgrammar."""

    def __init__(self, library: Any, compiled: Any):
        self._library = library
        self._compiled = compiled
        self.num_bytes: int = compiled.memory_size_bytes

    def start(self) -> XGrammar:
        return XGrammar(self._library.GrammarMatcher(self._compiled))


class XGrammar:
    """A matcher of xgrammar."""

    def __init__(self, matcher: Any):
        self._matcher = matcher

    @property
    def terminated(self) -> bool:
        return self._matcher.is_terminated()

    def fill_bitmask(self, mask: np.ndarray, row: int) -> None:
        if not self.terminated:
            self._matcher.fill_next_token_bitmask(mask, row)

    def accept_tokens(self, token_ids: Sequence[int]) -> bool:
        accepted = self._accept(token_ids)
        if accepted < len(token_ids):
            self.rollback(accepted)
        return accepted == len(token_ids)

    def validate_tokens(self, token_ids: Sequence[int]) -> list[int]:
        accepted = self._accept(token_ids)
        self.rollback(accepted)
        return list(token_ids[:accepted])

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def _accept(self, token_ids: Sequence[int]) -> int:
        """Accepts up to the first token that is not allowed; returns how many."""
        for index, token in enumerate(token_ids):
            if self.terminated or not self._matcher.accept_token(token):
                return index
        return len(token_ids)


def _source(constraint: Constraint) -> str:
    """What the worker compiles: a choice as a structural tag of constants, schemas with lengths that hold."""
    if constraint.kind == JSON:
        return json.dumps(with_exact_lengths(json.loads(constraint.source)), ensure_ascii=False)
    if constraint.kind == CHOICE:
        strings = [{"type": "const_string", "value": item} for item in json.loads(constraint.source)]
        return json.dumps({"type": "structural_tag", "format": {"type": "or", "elements": strings}})
    if constraint.kind == STRUCTURAL_TAG:
        tag = read_structural_tag(constraint.source)
        for _, part in parts(tag["format"]):
            if part["type"] == "json_schema":
                part["json_schema"] = with_exact_lengths(part["json_schema"])
        return json.dumps(tag)
    return constraint.source


def _ignored_in_tag(node: Any) -> str | None:
    for place, part in parts(node):
        reason = None
        if part["type"] == "json_schema":
            reason = ignored_by_xgrammar(part.get("json_schema"))
        elif part["type"] == "regex":
            reason = regular_language_reason(str(part.get("pattern")))
        if reason:
            return f"structural_tag at {place}: {reason}"
    return None


def _tidy(error: str) -> str:
    """The compiler's words without its own time stamps, source lines and class of error."""
    text = error.partition(": ")[2] or error
    if text.startswith("[") and ": " in text:
        text = text.partition("] ")[2].partition(": ")[2] or text
    return text.strip()
