"""Tensor parallel 2 over gloo in two processes: greedy tokens equal to one process, and a rank that dies (C07-05)."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import treadle
from tests.models import save_model
from treadle import LLM, SamplingParams
from treadle.codegen.bundle import open_bundle
from treadle.codegen.prove_bundle import prove_bundle
from treadle.ir.errors import BundleError, ConfigError, EngineDeadError, UserError
from treadle.runtime.executor.multi_process import MultiProcessExecutor

pytestmark = pytest.mark.slow

SETTINGS = {"kv_cache_bytes": 1 << 20, "max_num_seqs": 8, "num_threads": 1}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=1)
MIXED = SamplingParams(temperature=1.0, max_tokens=6, ignore_eos=True)


def compile_for(world: int, model: Path, store: Path, **settings: Any) -> Path:
    """Steps of 32 tokens: the longest prompt needs two."""
    output = model.parent / f"{model.name}-{world}.bundle"
    settings = {"backend": "eager", "dtype": "float32", "max_num_batched_tokens": 32, **settings}
    return treadle.compile(model, output, store=store, tensor_parallel_size=world, **settings)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 320, (length,), generator=generator).tolist() for length in (1, 7, 40)]


def assert_equal_to_one_process(name: str, folder: Path, store: Path, passes: str = "", **settings: Any) -> Path:
    """Greedy and sampled tokens, and log-probabilities within tolerance. Returns the bundle of two ranks, made with `passes`."""
    save_model(name, folder / name)
    bundles = [
        compile_for(1, folder / name, store, **settings),
        compile_for(2, folder / name, store, passes=passes, **settings),
    ]
    found = []
    for bundle, executor in zip(bundles, ("uni", "mp"), strict=True):
        with LLM(bundle, **SETTINGS) as llm:
            assert llm.info.executor == executor
            found.append((llm.generate(prompts(), GREEDY), llm.generate(prompts(), MIXED)))
    for one, two in zip(*(greedy for greedy, _ in found), strict=True):
        assert one.outputs[0].token_ids == two.outputs[0].token_ids
        first, second = (output.outputs[0].cumulative_logprob for output in (one, two))
        assert abs(first - second) < 1e-3
        assert one.prompt_logprobs is not None and two.prompt_logprobs is not None
        assert len(one.prompt_logprobs) == len(two.prompt_logprobs)
    for one, two in zip(*(mixed for _, mixed in found), strict=True):
        assert one.outputs[0].token_ids == two.outputs[0].token_ids
    assert len({token for outputs in found[0] for output in outputs for token in output.outputs[0].token_ids}) > 3
    return bundles[1]


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_greedy_tokens_equal_one_process(name: str, tmp_path: Path, store: Path) -> None:
    """C07-05, R-7.14: biases, grouped heads, tied and untied heads, layer norms."""
    assert_equal_to_one_process(name, tmp_path, store)


def test_mixture_of_experts_and_a_rank_that_dies(tmp_path: Path, store: Path) -> None:
    """C07-05: a mixture of experts; then a killed rank ends the engine with the reason, in a step and between steps."""
    bundle = assert_equal_to_one_process("mixtral", tmp_path, store)
    _check_manifest(bundle)
    with LLM(bundle, **SETTINGS) as llm:
        executor: Any = llm._open_client().core.executor
        assert isinstance(executor, MultiProcessExecutor)
        executor.check_health()
        pid = executor._others[0].process.pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=rf"rank 1 \(process {pid}\) ended with signal 9"):
            llm.generate(prompts(), GREEDY)
        with pytest.raises(EngineDeadError, match="ended with signal 9"):
            executor.check_health()


def _check_manifest(bundle: Path) -> None:
    """Pieces are shared, weights are not; what does not fit the bundle is refused before a process starts."""
    manifest = open_bundle(bundle).manifest
    assert manifest.num_ranks == 2
    for rank in range(2):
        tensors = manifest.weights_of(rank).tensors
        assert {Path(t.file or "").parent.as_posix() for t in tensors} == {f"weights/rank{rank}"}
        assert all(f"rank={rank}" in t.recipe for t in tensors if t.recipe.startswith("shard"))
    with pytest.raises(BundleError, match="weights for 2 ranks, not for rank 2"):
        manifest.weights_of(2)
    proof = prove_bundle(bundle, shapes=[1, 7])
    assert not proof.failures and {"shard_tensor_parallel", "compiled program"} <= {check.name for check in proof.checks}
    with pytest.raises(UserError, match="compiled for 2"):
        LLM(bundle, tensor_parallel_size=4)
    with pytest.raises(ConfigError, match="cut over 2 ranks, and 1 runs here"):
        LLM(bundle, executor="uni", **SETTINGS)


def test_sums_that_overlap_products(tmp_path: Path, store: Path) -> None:
    """Asynchronous sums over gloo, while the next product is computed: tokens equal one process."""
    bundle = assert_equal_to_one_process("llama", tmp_path, store, passes="overlap_all_reduce")
    steps = [step.op for step in open_bundle(bundle).manifest.program.steps if step.kind == "op"]
    assert steps.count("linear_all_reduce") == 6 and "all_reduce_add_rms_norm" not in steps


def test_tokens_on_shares(tmp_path: Path, store: Path) -> None:
    """Sequence parallel over gloo: prompts of odd lengths and single tokens, which not every rank has a row of."""
    bundle = assert_equal_to_one_process("llama", tmp_path, store, passes="sequence_parallel")
    steps = [step.op for step in open_bundle(bundle).manifest.program.steps if step.kind == "op"]
    assert steps.count("reduce_scatter_rows") == 6 and steps.count("own_rows") == 1


def test_a_quantized_model_runs_on_two_ranks(tmp_path: Path, store: Path) -> None:
    """int8 on both sides of products, cut over two processes: log-probabilities as close to float32 as in one process."""
    save_model("llama", tmp_path / "llama")
    found = []
    for world, scheme in ((1, None), (1, "int8"), (2, "int8")):
        output = tmp_path / f"{world}-{scheme}.bundle"
        settings = {"backend": "eager", "dtype": "float32", "max_num_batched_tokens": 64, "quantization": scheme}
        treadle.compile(tmp_path / "llama", output, store=store, tensor_parallel_size=world, **settings)
        with LLM(output, **SETTINGS) as llm:
            rows = llm.generate([prompts()[2]], GREEDY)[0].prompt_logprobs
        assert rows is not None
        found.append(torch.tensor([max(one.logprob for one in row.values()) for row in rows[1:] if row is not None]))
    plain, one, two = found
    noise = (one - plain).abs().max()
    assert 0 < noise < 0.5 and (two - plain).abs().max() < 2 * noise + 1e-3


def test_mp_needs_a_bundle_of_several_ranks(bundle: Path) -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2"):
        LLM(bundle, executor="mp")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma2"])
def test_compiled_pieces_equal_one_process(name: str, tmp_path: Path, store: Path) -> None:
    """C07-05: the same with code from inductor, which both ranks share."""
    assert_equal_to_one_process(name, tmp_path, store, backend="inductor")
