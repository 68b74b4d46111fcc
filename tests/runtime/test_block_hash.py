import logging
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.fake_runner import make_request
from treadle.ir.errors import ConfigError
from treadle.runtime.request import MediaFeature
from treadle.runtime.scheduler.block_hash import BlockHasher, HashView, environment_seed, index_key, root_hash

HASHER = BlockHasher("sha256", 4)


def hashes(prompt, hasher=HASHER, media=(), embeds=(), **options) -> list[bytes]:
    request = make_request("a", prompt, **options)
    request.media, request.prompt_embeds = media, embeds
    return hasher(request)


def test_chained():
    """C12-01: the same block after another prefix has another hash; equal prefixes agree block by block."""
    one, two = hashes([1, 2, 3, 4, 5, 6, 7, 8]), hashes([9, 2, 3, 4, 5, 6, 7, 8])
    assert one[0] != two[0] and one[1] != two[1]
    assert hashes([1, 2, 3, 4, 5, 6, 7, 9])[0] == one[0]


def test_only_full_blocks_from_where_hashes_end():
    """C12-01, C01-04: nothing for a rest; growing gives the hashes that hashing at once gives."""
    assert hashes([1, 2, 3]) == [] and len(hashes([1, 2, 3, 4, 5])) == 1
    request = make_request("a", [1, 2, 3, 4, 5])
    request.attach_hasher(HASHER)
    for token in (6, 7, 8, 9):
        request.append_output(token)
    assert request.block_hashes == hashes([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert HASHER(request) == []


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
def test_equal_hash_means_equal_prefix(one, two):
    """C12-01: hash i is equal exactly if everything up to block i is."""
    for i, (a, b) in enumerate(zip(hashes(one), hashes(two), strict=False)):
        assert (a == b) == (one[: 4 * i + 4] == two[: 4 * i + 4])


def run(algorithm: str, **environment) -> str:
    code = (
        "from treadle.runtime.scheduler.block_hash import root_hash, environment_seed\n"
        f"print(root_hash({algorithm!r}, environment_seed()).hex())"
    )
    env = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"} | environment
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout


def test_root_across_processes():
    """C12-02: sha256 shares its root between processes; a fast hash only with PYTHONHASHSEED."""
    assert run("sha256") == run("sha256") != run("sha256", PYTHONHASHSEED="7")
    assert run("xxhash") != run("xxhash")
    assert run("xxhash", PYTHONHASHSEED="7") == run("xxhash", PYTHONHASHSEED="7") != run("xxhash", PYTHONHASHSEED="8")


def test_random_is_not_a_seed(monkeypatch, caplog):
    """C12-02: PYTHONHASHSEED=random means no seed; a fast hash says then that nothing is shared."""
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    assert environment_seed() is None
    with caplog.at_level(logging.WARNING):
        assert root_hash("xxhash", None) != root_hash("xxhash", None)
        assert "PYTHONHASHSEED" in caplog.text and "not shared" in caplog.text
        caplog.clear()
        root_hash("xxhash", "1")
        root_hash("sha256", None)
        assert not caplog.records


def test_unknown_hash():
    """C12-02: the error lists the choices."""
    with pytest.raises(ConfigError, match="sha256, xxhash"):
        BlockHasher("md5", 4)


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash"])
def test_extra_keys_isolate(algorithm):
    """C12-03, TRAP-12: adapter, salt, media and embeddings each change the hash, and an adapter is not a salt."""
    hasher, prompt = BlockHasher(algorithm, 4, "seed"), [1, 2, 3, 4, 5, 6, 7, 8]
    variants = [
        hashes(prompt, hasher),
        hashes(prompt, hasher, lora_name="blue"),
        hashes(prompt, hasher, cache_salt="blue"),
        hashes(prompt, hasher, lora_name="blue", cache_salt="blue"),
        hashes(prompt, hasher, media=[MediaFeature("blue", 0, 2)]),
        hashes(prompt, hasher, embeds=[b"blue"] * 8),
    ]
    for block in (0, 1):
        assert len({hash_list[block] for hash_list in variants}) == len(variants)


def test_salt_is_mixed_into_the_first_block_only():
    """C12-03: later blocks are isolated by the chain."""
    from treadle.runtime.scheduler.block_hash import extra_keys

    request = make_request("a", range(8), cache_salt="s", lora_name="l")
    assert [kind for kind, *_ in extra_keys(request, 0, 4)] == ["lora", "salt"]
    assert [kind for kind, *_ in extra_keys(request, 4, 8)] == ["lora"]


def test_media_offset_counts():
    """C12-03: the same item elsewhere in the block, or another item at the same place, is other content."""
    prompt = [5] * 8
    at = {offset: hashes(prompt, media=[MediaFeature("cat", offset, 3)]) for offset in (0, 1, 2)}
    assert len({h[0] for h in at.values()}) == 3
    other = hashes(prompt, media=[MediaFeature("dog", 2, 3)])
    assert other[0] != at[2][0] and other[1] != at[2][1], "an item that spans two blocks counts in both"
    assert hashes(prompt, media=[MediaFeature("cat", 4, 3)])[0] == hashes(prompt)[0], "not in this block"


def test_coarser_blocks_use_the_last_inner_hash():
    """C12-04: 16 -> 32 uses the second hash for tokens 0 to 31; an unfinished large block has none."""
    fine = hashes(range(22), BlockHasher("sha256", 4))
    view = HashView(fine, 2)
    assert len(view) == 2 and list(view) == [fine[1], fine[3]]
    with pytest.raises(IndexError):
        view[2]
    assert list(HashView(fine, 1)) == fine


def test_group_is_part_of_the_key():
    """C12-04: hash bytes and four big-endian bytes of the group."""
    assert index_key(b"h", 1) == b"h\x00\x00\x00\x01" != index_key(b"h", 256)
