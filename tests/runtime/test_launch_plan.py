"""Launch plans: the same pieces as the stitched program, called from C; here the pieces are Python functions behind C's door."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import pytest
import torch

from tests.runtime import toy_model as toy
from treadle.codegen.loader import RangeDispatch
from treadle.codegen.ranges import TokenRange
from treadle.codegen.torch_private import NativePiece, take_tensor, tensor_handle
from treadle.ir.errors import ArtifactError
from treadle.kernels.cpu_features import local_cpu
from treadle.kernels.native import NativeLibrary, compile_native, load_native, native_sources
from treadle.runtime.engine.core import EngineCore
from treadle.runtime.protocol import CoreRequest
from treadle.runtime.runner.model import LoadedModel
from treadle.runtime.runner.native_plan import NativePlan
from treadle.runtime.sampling_params import SamplingParams

_RUN = ctypes.CFUNCTYPE(
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_void_p,
)
Piece = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


class Callback:
    """A Python function that C can call as if it were a compiled piece: takes over the inputs, gives away the outputs."""

    def __init__(self, piece: Piece):
        self.calls = 0
        self._piece = piece
        self._entry = _RUN(self._run)

    def __call__(self, arguments: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self._piece(arguments)

    def native(self) -> NativePiece:
        return NativePiece(0, ctypes.cast(self._entry, ctypes.c_void_p).value or 0, lambda: None)

    def _run(self, container, inputs, num_inputs, outputs, num_outputs, stream, proxy) -> int:
        self.calls += 1
        arguments = [take_tensor(inputs[i]) for i in range(num_inputs)]
        try:
            results = self._piece(arguments)
        except ValueError:
            return 1
        for i, result in enumerate(results):
            outputs[i] = tensor_handle(result.contiguous())
        return 0


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> dict[str, NativeLibrary]:
    folder = tmp_path_factory.mktemp("native")
    sources = {name: native_sources()[name] for name in ("cpu_attention", "launch_plan")}
    return {
        name: load_native(compile_native(source, local_cpu().arch, folder / f"{name}.so"))
        for name, source in sources.items()
    }


def captured_model(native: dict[str, NativeLibrary], windows: tuple[int | None, ...] = toy.WINDOWS) -> LoadedModel:
    """The toy model with pieces that C can call."""
    whole = TokenRange(1, toy.MAX_TOKENS)
    pieces = {
        name: RangeDispatch(name, [whole], (0, 0), artifacts={whole: Callback(piece)}) for name, piece in toy.PIECES.items()
    }
    model = toy.toy_model(windows)
    return LoadedModel(model.spec, model.program, pieces, toy.toy_weights(), native)


def answers(native: dict[str, NativeLibrary], mode: str, windows: tuple[int | None, ...]) -> tuple[list, dict]:
    """Token ids and logprobs of five requests in a pool so small that some are preempted, and the steps by mode."""

    class Executor(toy.ToyExecutor):
        def load_model(self, config):
            return captured_model(native, windows)

    core = EngineCore(
        toy.toy_config(Executor, attention_backend="cpu", block_size=16, graph_mode=mode, num_blocks=12, max_num_batched_tokens=20)
    )
    for i in range(5):
        params = SamplingParams(temperature=0.0, max_tokens=30, prompt_logprobs=2 if i == 1 else None)
        prompt = [(7 * i + j) % toy.VOCAB for j in range(9 + 5 * i)]
        core.add_request(CoreRequest(request_id=str(i), prompt_token_ids=prompt, sampling_params=params, arrival_time=i))
    found: dict[str, list] = {}
    while core.has_work:
        for output in core.step().outputs:
            found.setdefault(output.request_id, []).append((output.new_token_ids, output.prompt_logprobs))
    stats = core.stats()
    assert stats.num_preemptions > 0
    return [found[str(i)] for i in range(5)], stats.graph_modes


@pytest.mark.parametrize("windows", [toy.WINDOWS, toy.MIXED_WINDOWS], ids=["full attention", "windows"])
def test_a_launch_plan_gives_the_tokens_of_the_stitched_program(native: dict[str, NativeLibrary], windows) -> None:
    """C10-01, R-10.21, R-10.26: FULL and NONE give equal tokens and prompt logprobs through the same pieces, with
    chunked prefill and preemption; every step of FULL is a replay."""
    stitched, modes = answers(native, "none", windows)
    assert set(modes) == {"NONE"}
    replayed, modes = answers(native, "full", windows)
    assert set(modes) == {"FULL"}
    assert replayed == stitched


def test_decode_only_runs_prompts_stitched(native: dict[str, NativeLibrary]) -> None:
    """full_decode_only and full_and_piecewise: FULL for decode steps, something less for steps with prompts."""
    expected, _ = answers(native, "none", toy.WINDOWS)
    for mode in ("full_decode_only", "full_and_piecewise"):
        found, modes = answers(native, mode, toy.WINDOWS)
        assert found == expected and modes.keys() == {"FULL", "NONE"} and min(modes.values()) > 1


def test_what_cannot_be_captured_is_lowered_with_the_reason(native: dict[str, NativeLibrary]) -> None:
    """R-10.10: an attention backend or a piece without a C entry means PIECEWISE, and the notes say why."""

    class Uncaptured(toy.ToyExecutor):
        def load_model(self, config):
            model = captured_model(native)
            return LoadedModel(model.spec, model.program, toy.PIECES, model.weights, native)

    core = EngineCore(toy.toy_config(Uncaptured, attention_backend="cpu", block_size=16))
    assert "called through Python" in core.info.notes["graph_mode"]

    class Reference(toy.ToyExecutor):
        def load_model(self, config):
            return captured_model(native)

    core = EngineCore(toy.toy_config(Reference, attention_backend="torch"))
    assert "attention backend cannot be captured" in core.info.notes["graph_mode"]
    assert EngineCore(toy.toy_config(Reference, attention_backend="cpu", block_size=16)).info.notes == {}


def test_a_plan_picks_the_artifact_by_token_count_and_frees_what_is_dead(native: dict[str, NativeLibrary]) -> None:
    """Exact sizes first, then the range; a count in no range, a failed piece and a bad row are errors that name the step."""
    doubled, tripled = Callback(lambda args: [args[0] * 2 + args[1]]), Callback(lambda args: [args[0] * 3 + args[1]])
    plan = NativePlan(native["launch_plan"], 4)
    artifacts = [(TokenRange(2, 2), doubled.native()), (TokenRange(1, 4), tripled.native())]
    bias = torch.tensor([0.5])
    plan.add_piece([0], [1], [bias], artifacts, (0, 0))
    plan.add_select(1, 2, 3, 4)
    plan.add_dead([1])
    for count, factor in ((1, 3), (2, 2), (4, 3)):
        x, rows = torch.arange(count * 2.0).reshape(count, 2), torch.tensor([count - 1, 0])
        with plan.holding({0: x, 2: rows}):
            plan.run(0, plan.num_steps)
        assert torch.equal(plan.value(3), x[rows] * factor + 0.5)
        with pytest.raises(AssertionError, match="place 1 is empty"):
            plan.value(1)
    with plan.holding({0: torch.zeros(5, 2), 2: rows}), pytest.raises(RuntimeError, match="step 0: no artifact holds"):
        plan.run(0, 2)
    with plan.holding({0: torch.zeros(3, 2), 2: torch.tensor([3])}), pytest.raises(RuntimeError, match="step 1: a row"):
        plan.run(0, 2)
    assert (doubled.calls, tripled.calls) == (1, 3)
    seconds_in_pieces, seconds_in_attention = plan.times()
    assert seconds_in_pieces > 0 and seconds_in_attention == 0


def test_a_failing_piece_is_an_error(native: dict[str, NativeLibrary]) -> None:
    """A piece that reports failure ends the run; what it was given is not leaked and the plan stays usable."""

    def picky(args: list[torch.Tensor]) -> list[torch.Tensor]:
        if args[0].sum() < 0:
            raise ValueError("negative")
        return [args[0] + 1]

    plan, piece = NativePlan(native["launch_plan"], 2), Callback(picky)
    plan.add_piece([0], [1], [], [(TokenRange(1, 8), piece.native())], None)
    with plan.holding({0: -torch.ones(3)}), pytest.raises(RuntimeError, match="step 0: the compiled piece failed"):
        plan.run(0, 1)
    with plan.holding({0: torch.ones(3)}):
        plan.run(0, 1)
    assert plan.value(1).tolist() == [2, 2, 2]


def test_pieces_that_only_python_can_call_are_refused() -> None:
    """`native` names the piece."""
    whole = TokenRange(1, 4)
    piece = RangeDispatch("mix", [whole], (0, 0), artifacts={whole: toy.mix})
    with pytest.raises(ArtifactError, match="piece mix is called through Python"):
        piece.native()
