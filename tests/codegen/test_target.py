"""Targets and whether a processor can run them (trap 22), versions, and where the store is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from treadle.codegen.store_location import default_store_root
from treadle.codegen.target import TARGETS, can_run, resolve_target
from treadle.codegen.toolchain import check_loadable, toolchain
from treadle.ir.errors import ArtifactError, BundleError, ConfigError
from treadle.kernels.cpu_features import ISA_REQUIREMENTS, CpuFeatures

HOSTS = {isa: CpuFeatures(arch="x86_64", flags=frozenset(needed)) for isa, needed in ISA_REQUIREMENTS.items()}


def test_cpu_means_the_best_this_machine_can_run() -> None:
    assert resolve_target("cpu", HOSTS["avx2"]).name == "cpu:x86-64-avx2"
    assert resolve_target("cpu", HOSTS["portable"]).name == "cpu:x86-64"
    assert resolve_target("cpu", CpuFeatures(arch="aarch64", flags=frozenset())).name == "cpu:aarch64"


def test_unknown_targets_are_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="cpu:x86-64-avx512"):
        resolve_target("gpu")
    with pytest.raises(ConfigError, match="pdp11"):
        resolve_target("cpu", CpuFeatures(arch="pdp11", flags=frozenset()))


@pytest.mark.parametrize("made_for", ["portable", "avx2", "avx512"])
@pytest.mark.parametrize("runs_on", ["portable", "avx2", "avx512"])
def test_the_safe_direction_is_silent_and_the_unsafe_one_names_features(made_for: str, runs_on: str) -> None:
    """TRAP-22"""
    target = resolve_target("cpu", HOSTS[made_for])
    reason = can_run(target.name, target.features, HOSTS[runs_on])
    missing = sorted(ISA_REQUIREMENTS[made_for] - ISA_REQUIREMENTS[runs_on])
    assert reason is None if not missing else reason is not None and ", ".join(missing) in reason


def test_every_target_runs_on_a_host_with_exactly_its_features() -> None:
    for target in TARGETS.values():
        host = CpuFeatures(arch=target.arch, flags=frozenset(target.features))
        assert can_run(target.name, target.features, host) is None


def test_another_torch_is_refused_with_both_versions() -> None:
    """Acceptance 6"""
    check_loadable(toolchain(with_compiler=False), "b")
    with pytest.raises(BundleError, match=r"compiled with torch 2\.0\.0 and .* is installed"):
        check_loadable({"torch": "2.0.0"}, "b")


def test_a_missing_compiler_is_named() -> None:
    with pytest.raises(ArtifactError, match="no-such-compiler"):
        toolchain("no-such-compiler")


def test_where_the_store_is(tmp_path: Path) -> None:
    """Works with HOME unset or not writable; the explicit place wins."""
    home = {"HOME": str(tmp_path)}
    assert default_store_root({"TREADLE_STORE": "/s", "XDG_CACHE_HOME": "/x", **home}) == Path("/s")
    assert default_store_root({"XDG_CACHE_HOME": "/x", **home}) == Path("/x/treadle/store")
    assert default_store_root(home) == tmp_path / ".cache/treadle/store"
    for odd in ({}, {"HOME": "/dev/null/nobody"}):
        assert "treadle-" in str(default_store_root(odd)) and not str(default_store_root(odd)).startswith("/dev")


def test_what_serves_imports_no_torch() -> None:
    """The front end reads bundles, keys and stores without torch."""
    modules = "bundle write_bundle manifest program store key target toolchain ranges config progress backends"
    code = f"import sys\nfor name in '{modules}'.split(): __import__('treadle.codegen.' + name)\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
