"""The sampler's stages, their order, and what it reports as logprobs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.reference_sampler import ORDER, State, run_chain, softmax
from treadle.ir.errors import ConfigError
from treadle.runtime.sampling.batch import SamplingBatch
from treadle.runtime.sampling.logprobs import FLOOR, prompt_logprob_rows
from treadle.runtime.sampling.metadata import SamplingMetadata, TopKTopP, apply_bitmask
from treadle.runtime.sampling.random_pick import argmax_rows, pick_random
from treadle.runtime.sampling.sampler import Sampler, SamplerOutput
from treadle.runtime.sampling.topk_topp import filter_top_k_top_p
from treadle.runtime.sampling_params import SamplingParams

NEG_INF = -math.inf


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    mode: str = "raw_logprobs",
) -> SamplerOutput:
    """One step of a fresh batch with one request a row."""
    batch = SamplingBatch(len(params), logits.shape[1])
    for slot, row in enumerate(params):
        batch.add(slot, str(slot), row, prompt, output)
    return Sampler(mode)(logits.clone(), batch.metadata(len(params)))


def probs_of(output: SamplerOutput, vocab_size: int, row: int = 0) -> np.ndarray:
    """The distribution that was drawn from, out of a row that asked for all processed logprobs."""
    assert output.logprobs is not None
    logprobs = output.logprobs[row]
    assert logprobs is not None and logprobs.token_ids[1:] == list(range(vocab_size))
    return np.where(np.array(logprobs.logprobs[1:]) <= FLOOR, 0, np.exp(logprobs.logprobs[1:]))


# --- order ---------------------------------------------------------------------------------------------------

VOCAB = 24
PROMPT, OUTPUT = [0, 1, 2, 3, 20], [1, 4, 4, 5, 6]
ORDERED = dict(
    temperature=1.8,
    allowed_token_ids=[i for i in range(VOCAB) if i != 23],
    min_tokens=6,
    logit_bias={1: 2.6, 7: 1.5, 9: -1.0},
    repetition_penalty=1.7,
    frequency_penalty=0.4,
    presence_penalty=0.3,
    min_p=0.08,
    top_k=6,
    top_p=0.85,
    max_tokens=20,
)
MASKS = {"allowed", "bad_words", "min_tokens"}
ALSO_COMMUTE = ({"greedy", "temperature"}, {"greedy", "top_k"}, {"min_p", "top_k"})


def ordered_params(**changes: object) -> SamplingParams:
    params = SamplingParams(**{**ORDERED, **changes})  # type: ignore[arg-type]
    params.all_stop_token_ids = {22}
    params.bad_words_token_ids = [[21], [5, 6, 8], [6, 5, 10]]
    return params


def ordered_logits() -> np.ndarray:
    logits = np.random.default_rng(278).normal(0, 1.2, VOCAB)
    logits[[21, 22, 23]] = [5.0, 4.5, 6.0]  # the forbidden ones would win
    logits[[1, 4, 7, 8]] = [1.1, 2.9, 1.9, 3.3]
    return logits.astype(np.float32)


def outcome_of(state: State) -> np.ndarray:
    parts = [state.snapshot, [state.greedy if state.greedy is not None else -1], state.probs]
    return np.concatenate([np.zeros(VOCAB) if part is None else np.asarray(part, float) for part in parts])


def test_chain_equals_the_written_order() -> None:
    """C06-01: with every stage active, snapshot, greedy pick and final distribution are the reference's."""
    logits = torch.from_numpy(ordered_logits()).unsqueeze(0)
    want = run_chain(ordered_logits(), ordered_params(), PROMPT, OUTPUT)
    raw = sample(logits, [ordered_params(logprobs=-1)], prompt=PROMPT, output=OUTPUT)
    assert raw.logprobs is not None and raw.logprobs[0] is not None
    np.testing.assert_allclose(raw.logprobs[0].logprobs[1:], want.snapshot, atol=1e-5)
    greedy = sample(logits, [ordered_params(temperature=0)], prompt=PROMPT, output=OUTPUT)
    assert greedy.token_ids.tolist() == [[want.greedy]]
    drawn = sample(
        logits, [ordered_params(logprobs=-1)], prompt=PROMPT, output=OUTPUT, mode="processed_logprobs"
    )
    np.testing.assert_allclose(probs_of(drawn, VOCAB), want.probs, atol=1e-6)


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(ORDER, 2)))
def test_no_two_stages_may_change_places(first: str, second: str) -> None:
    """C06-01: exchanging any two stages of the reference changes a result that the sampler was shown to give.

    The exceptions commute in exact arithmetic and are only these: masks and bias among themselves, min-p with
    top-k, and the greedy pick with temperature or top-k (when no other stage is moved across them).
    """
    order = list(ORDER)
    a, b = order.index(first), order.index(second)
    order[a], order[b] = order[b], order[a]
    golden = outcome_of(run_chain(ordered_logits(), ordered_params(), PROMPT, OUTPUT))
    changed = outcome_of(run_chain(ordered_logits(), ordered_params(), PROMPT, OUTPUT, order))
    pair = {first, second}
    commute = pair <= MASKS | {"bias"} or pair in ALSO_COMMUTE
    assert np.allclose(golden, changed, atol=1e-4) == commute


def test_float32_before_bias() -> None:
    """C06-01: logits are float32 before anything is added, so a small bias is not lost in bfloat16."""
    logits = torch.tensor([[256.0, 256.0, 0.0]], dtype=torch.bfloat16)
    assert sample(logits, [SamplingParams(temperature=0, logit_bias={1: 0.25})]).token_ids.tolist() == [[1]]


def test_output_shape_and_type() -> None:
    """C06-01 (R-6.12): ids are int32 [R, 1], from any float type, and the input of another type is untouched."""
    logits = torch.randn(3, 40).half()
    before = logits.clone()
    out = sample(logits, [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.5)])
    assert out.token_ids.shape == (3, 1) and out.token_ids.dtype == torch.int32
    assert torch.equal(logits, before) and out.logprobs is None


# --- greedy and random rows ------------------------------------------------------------------------------------


def test_greedy_and_random_rows_mix() -> None:
    """C06-03: a row is greedy below the temperature threshold, whatever its neighbours are."""
    torch.manual_seed(0)
    logits = torch.randn(6, 500)
    greedy = SamplingParams(temperature=0)
    params = [greedy, SamplingParams(temperature=5.0), SamplingParams(temperature=1e-5), greedy]
    params += [SamplingParams(temperature=2.0, top_k=400), SamplingParams(temperature=9.0)]
    out = sample(logits, params).token_ids.flatten()
    want = logits.argmax(-1)
    assert out[[0, 2, 3]].tolist() == want[[0, 2, 3]].tolist()
    assert (out[[1, 4, 5]] != want[[1, 4, 5]]).any()


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-6, 1e-30, 0.0])
@pytest.mark.parametrize("top_p", [1.0, 1e-9])
def test_tiny_temperature_is_greedy(temperature: float, top_p: float) -> None:
    """TRAP-6: tiny temperatures give the argmax, ties broken as greedy breaks them, and never NaN."""
    logits = torch.tensor([[1.0, 7.0, 7.0, 6.99], [-90.0, -90.0, -91.0, -1e4]])
    params = [SamplingParams(temperature=temperature, top_p=top_p, seed=seed) for seed in (0, 1)]
    assert sample(logits, params).token_ids.tolist() == [[1], [0]]


def test_top_k_one_is_greedy() -> None:
    """TRAP-6: top_k 1 gives the argmax even when the best logit is there twice."""
    logits = torch.zeros(20, 10)
    logits[:, 4:] = 3
    params = [SamplingParams(top_k=1, temperature=1.5, seed=seed) for seed in range(20)]
    assert sample(logits, params).token_ids.flatten().tolist() == [4] * 20


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 700))
def test_argmax_is_the_first_largest(seed: int, vocab_size: int) -> None:
    """C06-03: argmax returns the first of equal maxima."""
    logits = torch.from_numpy(np.random.default_rng(seed).integers(0, 5, (3, vocab_size))).float()
    want = [row.index(max(row)) for row in logits.tolist()]
    assert argmax_rows(logits).tolist() == want
    assert argmax_rows(logits.double()).tolist() == want


@pytest.mark.parametrize("vocab_size", [1, 3, 255, 256, 257, 1000])
@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_random_pick_never_draws_probability_zero(vocab_size: int, uniform: float) -> None:
    """C06-05: at both ends of the uniform, with only one possible token, that token is drawn."""
    for only in {0, vocab_size // 2, vocab_size - 1}:
        logits = torch.full((2, vocab_size), NEG_INF)
        logits[:, only] = -40.0
        picked = pick_random(logits, torch.full((2,), uniform, dtype=torch.float64))
        assert picked.tolist() == [only, only]


def test_random_pick_inverts_the_distribution() -> None:
    """C06-07: uniforms on a grid reproduce the distribution to the width of the grid, across many blocks."""
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(1)) * 2
    grid = 20000
    uniforms = (torch.arange(grid, dtype=torch.float64) + 0.5) / grid
    picked = pick_random(logits.expand(grid, -1), uniforms)
    shares = torch.bincount(picked, minlength=1000).double() / grid
    assert (shares - logits.double().softmax(-1)[0]).abs().max() < 1.01 / grid
    assert bool((picked.diff() >= 0).all())


# --- masks -----------------------------------------------------------------------------------------------------


def test_allowed_token_ids_only() -> None:
    """C06-05: only allowed ids are sampled, greedily and at random; neighbours are free."""
    logits = torch.zeros(4, 300)
    logits[:, 0] = 50
    kinds = [dict(temperature=0.0), dict(temperature=3.0, seed=1)]
    params = [SamplingParams(allowed_token_ids=[7, 299], **kind) for kind in kinds]  # type: ignore[arg-type]
    params += [SamplingParams(**kind) for kind in kinds]  # type: ignore[arg-type]
    assert sample(logits, params).token_ids.flatten().tolist()[0] == 7
    ids = {token for _ in range(30) for token in sample(logits, params).token_ids.flatten().tolist()[:2]}
    assert ids <= {7, 299}
    assert sample(logits, params).token_ids.flatten().tolist()[2:] == [0, 0]


def test_bad_words_ban_the_last_token_after_their_beginning() -> None:
    """C06-05: one-token words always; longer ones only when the output ends with their beginning."""
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]])
    params = SamplingParams(temperature=0)
    params.bad_words_token_ids = [[5], [1, 2, 4]]
    assert sample(logits, [params], output=[]).token_ids.item() == 4
    assert sample(logits, [params], output=[1, 2]).token_ids.item() == 3
    assert sample(logits, [params], output=[2, 1]).token_ids.item() == 4
    assert sample(logits, [params], prompt=[1, 2], output=[2]).token_ids.item() == 4


def test_allowed_ids_outrank_bans() -> None:
    """C06-05: when bans would leave nothing, an allowed id is sampled, never a forbidden one."""
    logits = torch.randn(2, 50)
    params = [SamplingParams(allowed_token_ids=[3], temperature=t) for t in (0.0, 1.0)]
    for row in params:
        row.bad_words_token_ids = [[3], [3, 3]]
    assert sample(logits, params, output=[3]).token_ids.tolist() == [[3], [3]]


def test_min_tokens_and_bias_act_before_the_greedy_pick() -> None:
    """C06-06, TRAP-19: stop ids cannot be sampled before min_tokens, even with bias +100, and can right after."""
    logits = torch.zeros(1, 10)
    logits[0, 6] = 1
    params = SamplingParams(temperature=0, min_tokens=5, logit_bias={0: 100.0})
    params.fill_eos([2, 0])
    output: list[int] = []
    for _ in range(6):
        output.append(int(sample(logits, [params], output=output).token_ids.item()))
    assert output == [6, 6, 6, 6, 6, 0]


@pytest.mark.parametrize("temperature", [0.25, 1.0, 4.0])
def test_penalties_do_not_depend_on_temperature(temperature: float) -> None:
    """C06-06: dividing the processed logits' temperature out again leaves the same penalised logits."""
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(5))
    params = SamplingParams(
        temperature=temperature,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        presence_penalty=-0.7,
        logprobs=-1,
    )
    out = sample(logits, [params], prompt=[1, 2], output=[2, 3, 3], mode="processed_logits")
    assert out.logprobs is not None and out.logprobs[0] is not None
    got = np.array(out.logprobs[0].logprobs[1:]) * temperature
    want = logits[0].double().numpy().copy()
    for token, count in ((1, 0), (2, 1), (3, 2)):
        want[token] = want[token] / 1.3 if want[token] > 0 else want[token] * 1.3
        want[token] -= 0.5 * count + -0.7 * (count > 0)
    np.testing.assert_allclose(got, want, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 100), st.integers(1, 3))
def test_grammar_bitmask(seed: int, vocab_size: int, num_rows: int) -> None:
    """R-6.26: bit 1 allows; a row of -1 allows everything; vocabularies need not be multiples of 32."""
    rng = np.random.default_rng(seed)
    allowed = rng.random((num_rows, vocab_size)) < 0.5
    allowed[0] = True
    padded = np.ones((num_rows, -(-vocab_size // 32) * 32), dtype=np.uint8)
    padded[:, :vocab_size] = allowed
    words = np.packbits(padded, axis=1, bitorder="little").view("<i4")
    got = apply_bitmask(torch.zeros(num_rows, vocab_size), torch.from_numpy(words.copy()))
    assert np.array_equal(np.isfinite(got.numpy()), allowed)


def test_grammar_comes_first_and_leaves_raw_logprobs_alone() -> None:
    """C06-02 (R-6.26): the bitmask acts before the greedy pick and is not seen in raw logprobs."""
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    batch = SamplingBatch(1, 3)
    batch.add(0, "a", SamplingParams(temperature=0, logprobs=3), [], [])
    metadata = batch.metadata(1)
    masked = SamplingMetadata(
        num_rows=1,
        all_greedy=True,
        logprobs=metadata.logprobs,
        grammar_bitmask=torch.tensor([[0b100]], dtype=torch.int32),
    )
    out = Sampler()(logits.clone(), masked)
    assert out.token_ids.item() == 2 and out.logprobs is not None and out.logprobs[0] is not None
    assert out.logprobs[0].token_ids == [2, 0, 1, 2] and out.logprobs[0].ranks == [3, 1, 2, 3]
    np.testing.assert_allclose(out.logprobs[0].logprobs[1:], logits[0].log_softmax(-1), atol=1e-6)


# --- top-k, top-p ------------------------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab_size=st.integers(1, 300),
    k=st.one_of(st.just(0), st.integers(1, 320)),
    p=st.one_of(st.just(1.0), st.floats(1e-9, 0.999)),
    window=st.integers(1, 60),
    steps=st.sampled_from([0, 4]),
)
def test_support_equals_reference(
    seed: int, vocab_size: int, k: int, p: float, window: int, steps: int
) -> None:
    """C06-07: whatever the window, and with ties (steps > 0), the kept set is the reference's."""
    logits = np.random.default_rng(seed).normal(0, 2, (3, vocab_size)).astype(np.float32)
    if steps:
        logits = np.round(logits * steps / 4) * 4 / steps
    logits[1] = logits[1] / 50  # a flat row: its nucleus is larger than the window
    params = SamplingParams(top_k=k, top_p=p)
    filters = TopKTopP(
        k_S=torch.full((3,), k or vocab_size).clamp_max(vocab_size),
        p_S=torch.full((3,), p, dtype=torch.float64),
        window=window,
    )
    got = filter_top_k_top_p(torch.from_numpy(logits.copy()), filters).numpy()
    for row in range(3):
        want = run_chain(logits[row], params, order=("top_k", "top_p"))
        kept, reference = np.isfinite(got[row]), np.isfinite(want.logits)
        assert np.array_equal(got[row][kept], logits[row][kept])
        if not np.array_equal(kept, reference):
            # Only a token whose preceding mass equals p to rounding may differ.
            within_k = run_chain(logits[row], params, order=("top_k",)).logits
            probs = softmax(within_k)
            for token in (kept != reference).nonzero()[0]:
                assert abs(probs[probs > probs[token]].sum() - p) < 1e-6


def test_mixed_filters_in_one_batch() -> None:
    """C06-07: each row gets its own filters; unfiltered and greedy neighbours get none."""
    logits = torch.randn(5, 600, generator=torch.Generator().manual_seed(0)) * 2
    kinds = [
        dict(top_k=3),
        dict(top_p=0.4),
        dict(),
        dict(top_k=50, top_p=0.6, min_p=0.01),
        dict(temperature=0.0),
    ]
    params = [SamplingParams(logprobs=-1, **kind) for kind in kinds]  # type: ignore[arg-type]
    out = sample(logits, params, mode="processed_logprobs")
    for row in range(4):
        want = run_chain(logits[row].numpy(), params[row])
        np.testing.assert_allclose(probs_of(out, 600, row), want.probs, atol=1e-6)
    np.testing.assert_allclose(probs_of(out, 600, 4), softmax(logits[4].double().numpy()), atol=1e-6)


# --- logprobs ------------------------------------------------------------------------------------------------------


def test_raw_logprobs_ignore_processing() -> None:
    """C06-02: raw logprobs are those of the model's logits, whatever was done to them afterwards."""
    logits = torch.randn(2, 64, generator=torch.Generator().manual_seed(2))
    harsh = SamplingParams(
        temperature=0.3,
        top_k=2,
        repetition_penalty=2.0,
        logit_bias={5: 9.0},
        allowed_token_ids=[5, 6],
        logprobs=4,
    )
    plain = SamplingParams(temperature=0, logprobs=4)
    out = sample(logits, [harsh, plain], prompt=[5], output=[6])
    assert out.logprobs is not None
    want = logits.double().log_softmax(-1)
    for row in range(2):
        logprobs = out.logprobs[row]
        assert logprobs is not None
        ids = logprobs.token_ids
        assert ids[0] == out.token_ids[row, 0] and ids[1:] == want[row].topk(4).indices.tolist()
        np.testing.assert_allclose(logprobs.logprobs, want[row][ids], atol=1e-5)
        assert logprobs.ranks == [int((want[row] > want[row][i]).sum()) + 1 for i in ids]


def test_logprob_counts_per_row() -> None:
    """C06-02: None, 0, k and -1 in one batch; k beyond the vocabulary gives the vocabulary."""
    logits = torch.randn(5, 9)
    params = [SamplingParams(logprobs=count) for count in (None, 0, 3, -1, 9)]
    rows = sample(logits, params).logprobs
    assert rows is not None and rows[0] is None
    assert [len(row.token_ids) for row in rows[1:] if row] == [1, 4, 10, 10]
    assert rows[3] is not None and rows[3].token_ids[1:] == list(range(9))
    assert sorted(rows[3].ranks[1:]) == list(range(1, 10))


def test_only_requested_ids_get_logprobs() -> None:
    """C06-02 (R-6.11): without a count, the explicitly requested ids are reported after the sampled one."""
    logits = torch.tensor([[0.0, 4.0, 2.0, 3.0]])
    rows = sample(logits, [SamplingParams(temperature=0, logprob_token_ids=[3, 0])]).logprobs
    assert rows is not None and rows[0] is not None
    assert rows[0].token_ids == [1, 3, 0] and rows[0].ranks == [1, 2, 4]
    np.testing.assert_allclose(rows[0].logprobs, logits[0].log_softmax(-1)[[1, 3, 0]], atol=1e-6)


def test_ties_share_a_rank() -> None:
    """C06-02: a rank is one more than the number of likelier tokens, in every way of asking."""
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0, 4.0, 4.0, 0.0]])
    rows = sample(logits.repeat(2, 1), [SamplingParams(temperature=0, logprobs=k) for k in (6, -1)]).logprobs
    assert rows is not None and rows[0] is not None and rows[1] is not None
    assert rows[0].ranks == [1, 1, 1, 1, 4, 4, 6]
    assert rows[1].ranks == [1, 6, 1, 1, 1, 4, 4, 7]


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits", "processed_logprobs"])
def test_logprob_modes(mode: str) -> None:
    """C06-02 (R-6.3): raw modes are taken before the chain, processed ones after it; all are finite."""
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(9)) * 2
    params = [
        SamplingParams(temperature=0.5, top_k=3, logprobs=-1),
        SamplingParams(temperature=0, logprobs=-1),
    ]
    rows = sample(logits, params, mode=mode).logprobs
    assert rows is not None and rows[0] is not None and rows[1] is not None
    got, greedy = np.array(rows[0].logprobs[1:]), np.array(rows[1].logprobs[1:])
    assert np.isfinite(got).all()
    raw = logits[0].double().numpy()
    if mode == "raw_logits":
        want, rest = raw, logits[1].double().numpy()
    else:
        want, rest = np.where(raw >= np.sort(raw)[-3], raw / 0.5, -np.inf), logits[1].double().numpy()
        if mode == "processed_logprobs":
            want, rest = np.log(np.maximum(softmax(want), 1e-300)), np.log(softmax(rest))
            want = np.where(want < -600, FLOOR, want)
    np.testing.assert_allclose(got, np.maximum(want, FLOOR), atol=1e-5)
    np.testing.assert_allclose(greedy, rest, atol=1e-5)


def test_unknown_logprobs_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="processed_logits"):
        Sampler("cooked")


@pytest.mark.parametrize("num_tokens", [0, 1, 63, 64, 65, 130])
def test_prompt_logprobs_are_finite_and_unfiltered(num_tokens: int) -> None:
    """TRAP-4: prompt rows come from the model's distribution, hold the target first and are finite."""
    logits = (torch.randn(num_tokens, 40, generator=torch.Generator().manual_seed(4)) * 3).bfloat16()
    targets = [i % 40 for i in range(num_tokens)]
    rows = prompt_logprob_rows(logits, targets, 2)
    want = logits.double().log_softmax(-1)
    assert len(rows) == num_tokens
    for i, row in enumerate(rows):
        assert row.token_ids[0] == targets[i] and len(row.token_ids) == 3
        assert np.isfinite(row.logprobs).all()
        np.testing.assert_allclose(row.logprobs, want[i][row.token_ids], atol=1e-4)


def test_prompt_logprobs_of_impossible_tokens_are_finite() -> None:
    """TRAP-4: even a model that gives -inf cannot put an infinity into the answer."""
    rows = prompt_logprob_rows(torch.tensor([[0.0, NEG_INF, 1.0]]), [1], -1)
    assert rows[0].logprobs[0] == FLOOR and np.isfinite(rows[0].logprobs).all()
