"""`LLM`: offline generation with vLLM's names, over the same core as the server."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.runtime.toy_model import (
    FailingExecutor,
    SlowToyExecutor,
    TextToyExecutor,
    ToyExecutor,
    dense_greedy,
    toy_config,
)
from tests.server.tiny_tokenizer import write_tokenizer
from treadle.ir.errors import ConfigError, EngineDeadError, UserError
from treadle.runtime.chat.messages import ChatError
from treadle.runtime.engine.llm import LLM
from treadle.runtime.engine.llm_arguments import split_arguments
from treadle.runtime.renderer import Renderer
from treadle.runtime.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


@pytest.fixture
def llm():
    with LLM.from_config(toy_config()) as made:
        yield made


@pytest.fixture
def text_llm(tmp_path):
    renderer = Renderer.load(write_tokenizer(tmp_path / "tokenizer", generation_config={"temperature": 0.0}))
    with LLM.from_config(toy_config(TextToyExecutor), renderer) as made:
        yield made


def test_outputs_stand_in_the_order_of_the_prompts(llm):
    """C02-05: however long each takes."""
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (9, 1, 4)]
    outputs = llm.generate(prompts, params)
    for prompt, param, output in zip(prompts, params, outputs, strict=True):
        assert output.prompt_token_ids == prompt and output.finished
        assert output.outputs[0].token_ids == dense_greedy(prompt, param.max_tokens)
        assert output.outputs[0].finish_reason == "length"


def test_shapes_of_prompts(llm):
    """One prompt or many, as ids or mappings; no prompts give no outputs."""
    expected = dense_greedy([1, 2], 5)
    for prompts in ([1, 2], {"prompt_token_ids": [1, 2]}, [[1, 2]], [{"prompt_token_ids": [1, 2]}]):
        [output] = llm.generate(prompts, GREEDY)
        assert output.outputs[0].token_ids == expected
    assert llm.generate([], GREEDY) == []


def test_the_first_bad_prompt_is_named_and_nothing_runs(llm):
    """TRAP-08: validation comes before any work; the next call works."""
    for prompts, match in [([[1], []], "prompt 1: the prompt is empty"), ([[1], [2, 99]], "prompt 1: prompt token 1 has id 99")]:
        with pytest.raises(UserError, match=match):
            llm.generate(prompts, GREEDY)
    with pytest.raises(UserError, match="no tokenizer"):
        llm.generate("text", GREEDY)
    with pytest.raises(UserError, match="2 entries for 1 prompts"):
        llm.generate([[1]], [GREEDY, GREEDY])
    with pytest.raises(UserError, match="lora_request is not available"):
        llm.generate([[1]], GREEDY, lora_request=object())
    assert llm.stats().num_steps == 0
    assert len(llm.generate([[1]], GREEDY)) == 1


def test_n_completions_come_together(llm):
    """C02-05, TRAP-05: n completions, seeded one by one, the same in every call."""
    params = SamplingParams(n=3, seed=7, temperature=1.0, max_tokens=6, ignore_eos=True, logprobs=1)
    [first], [again] = llm.generate([[1, 2]], params), llm.generate([[1, 2]], params)
    assert [c.index for c in first.outputs] == [0, 1, 2]
    assert [c.token_ids for c in first.outputs] == [c.token_ids for c in again.outputs]
    assert len({tuple(c.token_ids) for c in first.outputs}) > 1
    assert all(len(c.logprobs) == 6 for c in first.outputs)
    alone = llm.generate([[1, 2]], SamplingParams(seed=8, temperature=1.0, max_tokens=6, ignore_eos=True))
    assert alone[0].outputs[0].token_ids == first.outputs[1].token_ids


def test_a_stop_string_frees_the_request_at_once(text_llm):
    """C06-17: the core is told; nothing keeps running, and no block is lost."""
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    [output] = text_llm.generate("the fox", greedy)
    text = output.outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    [cut] = text_llm.generate("the fox", SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop=[stop]))
    assert cut.outputs[0].text == text[: text.index(stop)] and cut.outputs[0].stop_reason == stop
    stats = text_llm.stats()
    assert stats.num_running == stats.num_waiting == 0 and stats.num_free_blocks == stats.num_blocks


def test_chat_goes_through_the_renderer(text_llm):
    """C02-05, R-2.5: the same ids as the renderer gives; one conversation or many; defaults from the model."""
    messages = [{"role": "user", "content": "hi"}]
    [one] = text_llm.chat(messages)
    two = text_llm.chat([messages, messages])
    assert one.prompt_token_ids == text_llm.renderer.render_chat(messages).token_ids
    assert [o.outputs[0].token_ids for o in two] == [one.outputs[0].token_ids] * 2
    assert text_llm.get_default_sampling_params().temperature == 0.0
    assert text_llm.get_tokenizer().get_vocab_size() > 0
    with pytest.raises(ChatError):
        text_llm.chat([])


@pytest.fixture
def interruptible():
    """SIGINT raises KeyboardInterrupt, also where the run was started with it ignored (in the background)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_aborts_cleanly():
    """Ctrl-C in the middle leaves no request behind, and the next call works."""
    with LLM.from_config(toy_config(SlowToyExecutor)) as llm:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2]], SamplingParams(max_tokens=240, ignore_eos=True))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        stats = llm.stats()
        assert (stats.num_running, stats.num_free_blocks) == (0, stats.num_blocks)
        assert len(llm.generate([[1, 2]], GREEDY)[0].outputs[0].token_ids) == 5
        llm._client.core.check_integrity()


def test_a_request_that_never_fits_is_named():
    with (
        LLM.from_config(toy_config(num_blocks=4)) as llm,
        pytest.raises(UserError, match=r"prompt 1: .*KV-cache blocks"),
    ):
        llm.generate([[1], [1] * 40], GREEDY)


def test_death_and_shutdown_are_errors_not_hangs():
    """C04-09: a failing step raises its reason; a closed LLM says so."""
    llm = LLM.from_config(toy_config(FailingExecutor))
    with pytest.raises(EngineDeadError, match="boom"):
        llm.generate([[13]], GREEDY)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(UserError, match="shut down"):
        llm.generate([[1]], GREEDY)


def test_the_prefix_cache_can_be_reset_and_is_measured(llm):
    """C12-05: a second request hits; after a reset it does not."""
    prompt = list(range(40))
    assert llm.generate([prompt], GREEDY)[0].num_cached_tokens == 0
    assert llm.generate([prompt], GREEDY)[0].num_cached_tokens == 36
    assert llm.reset_prefix_cache()
    assert llm.generate([prompt], GREEDY)[0].num_cached_tokens == 0


def test_a_salt_isolates_the_prefix_cache(llm):
    """TRAP-12 (without LoRA): other salts and no salt share nothing."""
    prompt = list(range(40))
    cached = [
        llm.generate([{"prompt_token_ids": prompt, **salt}], GREEDY)[0].num_cached_tokens
        for salt in ({"cache_salt": "blue"}, {"cache_salt": "red"}, {}, {"cache_salt": "blue"})
    ]
    assert cached == [0, 0, 0, 36]


def test_arguments_have_vllms_names():
    """C02-05: renamed, accepted where they change nothing, refused with the choices where they would."""
    engine, compiling = split_arguments(
        {"num_gpu_blocks_override": 9, "optimization_level": 0, "dtype": "auto", "tensor_parallel_size": 1, "seed": None,
         "tokenizer_mode": "auto", "load_format": "auto", "revision": None}
    )
    assert engine == {"num_blocks": 9, "level": 0} and compiling == {"level": 0, "dtype": "auto", "tensor_parallel_size": 1}
    for name, value in (("pipeline_parallel_size", 2), ("trust_remote_code", True)):
        with pytest.raises(ConfigError, match=f"{name}=.*not available in this version"):
            split_arguments({name: value})
    with pytest.raises(ConfigError, match=r"no argument 'max_num_seq'.*max_num_seqs"):
        split_arguments({"max_num_seq": 3})


def test_two_engines_share_a_process():
    """Nothing of an engine lives in module state."""
    with LLM.from_config(toy_config(ToyExecutor)) as one, LLM.from_config(toy_config(ToyExecutor)) as two:
        for prompt in ([1, 2], [3]):
            tokens = [llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for llm in (one, two, one)]
            assert tokens[0] == tokens[1] == tokens[2] == dense_greedy(prompt, 5)


def test_threads_take_turns(llm):
    """Several threads may share one LLM: each gets its own answers, and the engine lives."""
    prompts = [[start, start + 1] for start in range(1, 9)]
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda prompt: llm.generate([prompt], GREEDY)[0], prompts))
    assert [output.outputs[0].token_ids for output in outputs] == [dense_greedy(prompt, 5) for prompt in prompts]
    assert llm.generate([[1]], GREEDY)


def test_a_forked_child_is_told_not_to_wait(llm):
    """The threads of a model do not survive a fork: the child gets an error, the parent goes on."""
    child = os.fork()
    if child == 0:
        try:
            llm.generate([[1]], GREEDY)
        except UserError as error:
            os._exit(7 if "after the fork" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert llm.generate([[1]], GREEDY)


@pytest.mark.parametrize("call", [
    lambda llm: llm.generate(None),
    lambda llm: llm.generate([[1]], {"temperature": 0.0}),
    lambda llm: llm.chat({"role": "user", "content": "hi"}),
    lambda llm: llm.chat([{"role": "user", "content": "hi"}], chat_template="{{ messages }}"),
])  # fmt: skip
def test_wrong_shapes_are_refused_by_name(text_llm, call):
    with pytest.raises(UserError, match="give|leave it out"):
        call(text_llm)


def test_the_share_of_a_gpu_is_noted(caplog):
    """A script that sets it for a GPU runs; what sizes the pool here is said."""
    assert split_arguments({"gpu_memory_utilization": 0.9}) == ({}, {})
    assert "kv_cache_bytes" in caplog.text
