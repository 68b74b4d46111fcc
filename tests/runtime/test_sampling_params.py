"""What may be asked of a generation, and that wrong requests are refused by name."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.ir.errors import UserError
from treadle.runtime.protocol import CoreInput, CoreRequest
from treadle.runtime.sampling_params import MAX_INT64, MAX_N, MIN_INT64, RequestOutputKind, SamplingParams

VLLM_DEFAULTS = {
    "n": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "temperature": 1.0,
    "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "stop": [], "stop_token_ids": [], "bad_words": [],
    "ignore_eos": False, "max_tokens": 16, "min_tokens": 0, "logprobs": None, "prompt_logprobs": None,
    "detokenize": True, "skip_special_tokens": True, "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False, "logit_bias": None, "allowed_token_ids": None, "extra_args": None,
    "output_kind": RequestOutputKind.CUMULATIVE,
}  # fmt: skip


@pytest.mark.parametrize(("field", "value"), VLLM_DEFAULTS.items())
def test_defaults(field: str, value: object) -> None:
    """Names and defaults are vLLM's, so a script moves over by changing its import."""
    assert getattr(SamplingParams(), field) == value


NAN, INF = float("nan"), float("inf")
BAD = [
    ("n", [0, -1, MAX_N + 1, 1.5, True, "2"]),
    ("temperature", [-0.1, NAN, INF, "hot", None, True]),
    ("top_p", [0, 0.0, -1, 1.01, NAN, None]),
    ("top_k", [-2, 1.5, True, NAN]),
    ("min_p", [-0.1, 1.1, NAN]),
    ("presence_penalty", [-2.1, 2.1, NAN, INF]),
    ("frequency_penalty", [-2.1, 2.1, NAN]),
    ("repetition_penalty", [0, -1, NAN, INF]),
    ("seed", [2**63, -(2**63) - 1, 1.0, "1", True]),
    ("max_tokens", [0, -1, 1.5]),
    ("min_tokens", [-1, 17, 0.5]),
    ("logprobs", [-2, True, 1.5]),
    ("prompt_logprobs", [-2, True, 1.5]),
    ("stop", ["", ["a", ""], [None], 5]),
    ("stop_token_ids", [[-1], ["a"], 5, [1.5]]),
    ("bad_words", [[""], [" "], "word", [3]]),
    ("logit_bias", [{1: NAN}, {1: INF}, {1: -INF}, {"x": 1}, {-1: 1}, {"1.5": 1}, [1], {1: "a"}]),
    ("allowed_token_ids", [[], [-1], [True]]),
    ("logprob_token_ids", [[-1]]),
    ("output_kind", [3, "delta"]),
]


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD for value in values])
def test_bad_values_are_refused_by_name(field: str, value: object) -> None:
    """TRAP-6, TRAP-8: out of range, NaN, infinite or of the wrong type: a UserError that names the field."""
    with pytest.raises(UserError, match=field):
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    params = SamplingParams()
    if field not in ("stop", "stop_token_ids", "bad_words", "logit_bias"):
        setattr(params, field, value)  # set later, it is found by validate()
        with pytest.raises(UserError, match=field):
            params.validate(vocab_size=100, max_model_len=100)


@pytest.mark.parametrize(
    "changes",
    [
        dict(temperature=0), dict(temperature=1e-30), dict(top_k=-1), dict(top_k=10**6), dict(top_p=1e-9),
        dict(seed=MIN_INT64), dict(seed=-1), dict(seed=MAX_INT64), dict(max_tokens=None, min_tokens=50),
        dict(logprobs=-1), dict(logprobs=0), dict(logit_bias={"99": 100, 0: -100.0}), dict(stop=" "),
        dict(stop=("a", "b")), dict(n=MAX_N), dict(allowed_token_ids=[99]),
    ],
)  # fmt: skip
def test_edges_are_accepted(changes: dict[str, object]) -> None:
    """TRAP-6, TRAP-8: the ends of every range are in it."""
    SamplingParams(**changes).validate(vocab_size=100, max_model_len=100)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        dict(logit_bias={100: 1.0}), dict(stop_token_ids=[100]), dict(allowed_token_ids=[3, 100]),
        dict(logprob_token_ids=[100]), dict(logprobs=101), dict(prompt_logprobs=101),
        dict(min_tokens=100, max_tokens=None),
    ],
)  # fmt: skip
def test_values_beyond_the_model_are_refused(changes: dict[str, object]) -> None:
    """TRAP-7, TRAP-19: ids outside the vocabulary and lengths beyond the model name the field and the range."""
    params = SamplingParams(**changes)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"{next(iter(changes))}.* (99|100)"):
        params.validate(vocab_size=100, max_model_len=100)


def test_stop_strings_need_text() -> None:
    with pytest.raises(UserError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_normalised_forms() -> None:
    params = SamplingParams(stop="end", logit_bias={"3": 1})  # type: ignore[dict-item]
    assert params.stop == ["end"] and params.stop_strings == ["end"] and params.logit_bias == {3: 1}


FULL = dict(
    n=3, seed=-5, stop=["a"], stop_token_ids=[4], bad_words=["no"], logit_bias={7: -1.5}, allowed_token_ids=[1, 2],
    logprobs=3, extra_args={"k": [1]}, output_kind=RequestOutputKind.DELTA, max_tokens=None, logprob_token_ids=[8],
)  # fmt: skip


def test_round_trip_over_the_queue() -> None:
    """Every field, those of the engine too, crosses the queue unchanged."""
    params = SamplingParams(**FULL)  # type: ignore[arg-type]
    params.fill_eos([2, 0])
    params.fill_bad_words(lambda text: [len(text), 9])
    request = CoreRequest(request_id="r", prompt_token_ids=[1], sampling_params=params, arrival_time=0.5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=CoreInput) == request


def test_clone_shares_nothing() -> None:
    params = SamplingParams(**FULL)  # type: ignore[arg-type]
    params.fill_bad_words(lambda text: [len(text)])
    copy = params.clone()
    assert copy == params
    for field in params.__struct_fields__:
        value = getattr(params, field)
        if isinstance(value, list | dict | set):
            assert getattr(copy, field) is not value, field


@given(st.integers(MIN_INT64, MAX_INT64), st.integers(0, MAX_N))
def test_children_have_their_own_seeds(seed: int, index: int) -> None:
    """TRAP-5: completion i of n draws from seed + i, which stays an int64."""
    child = SamplingParams(n=4, seed=seed).child(index)
    assert child.n == 1 and child.seed is not None and (child.seed - seed - index) % 2**64 == 0
    child.validate(vocab_size=10, max_model_len=100)
    assert SamplingParams(n=4).child(index).seed is None


def test_all_eos_ids_stop() -> None:
    """TRAP-19: each of several end ids stops; with ignore_eos only the request's own do."""
    params = SamplingParams(stop_token_ids=[7])
    params.fill_eos([2, 0])
    assert params.eos_token_id == 2
    assert params.all_stop_token_ids == {0, 2, 7} and params.stop_token_ids == [7, 0]
    ignoring = SamplingParams(stop_token_ids=[7], ignore_eos=True)
    ignoring.fill_eos([2, 0])
    assert ignoring.all_stop_token_ids == {7} and ignoring.stop_token_ids == [7]


def test_bad_words_are_encoded_with_and_without_a_space() -> None:
    """C06-05: a word is banned at the start of a text and after a space."""
    ids = {"no": [1], " no": [2], "way": [3, 4], " way": [3, 4]}
    params = SamplingParams(bad_words=["no", " way"])
    params.fill_bad_words(ids.__getitem__)
    assert params.bad_words_token_ids == [[1], [2], [3, 4]]


def test_torch_is_not_imported() -> None:
    """The API server's process loads these modules and must start without torch."""
    code = (
        "import sys, treadle.runtime.outputs, treadle.runtime.detokenizer, treadle.runtime.sampling_params\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
