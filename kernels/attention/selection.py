"""Picks the attention backend: candidates in order, the first that fits, and a reason for each that does not."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treadle.ir.errors import ConfigError
from treadle.kernels.attention import ATTENTION_BACKENDS
from treadle.kernels.attention.interface import AttentionQuery, CaptureSupport

logger = logging.getLogger(__name__)

AUTO = "auto"


@dataclass(frozen=True)
class Selection:
    """The chosen backend class and why each candidate before it was passed over (name -> reason)."""

    backend: Any
    passed_over: dict[str, str]


def select_backend(
    query: AttentionQuery, asked: str = AUTO, candidates: Sequence[str] | None = None
) -> Selection:
    """The backend for one kind of layer. `asked` other than "auto" is taken or refused, never replaced.

    `candidates` are names in order of preference (default: the order of the table). Raises ConfigError, which
    lists every candidate with its reason, when none fits (R-5.6).
    """
    if asked != AUTO:
        return Selection(_require(asked, query), {})
    passed_over: dict[str, str] = {}
    for name in candidates if candidates is not None else ATTENTION_BACKENDS.names():
        backend = ATTENTION_BACKENDS.get(name)
        reason = backend.unsupported_reason(query)
        if reason is None:
            _report(name, passed_over)
            return Selection(backend, passed_over)
        passed_over[name] = reason
    reasons = "\n".join(f"  {name}: {reason}" for name, reason in passed_over.items())
    raise ConfigError(f"no attention backend can serve {query}:\n{reasons or '  (no candidates)'}")


def _require(name: str, query: AttentionQuery) -> Any:
    backend = ATTENTION_BACKENDS.get(name)
    reason = backend.unsupported_reason(query)
    if reason is not None:
        raise ConfigError(
            f"attention backend {name!r} cannot serve this model: {reason}; "
            f"choose 'auto' or another of: {', '.join(ATTENTION_BACKENDS.names())}"
        )
    return backend


def _report(chosen: str, passed_over: dict[str, str]) -> None:
    for name, reason in passed_over.items():
        logger.warning("attention backend %s passed over for %s: %s", name, chosen, reason)


def lowest_capture_support(backends: Sequence[Any]) -> CaptureSupport:
    """The level that holds for a whole model; ALWAYS when it has no attention."""
    return min((backend.capture_support for backend in backends), default=CaptureSupport.ALWAYS)
