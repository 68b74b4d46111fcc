"""The pool of compile workers: clean environment, errors with names, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
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
    made = WorkerPool("tests.codegen.fake_worker", 2, tmp_path, {"CXX": "c++"}, first=[{"op": "warm"}])
    yield made
    made.close()


def gone(group: int) -> bool:
    """Whether no process of the group is alive any more, after at most 10 s; dead ones may wait for init."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        stats = [path.read_text().rpartition(")")[2].split() for path in Path("/proc").glob("[0-9]*/stat") if path.exists()]
        if not [fields for fields in stats if fields[2] == str(group) and fields[0] not in "ZX"]:
            return True
        time.sleep(0.05)
    return False


PRIVATE = ("HOME", "TMPDIR", "XDG_CACHE_HOME")


def test_a_worker_gets_no_secret_and_only_private_caches(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acceptance 8, C09-02 (R-9.3): nothing of the caller's environment but what a compiler needs."""
    monkeypatch.setenv("TREADLE_API_KEY", "secret")
    monkeypatch.setenv("HOME", "/nonexistent")
    answer = pool.call({"op": "names", "ask": ["CXX", *PRIVATE]}, "x")
    assert not answer["secret"] and answer["names"][0] == "c++"
    assert all(value.startswith(str(tmp_path)) for value in answer["names"][1:])


def test_a_failure_names_the_piece_and_the_worker_lives_on(pool: WorkerPool) -> None:
    """C09-12, C09-05. Endless error texts are cut."""
    before = pool.call({"op": "warmth"}, "x")["pid"]
    with pytest.raises(ArtifactError, match=r"piece layer for 1-64 tokens failed: ValueError: no such header") as caught:
        pool.call({"op": "fail"}, "piece layer for 1-64 tokens")
    assert len(str(caught.value)) < 4000
    assert pool.call({"op": "warmth"}, "x")["pid"] == before


def test_a_fork_that_dies_is_answered_for(pool: WorkerPool) -> None:
    before = pool.call({"op": "warmth"}, "x")["pid"]
    with pytest.raises(ArtifactError, match=r"piece p failed: its process ended unexpectedly with status 3"):
        pool.call({"op": "die"}, "piece p")
    assert pool.call({"op": "warmth"}, "x")["pid"] == before


def test_a_worker_that_dies_is_reported_with_its_last_words_and_replaced(pool: WorkerPool) -> None:
    with pytest.raises(ArtifactError, match=r"piece p failed: its worker ended unexpectedly with status 4\n  last words"):
        pool.call({"op": "end_all"}, "piece p")
    assert pool.call({"op": "warmth"}, "x")["warm"] == ["yes"]


def test_forks_inherit_the_warm_up_and_run_side_by_side(pool: WorkerPool) -> None:
    assert pool.call({"op": "warmth"}, "x")["warm"] == ["yes"]
    start = time.perf_counter()
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(pool.call, {"op": "sleep", "seconds": 1.0}, "x") for _ in range(2)]
        assert len({future.result()["pid"] for future in futures}) == 2
    assert time.perf_counter() - start < 1.9


def test_close_ends_the_family_in_the_middle_of_work(pool: WorkerPool) -> None:
    pid = pool.call({"op": "warmth"}, "x")["pid"]
    pool.start([{"op": "sleep", "seconds": 60}])
    time.sleep(0.3)
    pool.close()
    assert gone(pid)


def test_the_family_ends_when_the_parent_is_killed(tmp_path: Path) -> None:
    """Acceptance 6: a compile that is killed leaves no compiler running."""
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[2]); from pathlib import Path; from treadle.codegen.workers import WorkerPool;"
        "pool = WorkerPool('tests.codegen.fake_worker', 1, Path(sys.argv[1]), {});"
        "print(pool.call({'op': 'warmth'}, 'x')['pid'], flush=True);"
        "pool.call({'op': 'sleep', 'seconds': 60}, 'x')"
    )
    root = Path(__file__).parents[2]
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(root)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(0.3)
    parent.kill()
    parent.wait()
    assert gone(pid)


def test_the_compiler_shim_drops_native_and_maps_folders(tmp_path: Path) -> None:
    """The target, not the build machine, says which instructions may be used; arguments survive quoting."""
    echo = tmp_path / "fake compiler"
    echo.write_text('#!/bin/sh\nfor a; do echo "<$a>"; done\n')
    echo.chmod(0o755)
    shim = write_shim(tmp_path / "bin", str(echo), tmp_path)
    lines = os.popen(f'"{shim}" -O1 "a b" -march=native "" -c').read().splitlines()
    assert lines[:4] == ["<-O1>", "<a b>", "<>", "<-c>"]
    assert f"<-ffile-prefix-map={tmp_path}=build>" in lines and "<-march=native>" not in lines
