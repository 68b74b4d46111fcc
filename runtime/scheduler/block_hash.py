"""Hashes of full blocks of tokens, chained so that each covers everything from the start of the sequence.

`hash = H(parent hash, token ids, extra keys)`; the parent of the first block is a root that depends on a seed.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import xxhash

from treadle.runtime.kv_specs import choose
from treadle.runtime.request import Request

logger = logging.getLogger(__name__)

FIXED_SEED = "treadle prefix cache"
HASHES: dict[str, Callable[[bytes], bytes]] = {
    "sha256": lambda data: hashlib.sha256(data).digest(),
    "xxhash": lambda data: xxhash.xxh3_128_digest(data),
}
CRYPTOGRAPHIC = frozenset({"sha256"})


def index_key(block_hash: bytes, group: int) -> bytes:
    """Returns the key of a block in the prefix index; the same tokens have one in each KV-cache group."""
    return block_hash + group.to_bytes(4, "big")


def environment_seed() -> str | None:
    """Python's own hash seed, which users set to make processes agree; None if unset or explicitly random."""
    seed = os.environ.get("PYTHONHASHSEED")
    return None if seed == "random" else seed or None


def root_hash(algorithm: str, seed: str | None) -> bytes:
    """Returns the parent of every first block.

    A strong hash may have a root that everyone knows, so instances can share. With a fast hash a known root would
    let an attacker prepare collisions, so without a seed each process has its own.
    """
    if seed is None and algorithm not in CRYPTOGRAPHIC:
        logger.warning(
            "prefix hash %s without PYTHONHASHSEED: cached prefixes are not shared between processes; "
            "set PYTHONHASHSEED to the same value in all of them, or use sha256",
            algorithm,
        )
        return os.urandom(32)
    return HASHES[algorithm]((FIXED_SEED if seed is None else seed).encode())


class BlockHasher:
    """Hashes a request's tokens in blocks of `block_size`. Each call goes on where `request.block_hashes` ends."""

    def __init__(self, algorithm: str, block_size: int, seed: str | None = None):
        choose("prefix hash", algorithm, list(HASHES))
        self.block_size = block_size
        self._hash = HASHES[algorithm]
        self._root = root_hash(algorithm, seed)
        self._encode = msgspec.msgpack.Encoder().encode

    def __call__(self, request: Request) -> list[bytes]:
        """Returns the hashes of blocks that are full and not hashed yet; [] if there is none."""
        hashes: list[bytes] = []
        parent = request.block_hashes[-1] if request.block_hashes else self._root
        start = len(request.block_hashes) * self.block_size
        for begin in range(start, request.num_tokens - self.block_size + 1, self.block_size):
            end = begin + self.block_size
            parent = self.hash_block(parent, request.all_token_ids[begin:end], extra_keys(request, begin, end))
            hashes.append(parent)
        return hashes

    def hash_block(self, parent: bytes, tokens: Sequence[int], extra: Sequence[Any]) -> bytes:
        """Returns the hash of one block. The encoding is injective, so only equal inputs can be equal outputs."""
        return self._hash(self._encode((parent, tokens, extra)))


def extra_keys(request: Request, begin: int, end: int) -> list[tuple[str, str | bytes, int]]:
    """Returns what beside its ids decides the content of the block of tokens `begin` .. `end`.

    Each key carries its kind: an adapter and a salt of the same name are different things. A media item counts
    with its offset in the block, which may be negative: its placeholders look alike wherever they stand.
    """
    keys: list[tuple[str, str | bytes, int]] = []
    if request.lora_name is not None:
        keys.append(("lora", request.lora_name, 0))
    for item in request.media:
        if item.offset < end and begin < item.offset + item.num_tokens:
            keys.append(("media", item.identifier, item.offset - begin))
    if request.cache_salt is not None and begin == 0:
        keys.append(("salt", request.cache_salt, 0))
    if rows := request.prompt_embeds[begin:end]:
        keys.append(("embeds", hashlib.sha256(b"".join(rows)).digest(), 0))
    return keys


class HashView(Sequence[bytes]):
    """The hashes of blocks `factor` times as large: a large block ends where its last small one does."""

    def __init__(self, hashes: Sequence[bytes], factor: int):
        self._hashes = hashes
        self._factor = factor

    def __getitem__(self, index: int) -> bytes:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._hashes[(index + 1) * self._factor - 1]

    def __len__(self) -> int:
        return len(self._hashes) // self._factor
