"""Bundles that are damaged, foreign, incomplete or unsigned: refused by name, and never a wrong answer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import treadle
from tests.codegen.test_bundle import edit, write_keys
from tests.codegen.test_store import DAMAGES
from tests.e2e.server_process import ROOT, serving
from tests.e2e.tiny_model import save_tiny
from treadle import LLM, SamplingParams
from treadle.codegen.bundle import open_bundle
from treadle.ir.errors import BundleError, ModelError

pytestmark = pytest.mark.slow

COMPILE = {"level": 0, "max_num_batched_tokens": 64}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    save_tiny(folder)
    return folder


@pytest.fixture(scope="module")
def tiny(model: Path, store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return treadle.compile(model, tmp_path_factory.mktemp("bundles") / "tiny.bundle", store=store, **COMPILE)


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny, tmp_path / "copy.bundle")


def answer(bundle: Path, **options: object) -> list[int]:
    with LLM(bundle, num_blocks=16, max_num_seqs=4, **options) as llm:
        return llm.generate("seven green bottles", GREEDY, use_tqdm=False)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def right(tiny: Path) -> list[int]:
    return answer(tiny)


def is_used(path: str) -> bool:
    """Whether a start reads the file; the IR of the stages and the reports are for people."""
    return path.partition("/")[0] in ("pieces", "native", "weights", "tokenizer")


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damaged_file_is_refused_by_name(
    damage: Callable[[Path], None], tiny: Path, right: list[int], tmp_path: Path
) -> None:
    """Acceptance 6, TRAP-21: a start from each damaged file in turn names it, or answers right without it."""
    paths = [entry.path for entry in open_bundle(tiny).manifest.files]
    assert sum(map(is_used, paths)) >= 8
    for number, path in enumerate(paths):
        damaged = shutil.copytree(tiny, tmp_path / f"{number}.bundle")
        damage(damaged / path)
        try:
            assert answer(damaged) == right and not is_used(path), path
        except BundleError as error:
            assert path in str(error)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_manifest_is_refused(damage: Callable[[Path], None], copy: Path, right: list[int]) -> None:
    """Acceptance 6: the manifest too; without one the folder is no bundle."""
    damage(copy / "manifest.json")
    try:
        assert answer(copy) == right and damage.__name__ == "damage_append"  # white space at the end is harmless
    except (BundleError, ModelError) as error:
        assert "manifest.json" in str(error) or "config.json" in str(error)


def test_an_unlisted_file_changes_nothing(copy: Path, right: list[int]) -> None:
    """Acceptance 6: extra files are never read, not even where a tokenizer or a template would be looked for."""
    (copy / "native" / "extra.so").write_bytes(b"\x7fELF")
    (copy / "weights" / "weights-00001.safetensors").write_bytes(b"x")
    (copy / "tokenizer" / "config.json").write_text('{"eos_token_id": 7}')
    (copy / "tokenizer" / "additional_chat_templates").mkdir()
    (copy / "tokenizer" / "additional_chat_templates" / "default.jinja").write_text("evil")
    assert answer(copy) == right
    with LLM(copy, num_blocks=16, max_num_seqs=4) as llm:
        assert llm.renderer is not None and llm.renderer.eos_token_ids == [2]
        assert "evil" not in llm.renderer.chat_text([{"role": "user", "content": "hi"}])


@pytest.fixture
def linked(bundle: Path, tmp_path: Path) -> Path:
    """The real bundle, its files shared; a test replaces those that it changes."""
    return shutil.copytree(bundle, tmp_path / "linked.bundle", copy_function=os.link)


def test_a_flipped_bit_in_compiled_code_is_refused(linked: Path) -> None:
    """Acceptance 6: each package of compiled code and the native kernels, one bit in their middle."""
    code = [*linked.glob("pieces/*.pt2"), *linked.glob("native/*.so")]
    assert len(code) >= 5
    for file in code:
        good = file.read_bytes()
        file.unlink()
        middle = len(good) // 2
        file.write_bytes(good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :])
        with pytest.raises(BundleError, match=f"{file.parent.name}/{file.name} is damaged"):
            LLM(linked, num_blocks=16)
        file.write_bytes(good)


def test_foreign_bundles_are_refused_with_the_reason(copy: Path, right: list[int]) -> None:
    """Acceptance 6, TRAP-22: another torch, a processor with more features (re-sealed); fewer features load."""
    original = (copy / "manifest.json").read_bytes()
    edit(copy, lambda m: m["toolchain"].update(torch="2.1.0"))  # type: ignore[attr-defined]
    with pytest.raises(BundleError, match=r"compiled with torch 2\.1\.0 and .* is installed"):
        answer(copy)
    (copy / "manifest.json").write_bytes(original)
    edit(copy, lambda m: m["target"]["features"].append("avx1024f"))  # type: ignore[index]
    with pytest.raises(BundleError, match="lacks avx1024f"):
        answer(copy)
    shown = run_treadle("serve", str(copy), "--port", "0", expect=1)
    assert "lacks avx1024f" in shown and "Traceback" not in shown
    assert "avx1024f" in run_treadle("inspect", str(copy))
    (copy / "manifest.json").write_bytes(original)
    edit(copy, lambda m: m["target"].update(name="cpu:x86-64", features=[]))  # type: ignore[attr-defined]
    assert answer(copy) == right


def test_weights_outside_the_bundle(model: Path, store: Path, right: list[int], tmp_path: Path) -> None:
    """Acceptance 6: weights that stay in the checkpoint are found there, and missed by name when it moved or changed."""
    source = shutil.copytree(model, tmp_path / "source")
    made = treadle.compile(source, tmp_path / "b", store=store, store_weights=False, **COMPILE)
    assert answer(made) == right
    save_tiny(tmp_path / "other", bos_token_id=1, rms_norm_eps=1e-3)
    shutil.move(source, tmp_path / "moved")
    with pytest.raises((BundleError, ModelError), match="source"):
        answer(made)
    shutil.move(tmp_path / "other", source)
    with pytest.raises(BundleError, match="is not the model"):
        answer(made)


def run_treadle(*arguments: str, expect: int = 0) -> str:
    """Runs the command line and returns what it wrote on both streams."""
    command = [sys.executable, "-m", "treadle.server.cli", *arguments]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert shown.returncode == expect, shown.stderr
    return shown.stdout + shown.stderr


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    yield write_keys(tmp_path, "signer")


def test_signatures_from_compile_to_serve(
    model: Path, store: Path, keys: tuple[Path, Path], right: list[int], tmp_path: Path
) -> None:
    """Acceptance 6, C01-06: `compile --sign`, `serve --verify` with the right key, another key, a changed manifest."""
    secret, public = keys
    _, other = write_keys(tmp_path, "other")
    made = tmp_path / "signed.bundle"
    budget = ["--max-num-batched-tokens", "64"]
    run_treadle("compile", str(model), "-o", str(made), "-O", "0", *budget, "--store", str(store), "--sign", str(secret))
    with serving(made, verify=public, num_blocks=16) as server:
        assert server.post("/v1/completions", prompt="seven", max_tokens=2).status_code == 200
    assert answer(made, verify_key=str(public)) == right
    assert "not made with the key of other.pub.pem" in run_treadle("serve", str(made), "--verify", str(other), expect=1)
    edit(made, lambda m: m["options"].update(dtype="bfloat16"))  # type: ignore[attr-defined]
    assert "manifest was changed" in run_treadle("serve", str(made), "--verify", str(public), expect=1)
    assert "manifest was changed" in run_treadle("inspect", str(made), "--verify", str(public), expect=1)
    (made / "manifest.sig").unlink()
    with pytest.raises(BundleError, match="is not signed"):
        answer(made, verify_key=str(public))
