"""The pool of compile workers: clean environment, errors with names, nothing left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from treadle.codegen.compiler_shim import write_shim
from treadle.codegen.workers import WorkerPool
from treadle.ir.errors import ArtifactError


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[WorkerPool]:
    made = WorkerPool("tests.codegen.fake_worker", 2, tmp_path, {"CXX": "c++"})
    yield made
    made.close()


def test_a_worker_gets_no_secret_and_only_private_caches(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acceptance 8, C09-02 (R-9.3): nothing of the caller's environment but what a compiler needs."""
    monkeypatch.setenv("TREADLE_API_KEY", "secret")
    monkeypatch.setenv("HOME", "/nonexistent")
    environment = pool.call({"op": "environment"}, "x")["environment"]
    assert "secret" not in environment.values() and environment["CXX"] == "c++"
    for name in ("HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME"):
        assert environment[name].startswith(str(tmp_path)), name


def test_a_failure_names_the_piece_and_the_worker_lives_on(pool: WorkerPool) -> None:
    """C09-12, C09-05"""
    before = pool.call({"op": "environment"}, "x")["pid"]
    with pytest.raises(ArtifactError, match=r"piece layer for 1-64 tokens failed: CppCompileError: no such header"):
        pool.call({"op": "fail"}, "piece layer for 1-64 tokens")
    assert pool.call({"op": "environment"}, "x")["pid"] == before


def test_a_worker_that_dies_is_reported_with_its_last_words_and_replaced(pool: WorkerPool) -> None:
    with pytest.raises(ArtifactError, match=r"piece p failed: its worker ended unexpectedly with status 3\n  last words"):
        pool.call({"op": "die"}, "piece p")
    assert pool.call({"op": "environment"}, "x")["pid"]


def test_two_calls_run_side_by_side(pool: WorkerPool) -> None:
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(pool.call, {"op": "sleep", "seconds": 0.1}, "x") for _ in range(2)]
        assert len({future.result()["pid"] for future in futures}) == 2


def test_close_ends_workers_in_the_middle_of_work(pool: WorkerPool) -> None:
    pid = pool.call({"op": "environment"}, "x")["pid"]
    pool.start([{"op": "sleep", "seconds": 60}])
    time.sleep(0.1)
    pool.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_compiler_shim_drops_native_and_maps_folders(tmp_path: Path) -> None:
    """The target, not the build machine, says which instructions may be used; arguments survive quoting."""
    echo = tmp_path / "fake compiler"
    echo.write_text('#!/bin/sh\nfor a; do echo "<$a>"; done\n')
    echo.chmod(0o755)
    shim = write_shim(tmp_path / "bin", str(echo), tmp_path)
    lines = os.popen(f'"{shim}" -O1 "a b" -march=native "" -c').read().splitlines()
    assert lines[:4] == ["<-O1>", "<a b>", "<>", "<-c>"]
    assert f"<-ffile-prefix-map={tmp_path}=build>" in lines and "<-march=native>" not in lines
