"""A whole compile at -O0, which needs no compiler for the pieces: stages, store, bundle, depth, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.models import make_model, save_model
from treadle.codegen.bundle import Bundle, open_bundle
from treadle.codegen.compile import compile as compile_model
from treadle.codegen.compile import default_output
from treadle.codegen.counters import COUNTERS
from treadle.codegen.explain import explain_compile
from treadle.codegen.load_weights import load_weights
from treadle.codegen.loader import load_pieces
from treadle.codegen.progress import Progress
from treadle.codegen.store import Store
from treadle.ir.errors import BundleError, ConfigError, ModelError

pytestmark = pytest.mark.slow


class Heard(Progress):
    def __init__(self) -> None:
        self.stages: list[str] = []
        self.pieces: list[tuple[int, int]] = []
        self.notes: list[str] = []

    def begin(self, stage: str) -> None:
        self.stages.append(stage)

    def piece(self, number: int, total: int, label: str) -> None:
        self.pieces.append((number, total))

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny-llama"
    save_model("llama", folder)
    return folder


@pytest.fixture(scope="session")
def bundle(store: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    output = tmp_path_factory.mktemp("bundles") / "tiny"
    return open_bundle(compile_model(model, output, store=store, level=0, max_num_batched_tokens=64))


@pytest.fixture
def fresh(store: Path, bundle: Bundle, tmp_path: Path) -> Path:
    """A store with the native libraries of the session's in it, and no piece."""
    for entry in bundle.manifest.native:
        folder = Path("objects") / entry.key[:2] / entry.key
        shutil.copytree(store / folder, tmp_path / "store" / folder)
    return tmp_path / "store"


def test_a_bundle_is_no_model(tmp_path: Path) -> None:
    """Compiling a bundle, or nothing, says so at once."""
    (tmp_path / "manifest.json").write_text('{"schema": 1}')
    with pytest.raises(BundleError, match=r"is compiled already: `treadle serve"):
        compile_model(tmp_path)
    with pytest.raises(ModelError, match="name is empty"):
        compile_model("", tmp_path / "out.bundle", store=tmp_path / "store", level=0)


def test_a_bundle_says_what_it_is(bundle: Bundle) -> None:
    manifest = bundle.manifest
    bundle.verify()
    assert (manifest.model.architecture, manifest.model.vocab_size, manifest.model.num_layers) == ("LlamaForCausalLM", 320, 3)
    assert (manifest.limits.max_num_batched_tokens, manifest.limits.max_model_len) == (64, 256)
    assert [row.stage for row in manifest.times] == [
        "read config", "trace", "passes", "compile pieces", "native kernels", "write bundle",
    ]  # fmt: skip
    assert [Path(path).name for path in manifest.stages] == [
        "00-traced.ir", "01-clean.ir", "02-raised.ir", "03-fused.ir", "04-split.ir", "05-unified.ir",
    ]  # fmt: skip
    assert {piece.name: piece.layers for piece in manifest.pieces} == {"first": [], "layer": [0, 1], "last": [2], "logits": []}
    assert bundle.unlisted() == []


def test_a_departure_from_what_was_asked_has_its_reason(bundle: Bundle) -> None:
    """Acceptance 9, promise 8"""
    rows = {row.field: row for row in bundle.manifest.settings}
    assert (rows["dtype"].value, rows["dtype"].source, rows["dtype"].asked) == ("float32", "model", "auto")
    assert rows["backend"].source == "level 0" and rows["max_num_batched_tokens"].source == "user"


def test_a_setting_the_model_cannot_honour_is_lowered_aloud(model: Path, store: Path, tmp_path: Path) -> None:
    made = compile_model(model, tmp_path / "b", store=store, level=0, max_num_batched_tokens=64, max_model_len=4096)
    row = next(row for row in open_bundle(made).manifest.settings if row.field == "max_model_len")
    assert (row.value, row.asked, row.reason) == (256, 4096, "the model has only 256 positions")


def run(bundle: Bundle, ids: list[int]) -> torch.Tensor:
    """The stitched program on one sequence with plain causal attention."""
    pieces, weights = load_pieces(bundle), load_weights(bundle)
    values = {
        "input_ids": torch.tensor(ids),
        "positions": torch.arange(len(ids)),
        "logit_rows": torch.arange(len(ids)),
    }
    for step in bundle.manifest.program.steps:
        given = [values[name] for name in step.inputs]
        if step.kind == "piece":
            results = pieces[step.piece]([*given, *(weights[name] for name in step.params)])
        elif step.op == "attention":
            q, k, v = (tensor.transpose(0, 1) for tensor in given[:3])
            results = [
                torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=step.attrs["scale"], enable_gqa=True
                ).transpose(0, 1)
            ]
        else:
            results = [given[0][given[1]]]
        values.update(zip(step.outputs, results, strict=True))
    return values[bundle.manifest.program.outputs[0]]


@pytest.mark.parametrize("tokens", [1, 2, 17])
def test_the_stitched_program_computes_the_model(bundle: Bundle, tokens: int) -> None:
    """C09-11 (R-9.27)"""
    ids = list(range(3, 3 + tokens))
    with torch.no_grad():
        expected = make_model("llama")(input_ids=torch.tensor([ids])).logits[0]
    torch.testing.assert_close(run(bundle, ids), expected, rtol=1e-4, atol=1e-5)


def test_an_exact_repeat_is_a_hit_and_changed_settings_miss(bundle: Bundle, model: Path, store: Path, tmp_path: Path) -> None:
    """TRAP-20, C09-03: repeat hits; other token budget and dtype miss; limits of the engine enter no key."""
    del bundle

    def compiled(name: str, **settings: object) -> int:
        before = COUNTERS.compilations
        asked = {"level": 0, "max_num_batched_tokens": 64, **settings}
        made = open_bundle(compile_model(model, tmp_path / name, store=store, **asked))
        if settings.get("dtype") is None:
            with torch.no_grad():
                expected = make_model("llama")(input_ids=torch.tensor([[5, 6, 7]])).logits[0]
            torch.testing.assert_close(run(made, [5, 6, 7]), expected, rtol=1e-4, atol=1e-5)
        return COUNTERS.compilations - before

    assert compiled("same") == 0
    assert compiled("shorter", max_model_len=100) == 0
    assert compiled("wider", max_num_batched_tokens=128) == 4
    assert compiled("back") == 0
    assert compiled("half", dtype="bfloat16") == 4
    assert compiled("wider again", max_num_batched_tokens=128) == 0


def test_a_pass_that_is_added_is_recorded_everywhere(bundle: Bundle, model: Path, store: Path, tmp_path: Path) -> None:
    """C09-02: in the options in its one spelling, in the pipeline, in every key, in the report with its options, and as a
    warning if it matched nothing."""
    heard = Heard()
    settings = {"store": store, "level": 0, "max_num_batched_tokens": 64}
    made = compile_model(model, tmp_path / "b", passes=" fuse_qkv ", progress=heard, **settings)
    manifest = open_bundle(made).manifest
    assert manifest.options["extra_passes"] == ["fuse_qkv"] and "fuse_qkv" in manifest.pipeline
    assert next(row for row in manifest.settings if row.field == "extra_passes").source == "user"
    keys = {item.key for piece in manifest.pieces for item in piece.ranges}
    assert not keys & {item.key for piece in bundle.manifest.pieces for item in piece.ranges}
    assert [note for note in heard.notes if note.startswith("fuse_qkv was expected to match")]
    answers = explain_compile(bundle.root, {"extra_passes": ("fuse_qkv",)}, Store(store))
    assert {answer.reason for answer in answers} == {"extra_passes changes the IR of the pieces"}
    assert all(answer.hit for answer in explain_compile(made, {}, Store(store)))


def test_passes_that_cannot_run_are_refused_before_the_model_is_read(tmp_path: Path) -> None:
    """An unknown pass, a missing requirement and two names for one setting, on a model that is not there."""
    for settings, words in (
        ({"passes": "wrong"}, "unknown pass 'wrong'"),
        ({"passes": ["fuse_qkv", "fuse_qkv"]}, "asked for twice"),
        ({"passes": "fuse_qkv", "extra_passes": ("fuse_gate_up",)}, "mean the same"),
    ):
        with pytest.raises(ConfigError, match=words):
            compile_model(tmp_path / "nowhere", tmp_path / "b", **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("layers", [2, 5])
def test_depth_adds_no_piece(layers: int, store: Path, tmp_path: Path) -> None:
    """Acceptance 4: the number of unique pieces does not depend on depth."""
    save_model("llama", tmp_path / "deep", num_hidden_layers=layers)
    made = open_bundle(compile_model(tmp_path / "deep", tmp_path / "b", store=store, level=0, max_num_batched_tokens=64))
    assert [piece.name for piece in made.manifest.pieces] == ["first", "layer", "last", "logits"]
    assert len(made.manifest.program.kv_layers) == layers


def test_damage_in_the_store_is_repaired_and_said(bundle: Bundle, model: Path, store: Path, tmp_path: Path) -> None:
    """TRAP-21"""
    digest = bundle.manifest.pieces[1].ranges[0].key
    data = store / "objects" / digest[:2] / digest / "data"
    content = data.read_bytes()
    data.write_bytes(content[:-1] + b"?")
    heard = Heard()
    made = compile_model(model, tmp_path / "b", store=store, level=0, max_num_batched_tokens=64, progress=heard)
    assert "damaged" in heard.notes[0] and data.read_bytes() == content
    assert open_bundle(made).manifest.pieces == bundle.manifest.pieces
    assert heard.pieces == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert heard.stages[0] == "read config" and heard.stages[-1] == "write bundle"


def test_weights_may_stay_in_the_checkpoint(bundle: Bundle, model: Path, store: Path, tmp_path: Path) -> None:
    made = open_bundle(
        compile_model(model, tmp_path / "b", store=store, level=0, max_num_batched_tokens=64, store_weights=False)
    )
    assert made.weight_files() == [] and made.total_bytes() < bundle.total_bytes()
    mapped, computed = load_weights(bundle), load_weights(made)
    assert mapped.keys() == computed.keys()
    assert all(torch.equal(mapped[name], computed[name]) for name in mapped)
    save_model("llama", model.parent / "other", seed=1)
    config = (model / "model.safetensors").read_bytes()
    try:
        shutil.copyfile(model.parent / "other" / "model.safetensors", model / "model.safetensors")
        with pytest.raises(BundleError, match="not the model"):
            load_weights(made)
    finally:
        (model / "model.safetensors").write_bytes(config)


@pytest.mark.slow
def test_no_secret_and_no_home_in_any_file(model: Path, fresh: Path, store: Path, tmp_path: Path) -> None:
    """Acceptance 8: an API key and HOME change no key and appear in no file of store or bundle, nor in what is printed."""
    environment = {**os.environ, "HOME": str(tmp_path / "h0me"), "TREADLE_API_KEY": "s3cret", "OPENAI_API_KEY": "s3cret"}
    environment["PYTHONPATH"] = os.getcwd()
    code = (
        "import sys, treadle; treadle.compile(sys.argv[1], sys.argv[2], store=sys.argv[3], level=0, max_num_batched_tokens=64)"
    )
    made, kept = tmp_path / "b", fresh
    done = subprocess.run(
        [sys.executable, "-c", code, str(model), str(made), str(kept)],
        env=environment, capture_output=True, check=True,
    )  # fmt: skip
    written = [path for root in (made, kept) for path in root.rglob("*") if path.is_file()]
    assert len(written) > 20
    for content in [done.stdout, done.stderr, *(path.read_bytes() for path in written)]:
        assert b"s3cret" not in content and b"h0me" not in content
    digests = {item.key for piece in open_bundle(made).manifest.pieces for item in piece.ranges}
    again = compile_model(model, tmp_path / "again", store=store, level=0, max_num_batched_tokens=64)
    assert digests == {item.key for piece in open_bundle(again).manifest.pieces for item in piece.ranges}


@pytest.mark.slow
def test_two_compiles_of_one_model_at_once(model: Path, fresh: Path, tmp_path: Path) -> None:
    """Acceptance 6, TRAP-21: both succeed and give the same artifacts."""
    processes = [start_compile(model, tmp_path / f"b{number}", fresh) for number in range(2)]
    assert [process.wait(120) for process in processes] == [0, 0]
    first, second = (open_bundle(tmp_path / f"b{number}") for number in range(2))
    assert first.manifest.pieces == second.manifest.pieces
    assert Store(fresh).verify() == []


def start_compile(model: Path, output: Path, store: Path) -> subprocess.Popen[bytes]:
    code = (
        "import sys, treadle; treadle.compile(sys.argv[1], sys.argv[2], store=sys.argv[3], level=0,"
        " max_num_batched_tokens=64, force=True)"
    )
    return subprocess.Popen([sys.executable, "-c", code, str(model), str(output), str(store)], start_new_session=True)


def left_scratch() -> list[Path]:
    """Scratch folders in the system's temporary folder whose compile has died."""
    from treadle.codegen.compile import _scratch_parent
    from treadle.codegen.locks import sweep_scratch

    return sweep_scratch(_scratch_parent(), "compile-")


@pytest.mark.slow
def test_a_compile_killed_at_random_moments_leaves_a_clean_result(model: Path, fresh: Path, tmp_path: Path) -> None:
    """Acceptance 6, TRAP-21: kill -9 at four moments of its life; then it works, and nothing is left over."""
    start = time.perf_counter()
    assert start_compile(model, tmp_path / "out" / "b", fresh).wait(120) == 0
    life = time.perf_counter() - start
    Store(fresh).gc(max_bytes=0)
    for part in (0.4, 0.7, 0.9, 0.97):
        process = start_compile(model, tmp_path / "out" / "b", fresh)
        time.sleep(life * part)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        open_bundle(tmp_path / "out" / "b").verify()
    made = compile_model(
        model, tmp_path / "out" / "b", store=fresh, level=0, max_num_batched_tokens=64, force=True
    )
    open_bundle(made).verify()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["b"]
    assert not left_scratch()
    assert Store(fresh).verify() == []


def test_what_cannot_work_is_refused_before_compiling(model: Path, store: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="private key"):
        compile_model(model, tmp_path / "b", store=store, sign=str(tmp_path / "none.pem"))
    with pytest.raises(ConfigError, match="cpu:x86-64-avx2"):
        compile_model(model, tmp_path / "b", store=store, target="tpu")
    with pytest.raises(ModelError, match="nowhere"):
        compile_model(tmp_path / "nowhere", tmp_path / "b", store=store, level=0)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("dear")
    with pytest.raises(BundleError, match="not a bundle"):
        compile_model(model, tmp_path / "mine", store=store, force=True)
    assert not (tmp_path / "b").exists()


def test_default_output_is_named_after_the_model() -> None:
    assert default_output("models/Some Model.gguf") == "Some-Model.bundle"
    assert default_output(Path("/models/tiny")) == "tiny.bundle"
    assert default_output("smollm2") == "smollm2.bundle"


def test_explain_says_what_a_changed_setting_does(bundle: Bundle, store: Path) -> None:
    """Acceptance 8"""
    kept = Store(store)

    def ask(**changes: object) -> tuple[set[bool], set[str], list[str]]:
        answers = explain_compile(bundle.root, changes, kept)
        fields = {item.field for answer in answers for item in answer.differences}
        return {answer.hit for answer in answers}, fields, answers[0].notes

    assert ask() == ({True}, set(), [])
    assert ask(max_model_len=100) == ({True}, set(), ["max_model_len enters no key"])
    assert ask(jobs=1)[0] == {True}
    hits, fields, _ = ask(max_num_batched_tokens=96)
    assert hits == {False} and fields == {"ir", "end"}
    hits, fields, _ = ask(backend="inductor")
    assert hits == {False} and "backend" in fields and "toolchain.compiler" in fields
    answers = explain_compile(bundle.root, {"dtype": "bfloat16"}, kept)
    assert not answers[0].hit and answers[0].reason == "dtype changes the IR of the pieces"
    with pytest.raises(ConfigError, match="block_size"):
        explain_compile(bundle.root, {"block_size": 32}, kept)
    json.dumps([answer.as_dict() for answer in answers])
