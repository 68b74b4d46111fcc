"""The persistent sampling batch: seeds, slots that come, go and move, and what is rebuilt when."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.runtime.reference_sampler import run_chain
from treadle.runtime.sampling.batch import SamplingBatch
from treadle.runtime.sampling.metadata import Stage
from treadle.runtime.sampling.penalties import Penalties
from treadle.runtime.sampling.random_pick import draw_keys, race, token_uniforms
from treadle.runtime.sampling.sampler import Sampler
from treadle.runtime.sampling.slots import Rows, SlotEntries, SlotRequest
from treadle.runtime.sampling_params import MAX_INT64, MIN_INT64, SamplingParams

VOCAB = 400


def model(output: list[int]) -> Tensor:
    """Logits [V] that depend on the tokens so far, as a model's would."""
    seed = hash(tuple(output)) % 2**32
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def step(batch: SamplingBatch, outputs: dict[int, list[int]], slots: list[int]) -> None:
    """One step for the given slots; appends to their outputs."""
    logits = torch.stack([model(outputs[slot]) for slot in slots])
    sampled = Sampler()(logits, batch.metadata(slots)).token_ids.flatten().tolist()
    for slot, token in zip(slots, sampled, strict=True):
        outputs[slot].append(token)


def alone(params: SamplingParams, num_tokens: int) -> list[int]:
    batch, outputs = SamplingBatch(1, VOCAB, seed=99), {0: []}
    batch.add(0, "alone", params, [1, 2], outputs[0])
    for _ in range(num_tokens):
        step(batch, outputs, [0])
    return outputs[0]


SEEDED = dict(temperature=0.9, seed=11, top_p=0.95, repetition_penalty=1.1)


@pytest.mark.parametrize("engine_seed", [0, 1])
def test_seeded_rows_do_not_depend_on_the_batch(engine_seed: int) -> None:
    """C06-04, TRAP-5: with unseeded, seeded and greedy neighbours that come and go, the same tokens as alone."""
    params = SamplingParams(**SEEDED)  # type: ignore[arg-type]
    want = alone(params, 24)
    batch = SamplingBatch(4, VOCAB, seed=engine_seed)
    outputs: dict[int, list[int]] = {slot: [] for slot in range(4)}
    batch.add(2, "seeded", params, [1, 2], outputs[2])
    batch.add(0, "unseeded", SamplingParams(top_k=5), [3], outputs[0])
    for tokens in range(24):
        if tokens == 8:
            batch.add(1, "other", SamplingParams(seed=5, min_p=0.1), [4], outputs[1])
        if tokens == 16:
            batch.remove(0)
            batch.add(3, "greedy", SamplingParams(temperature=0), [5], outputs[3])
        taken = [slot for slot in (3, 2, 1, 0) if slot == 2 or (slot, tokens) in busy()]
        step(batch, outputs, taken)
    assert outputs[2] == want


def busy() -> set[tuple[int, int]]:
    spans = {0: range(0, 16), 1: range(8, 24), 3: range(16, 24)}
    return {(slot, tokens) for slot, span in spans.items() for tokens in span}


def test_seeded_rows_survive_preemption_and_moves() -> None:
    """C06-04, TRAP-13: taken out, put back in another slot, moved, metadata asked for in vain: same tokens."""
    params = SamplingParams(**SEEDED)  # type: ignore[arg-type]
    batch = SamplingBatch(3, VOCAB)
    outputs: dict[int, list[int]] = {0: []}
    batch.add(0, "a", params, [1, 2], outputs[0])
    for _ in range(5):
        step(batch, outputs, [0])
    batch.remove(0)
    outputs[2] = outputs.pop(0)
    batch.add(2, "a", params, [1, 2], outputs[2])
    for _ in range(5):
        batch.metadata([2])  # a step whose sample is thrown away draws nothing
        step(batch, outputs, [2])
    batch.move(2, 1)
    outputs[1] = outputs.pop(2)
    for _ in range(5):
        step(batch, outputs, [1])
    assert outputs[1] == alone(params, 15)


def test_unseeded_rows_differ_and_follow_the_engine_seed() -> None:
    """C06-04: unseeded requests draw from one stream that the engine's seed starts."""

    def run(seed: int) -> list[list[int]]:
        batch, outputs = SamplingBatch(2, VOCAB, seed=seed), {0: [], 1: []}
        for slot in (0, 1):
            batch.add(slot, str(slot), SamplingParams(), [1], outputs[slot])
        for _ in range(10):
            step(batch, outputs, [0, 1])
        return [outputs[0], outputs[1]]

    first = run(7)
    assert first == run(7) != run(8) and first[0] != first[1]


@pytest.mark.parametrize("seed", [MIN_INT64, -1, 0, 1, MAX_INT64])
def test_every_int64_is_a_seed(seed: int) -> None:
    """TRAP-5, TRAP-6: the ends of int64 and -1 are seeds like any other."""
    params = SamplingParams(seed=seed, temperature=1.5)
    assert alone(params, 12) == alone(params, 12)
    assert alone(params, 12) != alone(SamplingParams(seed=seed ^ 1, temperature=1.5), 12)


def test_seeded_uniforms_are_uniform_and_uncorrelated() -> None:
    """C06-04: neighbouring seeds and neighbouring positions have nothing in common."""
    seeds, positions = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300, dtype=np.uint64))
    keys = draw_keys(seeds.ravel(), positions.ravel())
    check_uniform(token_uniforms(keys, np.full(90000, 5, dtype=np.uint64)).reshape(300, 300))


def test_noise_of_neighbouring_tokens_is_uniform_and_uncorrelated() -> None:
    """C06-04: within one draw, and between draws, no token's noise tells another's."""
    keys = draw_keys(np.full(300, 11, dtype=np.uint64), np.arange(300, dtype=np.uint64))
    check_uniform(token_uniforms(keys[:, None], np.arange(300, dtype=np.uint64)[None, :]))


def test_a_seeded_draw_follows_the_distribution() -> None:
    """C06-04, C06-07: many keys reproduce softmax(logits), chi-square; filtered tokens never win."""
    logits = torch.tensor([1.0, 0.0, float("-inf"), 2.0, -1.0])
    keys = draw_keys(np.arange(20000, dtype=np.uint64), np.zeros(20000, dtype=np.uint64))
    counts = np.bincount([race(logits, key) for key in keys], minlength=5)
    expected = logits.softmax(-1).numpy().astype(float) * len(keys)
    assert counts[2] == 0
    kept = expected > 0
    assert ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum() < 20


def test_a_seeded_draw_survives_rounding_of_the_logits() -> None:
    """TRAP-5, TRAP-13: over a whole flat vocabulary, logits off by 1e-5 almost never change a draw."""
    logits = torch.randn(49152, generator=torch.Generator().manual_seed(0))
    other = logits + 1e-5 * torch.randn(49152, generator=torch.Generator().manual_seed(1))
    keys = draw_keys(np.arange(300, dtype=np.uint64), np.zeros(300, dtype=np.uint64))
    assert sum(race(logits, key) != race(other, key) for key in keys) <= 1


def check_uniform(uniforms: np.ndarray) -> None:
    assert uniforms.min() > 0 and uniforms.max() < 1 and len(np.unique(uniforms)) == 90000
    counts = np.histogram(uniforms, bins=100, range=(0, 1))[0]
    assert ((counts - 900) ** 2 / 900).sum() < 99 + 5 * np.sqrt(2 * 99)
    for neighbour in (uniforms[1:, :], uniforms[:, 1:]):
        same = uniforms[:-1, :] if neighbour.shape[0] == 299 else uniforms[:, :-1]
        assert abs(np.corrcoef(same.ravel(), neighbour.ravel())[0, 1]) < 0.015


def test_greedy_rows_are_unaffected_by_neighbours() -> None:
    """C06-03: a greedy row gives the same token alone and among rows that use every feature."""
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    batch = SamplingBatch(4, VOCAB)
    busy_params = SamplingParams(
        temperature=2.0, top_k=9, top_p=0.5, min_p=0.1, repetition_penalty=1.9, logit_bias={3: 50.0},
        allowed_token_ids=[3, 4], min_tokens=3, stop_token_ids=[3], logprobs=2,
    )  # fmt: skip
    for slot in range(4):
        greedy = slot in (1, 3)
        batch.add(slot, str(slot), SamplingParams(temperature=0) if greedy else busy_params, [1], [2])
    sampled = Sampler()(logits.clone(), batch.metadata(4)).token_ids.flatten()
    assert sampled[[1, 3]].tolist() == logits.argmax(-1)[[1, 3]].tolist()
    assert batch.argmax_only(4).tolist() == [False, True, False, True]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_history_of_slots_equals_a_fresh_batch(data: st.DataObject) -> None:
    """C06-01: after any adds, removes and moves, metadata samples as a batch built from nothing would."""
    kinds = (
        dict(temperature=0.0), dict(seed=3, top_k=4), dict(seed=8, logit_bias={2: 3.0}, min_p=0.2),
        dict(seed=1, presence_penalty=1.5, top_p=0.7), dict(temperature=0.0, allowed_token_ids=[5, 9], logprobs=2),
        dict(seed=4, min_tokens=9, stop_token_ids=[1, 2, 3]),
    )  # fmt: skip
    batch = SamplingBatch(5, 32)
    held: dict[int, tuple[SamplingParams, list[int]]] = {}
    for number in range(data.draw(st.integers(1, 14))):
        free = [slot for slot in range(5) if slot not in held]
        choice = data.draw(st.sampled_from(["add", "remove", "move", "grow", "look"]))
        if choice == "add" and free:
            slot = data.draw(st.sampled_from(free))
            kind = data.draw(st.sampled_from(kinds))
            held[slot] = (SamplingParams(**kind), [number])  # type: ignore[arg-type]
            batch.add(slot, str(number), held[slot][0], [7, 8], held[slot][1])
        elif choice == "remove" and held:
            slot = data.draw(st.sampled_from(sorted(held)))
            batch.remove(slot)
            del held[slot]
        elif choice == "move" and held and free:
            source, target = data.draw(st.sampled_from(sorted(held))), data.draw(st.sampled_from(free))
            batch.move(source, target)
            held[target] = held.pop(source)
        elif choice == "grow":
            for _, output in held.values():
                output.append(number)
        elif held:
            batch.metadata(sorted(held))
    if not held:
        return
    slots = data.draw(st.permutations(sorted(held)))
    fresh = SamplingBatch(5, 32)
    for row, slot in enumerate(slots):
        fresh.add(row, str(slot), held[slot][0], [7, 8], held[slot][1])
    logits = torch.randn(len(slots), 32, generator=torch.Generator().manual_seed(3)) * 2
    got = Sampler()(logits.clone(), batch.metadata(slots))
    want = Sampler()(logits.clone(), fresh.metadata(len(slots)))
    assert got.token_ids.tolist() == want.token_ids.tolist() and got.logprobs == want.logprobs


def test_metadata_is_reused_until_a_slot_changes() -> None:
    """C06-01: nothing is rebuilt for plain greedy rows; token-dependent parts alone are renewed otherwise."""
    batch = SamplingBatch(3, VOCAB)
    batch.add(0, "a", SamplingParams(temperature=0), [1], [])
    first = batch.metadata(1)
    assert batch.metadata(1) is first and first.only_argmax
    output: list[int] = []
    batch.add(1, "b", SamplingParams(presence_penalty=1.0, top_k=3), [1], output)
    second = batch.metadata(2)
    output.append(4)
    third = batch.metadata(2)
    assert third.temperature_S is second.temperature_S and third.top_k_top_p is second.top_k_top_p
    assert third.penalties is not second.penalties and not third.only_argmax
    batch.remove(1)
    assert batch.metadata(1).only_argmax


def test_slots_are_guarded() -> None:
    """A taken slot is not overwritten and a free one is no row: those are faults of the runner."""
    batch = SamplingBatch(2, VOCAB)
    batch.add(0, "a", SamplingParams(), [1], [])
    with pytest.raises(AssertionError, match="belongs to a"):
        batch.add(0, "b", SamplingParams(), [1], [])
    with pytest.raises(AssertionError, match="free slot"):
        batch.metadata(2)
    batch.remove(0)
    batch.remove(0)
    batch.add(0, "b", SamplingParams(), [1], [])


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 39), max_size=60),
    output=st.lists(st.integers(0, 39), max_size=200),
    cuts=st.lists(st.integers(0, 200), max_size=5),
)
def test_penalties_follow_the_live_output_list(prompt: list[int], output: list[int], cuts: list[int]) -> None:
    """C06-06: counted in any pieces, penalties equal the reference's count over the whole."""
    params = SamplingParams(repetition_penalty=1.4, frequency_penalty=0.3, presence_penalty=0.6)
    logits = np.random.default_rng(0).normal(0, 2, 40).astype(np.float32)
    live: list[int] = []
    penalties = Penalties()
    penalties.add(0, SlotRequest(params, prompt, live, 40))
    rows = Rows(np.array([0]), 1, torch.device("cpu"))
    got = torch.from_numpy(logits.copy()).unsqueeze(0)
    for cut in [*sorted(cuts), len(output)]:
        live.extend(output[len(live) : cut])
        stage = penalties.stage(rows)
    assert stage is not None
    want = run_chain(logits, params, prompt, output, order=("penalties",)).logits
    np.testing.assert_allclose(stage.apply(got)[0], want, atol=1e-4)


def test_custom_processors_declare_their_class() -> None:
    """C06-06: a custom processor that may change the argmax sees all rows, an invariant one only random rows."""

    class Record(SlotEntries[int]):
        argmax_invariant: ClassVar[bool] = False
        seen: list[int]

        def __init__(self) -> None:
            super().__init__()
            self.seen = []

        def add(self, slot: int, request: SlotRequest) -> None:
            self.entries[slot] = slot

        def stage(self, rows: Rows) -> Stage | None:
            return self

        def apply(self, logits: Tensor) -> Tensor:
            self.seen.append(len(logits))
            return logits if self.argmax_invariant else logits.roll(1, 1)

    class Invariant(Record):
        argmax_invariant: ClassVar[bool] = True

    changing, invariant = Record(), Invariant()
    batch = SamplingBatch(3, VOCAB, processors=[changing, invariant])
    for slot, temperature in enumerate((0.0, 1.0, 0.0)):
        batch.add(slot, str(slot), SamplingParams(temperature=temperature), [1], [])
    logits = torch.randn(3, VOCAB)
    sampled = Sampler()(logits.clone(), batch.metadata(3)).token_ids.flatten()
    assert changing.seen == [3] and invariant.seen == [1]
    assert sampled[0] == (logits[0].argmax() + 1) % VOCAB
    assert not batch.argmax_only(3).any()
