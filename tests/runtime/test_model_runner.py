"""The model runner on a toy model: the two halves of a step, padding, stale memory, and how the cache is sized."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runtime.toy_model import ToyExecutor, dense_greedy, toy_config, toy_model, toy_program
from treadle.codegen.program import KVLayer
from treadle.ir.errors import BundleError, ConfigError
from treadle.runtime.dispatch import BatchDescriptor, GraphMode
from treadle.runtime.engine.core import EngineCore
from treadle.runtime.kv_specs import group_layers
from treadle.runtime.protocol import CoreRequest
from treadle.runtime.runner.kv_cache import available_memory, blocks_for, layer_specs, plan_cache
from treadle.runtime.runner.model import LoadedModel
from treadle.runtime.sampling_params import SamplingParams

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def started(executor=ToyExecutor, **changes) -> EngineCore:
    core = EngineCore(toy_config(executor, **changes))
    params = SamplingParams(temperature=0.0, max_tokens=10)
    core.add_request(CoreRequest(request_id="a", prompt_token_ids=PROMPT, sampling_params=params, arrival_time=0))
    return core


def finish(core: EngineCore) -> list[int]:
    tokens = []
    while core.has_work:
        tokens += [t for output in core.step().outputs for t in output.new_token_ids]
    return tokens


def runner_of(core: EngineCore):
    return core.executor._worker.runner


def test_the_parked_state_is_consumed_exactly_once():
    """C04-06, R-4.5, R-4.6: execute gives None, sampling always a result, and a step cannot be launched over another."""
    core = started()
    runner = runner_of(core)
    step = core.scheduler.schedule()
    assert runner.execute_model(step) is None
    with pytest.raises(AssertionError, match="never sampled"):
        runner.execute_model(step)
    output = runner.sample_tokens()
    assert output.req_ids == ["a"] and output.sampled_token_ids == [dense_greedy(PROMPT, 1)]
    assert runner.sample_tokens().req_ids == []


def test_padded_steps_give_the_same_tokens():
    """C04-14, C04-21, C10-01: batches padded to captured sizes change no token, and are counted by mode."""

    class Padding(ToyExecutor):
        def load_model(self, config):
            keys = {(GraphMode.PIECEWISE, BatchDescriptor(num_tokens=size)) for size in (3, 7, 64)}
            return toy_model(graph_keys=frozenset(keys))

    core = started(Padding, max_num_batched_tokens=5)
    assert finish(core) == dense_greedy(PROMPT, 10)
    assert set(core.stats().graph_modes) == {"PIECEWISE"}


def test_garbage_in_reused_blocks_has_no_effect():
    """C04-11: the cache full of NaN, as if other requests had left it: attention reads written positions only."""
    core = started()
    for view in runner_of(core).cache.views.values():
        view.fill_(torch.nan)
    assert finish(core) == dense_greedy(PROMPT, 10)


def test_listed_blocks_are_zeroed_in_every_layer():
    """C04-11, R-4.13: blocks that the scheduler lists are cleared, the others are not touched."""
    cache = runner_of(started()).cache
    for view in cache.views.values():
        view.fill_(torch.nan)
    cache.zero_blocks([2, 5])
    for view in cache.views.values():
        assert not view[[2, 5]].isnan().any() and view[[1, 3, 4]].isnan().all()


def test_unfinished_prompts_sample_nothing_and_run_no_head():
    """R-4.6: a chunk in the middle of a prompt gives an empty list; its logits are never computed."""
    core = started(max_num_batched_tokens=3)
    runner = runner_of(core)
    runner.model.logits = pytest.fail  # type: ignore[method-assign]
    runner.execute_model(core.scheduler.schedule())
    assert runner.sample_tokens().sampled_token_ids == [[]]


def test_a_program_that_cannot_run_is_refused():
    """What is missing or unknown is named when the model is loaded or bound, not in the middle of a step."""
    program = toy_program()
    with pytest.raises(BundleError, match="embed"):
        LoadedModel(toy_model().spec, program, {}, {})
    program = toy_program()
    program.steps = [step for step in program.steps if step.op != "select_rows"]
    program.steps[-1].inputs = ["x2"]
    with pytest.raises(BundleError, match="selects no rows"):
        LoadedModel(toy_model().spec, program, toy_model().pieces, toy_model().weights)
    model = toy_model()
    model.program.steps[2].op = "conv"
    model.program.kv_layers.pop(0)
    with pytest.raises(BundleError, match="unknown op step 'conv'"):
        model.bind(lambda shape, sinks: None)


LAYERS = [KVLayer(layer=i, num_kv_heads=2, head_size=8) for i in range(2)]
GROUPS = group_layers(layer_specs(LAYERS, block_size=4, dtype="f32"))
SIZES = {
    "num_blocks": None,
    "kv_cache_bytes": None,
    "max_num_seqs": 4,
    "max_model_len": 64,
    "model_len_asked": False,
    "available": 1 << 30,
}
BLOCK_BYTES = 2 * 2 * 4 * 16 * 4


def test_cache_is_capped_to_what_all_slots_can_use():
    plan = plan_cache(GROUPS, **SIZES)
    assert (plan.num_blocks, plan.block_bytes) == (4 * 16 + 1, BLOCK_BYTES) and "4 requests of 64" in plan.reason


def test_asked_blocks_win_over_bytes():
    plan = plan_cache(GROUPS, **{**SIZES, "num_blocks": 7, "kv_cache_bytes": 1 << 20})
    assert (plan.num_blocks, plan.reason) == (7, "asked for")


def test_bytes_and_share_of_memory():
    assert plan_cache(GROUPS, **{**SIZES, "kv_cache_bytes": 20 * BLOCK_BYTES + 5}).num_blocks == 20
    plan = plan_cache(GROUPS, **{**SIZES, "max_num_seqs": 10**6, "available": 1 << 24})
    assert plan.num_bytes <= 0.4 * (1 << 24) < plan.num_bytes + BLOCK_BYTES
    huge = plan_cache(GROUPS, **{**SIZES, "max_num_seqs": 10**9, "available": 1 << 40})
    assert huge.num_bytes <= 4 << 30


def test_a_longest_request_that_does_not_fit():
    """The length is lowered with a reason if nobody asked for it; else an error states the bytes that it needs."""
    small = {**SIZES, "kv_cache_bytes": 5 * BLOCK_BYTES}
    plan = plan_cache(GROUPS, **small)
    assert plan.max_model_len == 16 and "lowered to 16" in plan.reason
    assert blocks_for(GROUPS, 16) + 1 == 5
    with pytest.raises(ConfigError, match=str(17 * BLOCK_BYTES)):
        plan_cache(GROUPS, **{**small, "model_len_asked": True})
    with pytest.raises(ConfigError):
        plan_cache(GROUPS, **{**SIZES, "kv_cache_bytes": BLOCK_BYTES})


def test_control_group_limits_count(tmp_path: Path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    assert available_memory(meminfo, tmp_path) == 8000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(meminfo, tmp_path) == 8000 * 1024
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert available_memory(meminfo, tmp_path) == 3000
