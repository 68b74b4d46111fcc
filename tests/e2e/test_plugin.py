"""The example package, built as a wheel and installed into an environment of its own (acceptance 7)."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fresh_environment import ROOT, FreshEnvironment
from tests.models import save_model
from treadle.codegen.bundle import open_bundle
from treadle.codegen.manifest import Manifest
from treadle.ir.errors import BundleError

pytestmark = pytest.mark.slow

EXAMPLE = ROOT / "examples" / "treadle-example-pass"
NAME = "treadle-example-pass"
SCRIPT = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from typer.testing import CliRunner
import treadle
from treadle.server.commands_passes import app as passes
from treadle.server.commands_ops import app as ops

folder = Path(sys.argv[1])
settings = dict(store=folder / "store", backend="eager", dtype="float32", max_num_batched_tokens=64)
treadle.compile(folder / "model", folder / "plain.bundle", **settings)
treadle.compile(folder / "model", folder / "fused.bundle", passes="fuse_swiglu_mlp{slices=4}", **settings)

def answers(bundle):
    # greedy tokens of two prompts, and how likely the first was
    with treadle.LLM(folder / bundle, num_blocks=16) as llm:
        asked = treadle.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
        found = [output.outputs[0] for output in llm.generate([[5, 6, 7], [300, 2]], asked, use_tqdm=False)]
    return [[list(o.token_ids), o.logprobs[0][o.token_ids[0]].logprob] for o in found]

print(json.dumps({
    "passes": json.loads(CliRunner().invoke(passes, ["--json"]).stdout),
    "explained": CliRunner().invoke(passes, ["fuse_swiglu_mlp"]).stdout,
    "op": CliRunner().invoke(ops, ["swiglu_mlp"]).stdout,
    "plain": answers("plain.bundle"),
    "fused": answers("fused.bundle"),
}))
"""


@dataclass
class Installed:
    """An environment that holds the package, and what a session in it made in its folder."""

    environment: FreshEnvironment
    said: dict[str, Any]

    @property
    def folder(self) -> Path:
        return self.environment.folder

    def python(self, *arguments: str) -> tuple[int, str]:
        """Exit code and everything that Python said."""
        done = self.environment.run([str(self.environment.python), *arguments], check=False)
        return done.returncode, done.stdout + done.stderr

    def manifest(self, bundle: str) -> Manifest:
        return open_bundle(self.folder / bundle, for_loading=False).manifest


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("plugin")
    environment = FreshEnvironment.make(folder)
    shutil.copytree(EXAMPLE, folder / "source", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    environment.run(environment.pip("wheel", "-w", "wheels", "./source"))
    (built,) = (folder / "wheels").glob("*.whl")
    environment.run(environment.pip("install", str(built)))
    save_model("llama", folder / "model")
    (folder / "session.py").write_text(SCRIPT)
    done = environment.run([str(environment.python), "session.py", str(folder)])
    return Installed(environment, json.loads(done.stdout.splitlines()[-1]))


def test_it_is_listed_with_where_it_comes_from(installed: Installed) -> None:
    """`treadle passes` and `treadle ops` show what its source says, and that it is not treadle's own."""
    rows = {row["name"]: row for row in installed.said["passes"]}
    assert rows["fuse_swiglu_mlp"]["from"] == f"{NAME} 0.1.0" and rows["fuse_qkv"]["from"] == "tree"
    assert "slices: int = 2" in installed.said["explained"] and "swiglu_mlp(%x, %gate_up, %down" in installed.said["explained"]
    assert f"swiglu_mlp  ({NAME} 0.1.0)" in installed.said["op"] and "int slices=1" in installed.said["op"]


def test_it_changes_the_compiled_result_and_not_the_answers(installed: Installed) -> None:
    """The feed-forward blocks are one op in the artifacts; greedy tokens stay."""
    fused, plain = installed.manifest("fused.bundle"), installed.manifest("plain.bundle")
    texts = [(installed.folder / "fused.bundle" / r.file).read_text() for piece in fused.pieces for r in piece.ranges]
    assert sum(text.count("swiglu_mlp(") for text in texts) == 2 and not any("gated_act" in text for text in texts)
    assert {piece.key for piece in fused.pieces} != {piece.key for piece in plain.pieces}
    for (given, chance), (wanted, likely) in zip(installed.said["fused"], installed.said["plain"], strict=True):
        assert given == wanted and chance == pytest.approx(likely, abs=1e-4)


def test_it_is_in_the_keys_the_manifest_and_the_report(installed: Installed) -> None:
    """C09-02: name, version, source hash and options; every artifact's key has them."""
    fused, plain = installed.manifest("fused.bundle"), installed.manifest("plain.bundle")
    (entry,) = fused.plugins
    assert (entry.name, entry.version, entry.packages) == (NAME, "0.1.0", ["treadle_example_pass"])
    assert entry.uses == ["pass fuse_swiglu_mlp", "op swiglu_mlp"] and entry.run_time == ["op swiglu_mlp"]
    assert re.fullmatch("[0-9a-f]{64}", entry.source) and plain.plugins == []
    assert "fuse_swiglu_mlp{slices=4}" in fused.pipeline
    for key in (item.key for piece in fused.pieces for item in piece.ranges):
        stored = json.loads((installed.folder / "store" / "objects" / key[:2] / key / "meta.json").read_text())
        assert stored["key"]["plugins"] == [[NAME, ["0.1.0", entry.source]]]
    reports = json.loads((installed.folder / "fused.bundle" / "reports" / "passes.json").read_text())
    (report,) = [report for report in reports if report["name"] == "fuse_swiglu_mlp"]
    assert report["counts"] == {"swiglu_mlp": 3} and report["options"] == {"slices": 4} and not report["warning"]


def test_without_the_package_the_bundle_is_refused_with_the_reason(installed: Installed) -> None:
    """Its op runs when the bundle runs, because the eager backend calls references. The plain bundle needs nothing."""
    open_bundle(installed.folder / "plain.bundle")
    with pytest.raises(BundleError, match=f"runs op swiglu_mlp of {NAME} 0.1.0, which is not installed here"):
        open_bundle(installed.folder / "fused.bundle")


def test_other_source_is_refused_and_explained(installed: Installed) -> None:
    """Last, as it changes what is installed: the bundle is refused, and `cache explain` names the plugin."""
    (module,) = (installed.folder / "env").glob("lib/python*/site-packages/treadle_example_pass/ops.py")
    module.write_text(module.read_text() + "\n# a change\n")
    program = "from treadle.codegen.bundle import open_bundle; open_bundle('fused.bundle')"
    code, said = installed.python("-c", program)
    assert code != 0 and "with other source" in said
    _, said = installed.python("-m", "treadle.server.cli", "cache", "explain", "fused.bundle")
    assert "miss" in said and f"plugins.{NAME}: ('0.1.0'," in said and "hit " not in said


def test_its_own_tests_pass(installed: Installed) -> None:
    """The package's tests run against the installed package."""
    code, said = installed.python("-m", "pytest", "-q", "-p", "no:cacheprovider", "source/tests")
    assert code == 0, said
