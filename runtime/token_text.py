"""What single tokens stand for in bytes: for logprobs, which show tokens one by one, and for bounds on lengths."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache, cached_property
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenText:
    """Bytes of each token of a `tokenizers` tokenizer, read from its decoder: byte-level, byte fallback or plain."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        spec = json.loads(tokenizer.to_str())
        self._model: Mapping[str, Any] = spec["model"]
        self._normalizers = _parts(spec.get("normalizer"), "normalizers")
        decoders = [*_parts(spec.get("decoder"), "decoders"), *_parts(spec.get("pre_tokenizer"), "pretokenizers")]
        kinds = {part["type"] for part in decoders}
        self._byte_level = "ByteLevel" in kinds
        self._spaced = "Metaspace" in kinds or any(_replaces_space_mark(part) for part in decoders)
        self._added = {token_id: token.content for token_id, token in tokenizer.get_added_tokens_decoder().items()}
        self._cache: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """Returns the UTF-8 bytes the token adds to a text; they may be part of a character. Unknown ids are b""."""
        if token_id not in self._cache:
            self._cache[token_id] = self._bytes_of(token_id)
        return self._cache[token_id]

    def text_of(self, token_id: int) -> str:
        """Returns the token as text; bytes that are not whole characters show as U+FFFD."""
        return self.bytes_of(token_id).decode("utf-8", "replace")

    @cached_property
    def longest_bytes(self) -> int | None:
        """Most bytes of input that one token can cover, or None if a token can swallow any amount of text.

        Unbounded are tokenizers that fuse runs of unknown characters, strip or rewrite the text first, or have
        added tokens that absorb the spaces beside them.
        """
        covers_bytes = self._byte_level or bool(self._model.get("byte_fallback"))
        added = self._tokenizer.get_added_tokens_decoder().values()
        absorbs = any(token.lstrip or token.rstrip for token in added)
        if self._model.get("type") != "BPE" or not covers_bytes or absorbs:
            return None
        if not all(_keeps_length(part) for part in self._normalizers):
            return None
        return max(len(self.bytes_of(token_id)) for token_id in self._tokenizer.get_vocab().values())

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            table = _byte_level_table()
            return b"".join(bytes([table[c]]) if c in table else c.encode() for c in token)
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte:
            return bytes([int(byte[1], 16)])
        return (token.replace("\u2581", " ") if self._spaced else token).encode()


def _parts(component: Mapping[str, Any] | None, children: str) -> list[Mapping[str, Any]]:
    if component is None:
        return []
    return list(component[children]) if component["type"] == "Sequence" else [component]


def _keeps_length(normalizer: Mapping[str, Any]) -> bool:
    if normalizer["type"] == "Replace":
        return len(normalizer["pattern"].get("String", "  ")) <= 1 <= len(normalizer["content"])
    return normalizer["type"] in ("Prepend", "ByteLevel")


def _replaces_space_mark(part: Mapping[str, Any]) -> bool:
    return part["type"] == "Replace" and part.get("pattern") == {"String": "\u2581"}


@cache
def _byte_level_table() -> dict[str, int]:
    """Character -> byte, as in GPT-2's byte-level BPE: printable bytes are themselves, the others U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table
