"""The dispatcher's answers for every batch up to the limits, as rows that a person can read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from treadle.runtime.dispatch import BatchDescriptor, Capabilities, Dispatch, GraphKeys, dispatch


class Row(NamedTuple):
    """Batches of one kind with `start` to `end` tokens all get `mode`, at the captured size `padded_to` or (None) as they are."""

    batch: str
    start: int
    end: int
    mode: str
    padded_to: int | None
    reason: str


def dispatch_table(capabilities: Capabilities, keys: GraphKeys, *, max_tokens: int, max_reqs: int) -> list[Row]:
    """Decode steps (every request has `decode_query_len` tokens), then all others, in runs of equal answers."""
    decode = _decode(capabilities, keys, max_tokens, max_reqs)
    other = _other(capabilities, keys, max_tokens, max_reqs)
    return [*_rows("decode", decode, keys), *_rows("other", other, keys)]


def _decode(capabilities: Capabilities, keys: GraphKeys, max_tokens: int, max_reqs: int) -> Iterator[tuple[int, Dispatch]]:
    length = capabilities.decode_query_len
    for reqs in range(1, min(max_reqs, max_tokens // length) + 1):
        tokens = reqs * length
        yield tokens, dispatch(BatchDescriptor(num_tokens=tokens, num_reqs=reqs, uniform=True), capabilities, keys)


def _other(capabilities: Capabilities, keys: GraphKeys, max_tokens: int, max_reqs: int) -> Iterator[tuple[int, Dispatch]]:
    """Two requests of different lengths stand for all mixed batches: keys that are not uniform hold any number of them."""
    for tokens in range(1, max_tokens + 1):
        yield tokens, dispatch(BatchDescriptor(num_tokens=tokens, num_reqs=min(2, tokens, max_reqs)), capabilities, keys)


def _rows(batch: str, answers: Iterator[tuple[int, Dispatch]], keys: GraphKeys) -> list[Row]:
    rows: list[Row] = []
    for tokens, (mode, descriptor, reason) in answers:
        padded_to = descriptor.num_tokens if (mode, descriptor) in keys else None
        if rows and rows[-1][3:] == (mode.name, padded_to, reason):
            rows[-1] = rows[-1]._replace(end=tokens)
        else:
            rows.append(Row(batch, tokens, tokens, mode.name, padded_to, reason))
    return rows
