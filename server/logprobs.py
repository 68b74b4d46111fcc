"""Logprobs in the shapes of the two endpoints. A value is always finite, as JSON needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from treadle.runtime.outputs import Logprob
from treadle.runtime.token_text import TokenText

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot carry."""

Row = Mapping[int, Logprob]


def finite(value: float) -> float:
    """Returns a logprob as JSON can carry it."""
    return max(value, LOWEST) if math.isfinite(value) or value == -math.inf else LOWEST


def chat_logprobs(token_ids: Sequence[int], rows: Sequence[Row], top: int, texts: TokenText) -> dict[str, Any]:
    """Returns the `logprobs` of a chat choice: each token with its bytes and the `top` most likely ones."""
    content = []
    for token_id, row in zip(token_ids, rows, strict=True):
        best = [_chat_entry(i, logprob, texts) for i, logprob in _ranked(row)[:top]]
        content.append({**_chat_entry(token_id, row[token_id], texts), "top_logprobs": best})
    return {"content": content, "refusal": None}


def completion_logprobs(
    token_ids: Sequence[int], rows: Sequence[Row | None], top: int, texts: TokenText, *, offset: int = 0
) -> dict[str, Any]:
    """Returns the `logprobs` of a completion choice. `offset` is the position of the first token in the text.

    The first token of a prompt has none: its row is None and its logprob null.
    """
    tokens, values, tops, offsets = [], [], [], []
    for token_id, row in zip(token_ids, rows, strict=True):
        token = token_name(token_id, texts)
        tokens.append(token)
        offsets.append(offset)
        offset += len(texts.text_of(token_id))
        values.append(None if row is None else finite(row[token_id].logprob))
        tops.append(None if row is None else _top(token_id, row, top, texts))
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def prompt_logprobs(rows: Sequence[Row | None], texts: TokenText) -> list[dict[str, Any] | None]:
    """Returns the logprobs of a prompt by token id, as vLLM shows them; null for the first token."""
    return [
        None
        if row is None
        else {
            str(i): {"logprob": finite(lp.logprob), "rank": lp.rank, "decoded_token": texts.text_of(i)}
            for i, lp in row.items()
        }
        for row in rows
    ]


def token_name(token_id: int, texts: TokenText) -> str:
    """Returns a token as text, or as `bytes:\\xNN...` where its bytes are not whole characters."""
    raw = texts.bytes_of(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _top(token_id: int, row: Row, top: int, texts: TokenText) -> dict[str, float]:
    """The most likely tokens, and the one that was chosen even if it is not among them."""
    chosen = [(i, lp) for i, lp in _ranked(row)[:top] if i != token_id]
    return {token_name(i, texts): finite(lp.logprob) for i, lp in [(token_id, row[token_id]), *chosen]}


def _ranked(row: Row) -> list[tuple[int, Logprob]]:
    return sorted(row.items(), key=lambda item: -finite(item[1].logprob))


def _chat_entry(token_id: int, logprob: Logprob, texts: TokenText) -> dict[str, Any]:
    raw = texts.bytes_of(token_id)
    return {"token": texts.text_of(token_id), "logprob": finite(logprob.logprob), "bytes": list(raw)}
