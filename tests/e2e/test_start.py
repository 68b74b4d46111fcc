"""A start from a bundle in a new process: no compiler to be found, no code generator, no model code, another home."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import treadle
from tests.e2e.server_process import ROOT, serving
from tests.e2e.tiny_model import save_tiny
from treadle.codegen.bundle import open_bundle
from treadle.codegen.counters import COUNTERS

pytestmark = pytest.mark.slow

FORBIDDEN = ("torch._inductor", "torch._dynamo", "transformers", "triton")

HOOK = f"""
import os, sys

class Forbid:
    def find_spec(self, name, path=None, target=None):
        if any(name == bad or name.startswith(bad + ".") for bad in {FORBIDDEN!r}):
            raise ImportError(f"the start of an engine imported {{name}}")

def no_processes(event, args):
    if event in ("os.posix_spawn", "os.exec", "os.system") or event == "subprocess.Popen" and args[0] != sys.executable:
        raise RuntimeError(f"the start of an engine runs {{args}}")

sys.meta_path.insert(0, Forbid())
sys.addaudithook(no_processes)
open(os.path.join(os.path.dirname(__file__), f"hooked-{{os.getpid()}}"), "w").close()
"""
"""Runs first in each Python process whose PYTHONPATH leads to it, the engine core's too."""

GENERATE = """
import json, sys
from treadle import LLM, SamplingParams
llm = LLM(sys.argv[1], num_blocks=64, max_num_seqs=8)
output = llm.generate(["The capital of France is"], SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)[0]
print(json.dumps({"text": output.outputs[0].text, "compiled": llm.stats().compilations_after_ready}))
"""


@pytest.fixture(scope="module")
def moved(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real bundle copied to another folder, its files shared; none but the weights is large enough to skip a look
    for the place where it was compiled."""
    for path in bundle.rglob("*"):
        assert not path.is_file() or path.suffix == ".safetensors" or str(bundle.parent).encode() not in path.read_bytes()
    return shutil.copytree(bundle, tmp_path_factory.mktemp("elsewhere") / "moved.bundle", copy_function=os.link)


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """An environment with the hook, without any program to start, whose home can be neither read nor written."""
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    return {"PATH": "/nonexistent", "HOME": "/dev/null/nobody", "PYTHONPATH": f"{tmp_path}:{ROOT}"}


def hooked(bare: dict[str, str]) -> set[int]:
    """The processes that ran under the hook."""
    folder = Path(bare["PYTHONPATH"].partition(":")[0])
    return {int(path.name.removeprefix("hooked-")) for path in folder.glob("hooked-*")}


def test_the_hook_works(bare: dict[str, str]) -> None:
    """What the other tests lean on: the import and the process are refused."""
    for code in ("import torch._inductor", "import transformers", "import subprocess; subprocess.run(['/usr/bin/true'])"):
        done = subprocess.run([sys.executable, "-c", code], env=bare, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1 and "the start of an engine" in done.stderr
    assert len(hooked(bare)) == 3


def test_offline_start(moved: Path, bare: dict[str, str], tmp_path: Path) -> None:
    """Acceptance 5, C01-05: `LLM` generates from a moved bundle with no compiler, inductor, model code or home."""
    done = subprocess.run(
        [sys.executable, "-c", GENERATE, str(moved)], env=bare, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "Paris" in found["text"] and found["compiled"] == 0
    assert len(hooked(bare)) == 1


def test_serving_start(moved: Path, bare: dict[str, str]) -> None:
    """Acceptance 5, C01-05: the same for `treadle serve`, both of its processes under the hook."""
    with serving(moved, environment=bare, num_blocks=64, max_num_seqs=8) as server:
        answer = server.post("/v1/completions", prompt="The capital of France is", temperature=0, max_tokens=8)
        assert "Paris" in answer.json()["choices"][0]["text"]
        assert {server.process.pid, server.core().pid} == hooked(bare)
        assert server.metric("treadle_compilations_after_ready_total") == 0


def contents(roots: list[Path]) -> Iterator[tuple[str, bytes]]:
    """Every file below `roots`, and what is packed inside archives."""
    for path in (path for root in roots for path in root.rglob("*") if path.is_file()):
        yield str(path), path.read_bytes()
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                yield from ((f"{path}!{name}", archive.read(name)) for name in archive.namelist())


def test_no_secret_and_no_home_in_compiled_code(store: Path, tmp_path: Path) -> None:
    """Acceptance 8: an API key and HOME of the environment are in no compiled file, store object or output, and in no key."""
    save_tiny(tmp_path / "tiny", num_hidden_layers=1)
    environment = {**os.environ, "HOME": str(tmp_path / "s3cret-home"), "TREADLE_API_KEY": "s3cret-key", "HF_TOKEN": "s3cret-token"}
    command = [sys.executable, "-m", "treadle.server.cli", "compile", str(tmp_path / "tiny")]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "b"), "--store", str(store), "--max-num-batched-tokens", "64"],
        env=environment, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "s3cret" not in done.stdout + done.stderr
    names = [name for name, content in contents([tmp_path / "b", store]) if b"s3cret" in content]
    assert names == []
    assert any(name.endswith(".so") and "!" in name for name, _ in contents([tmp_path / "b"]))
    before = COUNTERS.compilations
    again = treadle.compile(tmp_path / "tiny", tmp_path / "again", store=store, max_num_batched_tokens=64)
    assert COUNTERS.compilations == before, "another HOME and no key in the environment should hit"
    assert open_bundle(again).manifest.pieces == open_bundle(tmp_path / "b").manifest.pieces
