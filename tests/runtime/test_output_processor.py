"""Prompts in and outputs out: what both front ends share."""

from __future__ import annotations

import pytest

from tests.server.tiny_tokenizer import write_tokenizer
from treadle.ir.errors import UserError
from treadle.runtime.engine.input_processor import InputProcessor
from treadle.runtime.engine.model_info import ModelInfo
from treadle.runtime.engine.output_processor import OutputProcessor
from treadle.runtime.protocol import CoreOutput, LogprobRow
from treadle.runtime.renderer import Renderer
from treadle.runtime.sampling_params import RequestOutputKind, SamplingParams

LIMIT = 32
INFO = ModelInfo(
    name="toy",
    architecture="",
    vocab_size=400,
    max_model_len=LIMIT,
    dtype="f32",
    max_num_seqs=4,
    max_num_batched_tokens=64,
    block_size=4,
    num_blocks=10,
    kv_cache_bytes=0,
    kv_cache_reason="",
    attention_backends=[],
    capture_support="NEVER",
    num_threads=1,
    executor="uni",
    tasks=["generate"],
    enable_prefix_caching=True,
    notes={},
)


@pytest.fixture
def renderer(tmp_path) -> Renderer:
    return Renderer.load(write_tokenizer(tmp_path / "tokenizer", generation_config={"eos_token_id": [2, 0], "top_k": 7}))


@pytest.fixture
def inputs(renderer) -> InputProcessor:
    return InputProcessor(INFO, renderer)


def out(req_id: str, tokens: list[int], reason=None, **more) -> CoreOutput:
    return CoreOutput(request_id=req_id, new_token_ids=tokens, finish_reason=reason, **more)


def test_every_way_to_write_a_prompt_gives_the_same_ids(inputs, renderer):
    """C02-01: text, ids and mappings meet in one core request."""
    ids = renderer.encode("the fox")
    for prompt in ("the fox", ids, tuple(ids), {"prompt": "the fox"}, {"prompt_token_ids": ids}):
        assert inputs.process(prompt, None, "a").children[0].prompt_token_ids == ids
    assert inputs.process({"prompt_token_ids": ids, "cache_salt": "s"}, None, "a").children[0].cache_salt == "s"


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        ("", "empty"),
        ([], "empty"),
        ({"prompt_token_ids": []}, "empty"),
        ({}, 'needs "prompt"'),
        ({"text": "x"}, "no key 'text'"),
        ([1, -1], "prompt token 1 has id -1"),
        ([1, 2, 400], "prompt token 2 has id 400.*0 to 399"),
        ([1, "2"], "prompt token 1 is '2'"),
        ([True], "prompt token 0 is True"),
        (None, "NoneType"),
        (list(range(LIMIT)), "32 tokens, but the model's limit is 32.*at most 31"),
    ],
)
def test_bad_prompts_are_named(inputs, prompt, match):
    """TRAP-07, TRAP-08: the error names what is wrong, where, and the true limit."""
    with pytest.raises(UserError, match=match):
        inputs.process(prompt, None, "a")


def test_max_tokens_is_clamped_to_the_room(inputs):
    """TRAP-07: p prompt tokens leave L - p; more is clamped as documented, none means all of it."""
    for asked, effective in ((LIMIT - 5, LIMIT - 5), (LIMIT - 4, LIMIT - 5), (None, LIMIT - 5), (3, 3)):
        request = inputs.process([1] * 5, SamplingParams(max_tokens=asked), "a")
        assert request.children[0].sampling_params.max_tokens == effective


def test_defaults_come_from_the_model_unless_neutral_ones_are_asked_for(inputs, renderer):
    """C14-06, C02-05: generation_config.json fills what is not given; the neutral option leaves it out."""
    assert inputs.default_params().top_k == 7
    assert InputProcessor(INFO, renderer, generation_config="vllm").default_params() == SamplingParams()
    assert inputs.process([1], SamplingParams(top_k=3), "a").children[0].sampling_params.top_k == 3


def test_all_end_ids_of_the_model_stop(inputs):
    """TRAP-19: a list of end ids stops at each of them; `ignore_eos` at none."""
    params = inputs.process([1], SamplingParams(), "a").children[0].sampling_params
    assert (params.eos_token_id, params.all_stop_token_ids) == (2, {0, 2})
    assert not inputs.process([1], SamplingParams(ignore_eos=True), "a").children[0].sampling_params.all_stop_token_ids


def test_n_fans_out_with_its_own_seeds_and_leaves_the_caller_alone(inputs):
    """R-2.32: n core requests with n = 1; seed + index; the caller's object is not changed."""
    given = SamplingParams(n=3, seed=5)
    request = inputs.process([1, 2], given, "a")
    assert [child.request_id for child in request.children] == ["0_a", "1_a", "2_a"]
    assert [child.sampling_params.seed for child in request.children] == [5, 6, 7]
    assert all(child.sampling_params.n == 1 for child in request.children)
    assert given == SamplingParams(n=3, seed=5)


def run(renderer, inputs, params: SamplingParams, steps: list[list[CoreOutput]]):
    processor = OutputProcessor(renderer)
    processor.add(inputs.process([5, 6], params, "a"))
    return [processor.process(step) for step in steps], processor


def test_deltas_joined_are_the_whole(inputs, renderer):
    """C02-02: text, ids and logprobs of all deltas joined equal the cumulative output."""
    ids = renderer.encode("seven green bottles")
    rows = [[LogprobRow([i], [-0.5], [1])] for i in ids]
    steps = [
        [out("a", [i], "length" if n == len(ids) - 1 else None, logprobs=rows[n])] for n, i in enumerate(ids)
    ]
    params = {"max_tokens": len(ids), "logprobs": 0}
    deltas, _ = run(renderer, inputs, SamplingParams(output_kind=RequestOutputKind.DELTA, **params), steps)
    whole, processor = run(renderer, inputs, SamplingParams(**params), steps)
    parts = [d.outputs[0].outputs[0] for d in deltas]
    last = whole[-1].outputs[0].outputs[0]
    assert "".join(p.text for p in parts) == last.text == "seven green bottles"
    assert [t for p in parts for t in p.token_ids] == last.token_ids == ids
    assert [r for p in parts for r in p.logprobs] == last.logprobs
    assert last.cumulative_logprob == pytest.approx(-0.5 * len(ids))
    assert whole[-1].outputs[0].finished and processor.num_requests == 0


def test_final_only_shows_once_with_all_completions(inputs, renderer):
    params = SamplingParams(n=2, output_kind=RequestOutputKind.FINAL_ONLY)
    done, _ = run(
        renderer, inputs, params, [[out("0_a", [70]), out("1_a", [71], "length")], [out("0_a", [72], "length")]]
    )
    assert done[0].outputs == []
    [output] = done[1].outputs
    assert output.finished and [c.token_ids for c in output.outputs] == [[70, 72], [71]]


def test_a_stop_string_ends_the_request_in_the_core_too(inputs, renderer):
    """C06-17: the text is cut, the reason names the string, the core is told, later outputs are ignored."""
    ids = renderer.encode("green bottles")
    steps = [[out("a", [i])] for i in ids]
    done, processor = run(renderer, inputs, SamplingParams(stop="bott", max_tokens=20), steps)
    ended = next(d for d in done if d.to_abort)
    completion = ended.outputs[0].outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("green ", "stop", "bott")
    assert ended.to_abort == ["a"] and "a" not in processor
    assert all(not d.outputs for d in done[done.index(ended) + 1 :])


def test_logprobs_have_decoded_tokens_and_the_first_prompt_position_none(inputs, renderer):
    """C06-02: vLLM's shape: a dict a position, the chosen token first, each with logprob, rank and text."""
    token = renderer.encode("fox")[0]
    row = LogprobRow([token, 70, token], [-1.0, -0.5, -1.0], [2, 1, 2])
    done, _ = run(
        renderer, inputs, SamplingParams(logprobs=2, prompt_logprobs=0),
        [[out("a", [token], logprobs=[row], prompt_logprobs=[None, LogprobRow([6], [-3.0], [9])])]],
    )  # fmt: skip
    output = done[0].outputs[0]
    assert list(output.outputs[0].logprobs[0]) == [token, 70]
    assert output.outputs[0].logprobs[0][token].decoded_token == renderer.decode([token])
    assert output.prompt_logprobs[0] is None and output.prompt_logprobs[1][6].logprob == -3.0


def test_named_tokens_have_logprobs_of_their_own(inputs, renderer):
    """C06-02: logprob_token_ids alone asks for logprobs; no number of likeliest tokens is needed beside it."""
    token = renderer.encode("fox")[0]
    row = LogprobRow([token, 70], [-1.0, -0.5], [2, 1])
    done, _ = run(renderer, inputs, SamplingParams(logprob_token_ids=[70]), [[out("a", [token], logprobs=[row])]])
    assert list(done[0].outputs[0].outputs[0].logprobs[0]) == [token, 70]


def test_a_duplicate_id_in_flight_is_refused(inputs, renderer):
    """TRAP-16: the second request is refused, the first is left alone; n > 1 cannot collide with a child's id."""
    _, processor = run(renderer, inputs, SamplingParams(n=2), [])
    for taken in ("a", "1_a"):
        with pytest.raises(UserError, match="has not ended"):
            processor.add(inputs.process([1], None, taken))
    assert processor.drop("a") == ["0_a", "1_a"] and processor.num_requests == 0
    processor.add(inputs.process([1], None, "1_a"))


def test_an_engine_error_ends_the_whole_request(inputs, renderer):
    """One refused completion takes its siblings with it; the reason is kept."""
    done, processor = run(renderer, inputs, SamplingParams(n=2), [[out("0_a", [], "error", error="too big")]])
    assert str(done[0].errors["a"]) == "too big" and done[0].to_abort == ["1_a"] and processor.num_requests == 0


def test_abort_gives_a_last_output(inputs, renderer):
    _, processor = run(renderer, inputs, SamplingParams(), [[out("a", [70])]])
    last, running = processor.abort("a")
    assert last.finished and last.outputs[0].finish_reason == "abort" and running == ["a"]
    assert processor.abort("a") == (None, [])
