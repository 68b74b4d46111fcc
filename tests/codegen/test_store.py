"""The artifact store: whole objects or none, verified on every read, safe under many processes (spec 09)."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.codegen.conftest import make_key
from treadle.codegen import files
from treadle.codegen.key import ArtifactKey
from treadle.codegen.store import Problem, Store, StoredObject
from treadle.ir.errors import ArtifactError

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def put(store: Store, key: ArtifactKey, content: bytes = CONTENT) -> StoredObject:
    found, built = store.find_or_build(key, lambda out: out.write_bytes(content), "piece test")
    assert built
    return found


def test_what_was_built_once_is_found_again(store: Store) -> None:
    """C09-03, C09-01: the second look-up builds nothing and reads the same bytes."""
    put(store, make_key())

    def build(out: Path) -> None:
        raise AssertionError("a hit must not build")

    found, built = Store(store.root).find_or_build(make_key(), build, "piece test")
    assert not built and found.path.read_bytes() == CONTENT and found.label == "piece test"


def test_an_unknown_key_is_a_miss(store: Store) -> None:
    put(store, make_key())
    assert store.lookup(make_key(end=65)) is None


def damage_truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def damage_empty(file: Path) -> None:
    file.write_bytes(b"")


def damage_flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x40
    file.write_bytes(data)


def damage_remove(file: Path) -> None:
    file.unlink()


def damage_append(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x")


def damage_link(file: Path) -> None:
    copy = file.with_name("elsewhere")
    file.rename(copy)
    file.symlink_to(copy)


DAMAGES = [damage_truncate, damage_empty, damage_flip, damage_remove, damage_append, damage_link]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_data_is_refused_with_a_reason_and_built_again(store: Store, damage) -> None:  # type: ignore[no-untyped-def]
    """TRAP-21, C09-04: damage is found by hash, never used, and the next compile repairs it and says so."""
    damage(put(store, make_key()).path)
    with pytest.raises(ArtifactError, match="damaged"):
        store.lookup(make_key())
    assert [problem.digest for problem in store.verify()] == [make_key().digest]
    reasons: list[str] = []
    found, built = store.find_or_build(
        make_key(), lambda out: out.write_bytes(CONTENT), "piece test", reasons.append
    )
    assert built and found.path.read_bytes() == CONTENT and "damaged" in reasons[0]
    assert store.verify() == []


@pytest.mark.parametrize("damage", [damage_truncate, damage_empty, damage_remove])
def test_a_damaged_header_is_refused_and_built_again(store: Store, damage) -> None:  # type: ignore[no-untyped-def]
    """TRAP-21"""
    damage(put(store, make_key()).path.with_name("meta.json"))
    with pytest.raises(ArtifactError, match="damaged"):
        store.lookup(make_key())
    put(store, make_key())
    assert store.verify() == []


def test_a_foreign_object_is_refused(store: Store) -> None:
    """C09-04: an object moved under another key, or of another schema, is not used."""
    stored = put(store, make_key())
    other = make_key(end=128)
    folder = store.root / "objects" / other.digest[:2] / other.digest
    folder.parent.mkdir(parents=True, exist_ok=True)
    stored.path.parent.rename(folder)
    with pytest.raises(ArtifactError, match="foreign"):
        store.lookup(other)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, "key": other.fields(), "schema": 99}))
    with pytest.raises(ArtifactError, match="schema 99"):
        store.lookup(other)


def test_a_moved_store_still_serves(store: Store, tmp_path: Path) -> None:
    """C09-04, C09-02: everything is under one folder, which can be moved as a unit."""
    put(store, make_key())
    store.root.rename(tmp_path / "moved")
    moved = Store(tmp_path / "moved")
    assert moved.lookup(make_key()) is not None and moved.verify() == []


def test_disk_full_publishes_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Acceptance 6: the disk full ends in a clear error and no half object."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        with pytest.raises(ArtifactError, match="disk is full"):
            store.find_or_build(make_key(), lambda out: out.write_bytes(CONTENT), "piece test")
    assert store.digests() == [] and list((store.root / "scratch").iterdir()) == []
    put(store, make_key())


def test_a_file_size_limit_publishes_nothing(tmp_path: Path) -> None:
    """Acceptance 6: a real write that fails half-way (RLIMIT_FSIZE) leaves nothing."""
    code = (
        "import resource, signal, sys; from pathlib import Path; from treadle.codegen.store import Store;"
        "from tests.codegen.conftest import make_key; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "source = Path(sys.argv[1]) / 'big'; source.write_bytes(bytes(1 << 20));"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16));"
        "Store(Path(sys.argv[1]) / 'store').put(make_key(), source, 'big')"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "ArtifactError" in done.stderr and "size limit" in done.stderr
    assert Store(tmp_path / "store").digests() == []


def test_a_failed_build_publishes_nothing(store: Store) -> None:
    def fail(out: Path) -> None:
        out.write_bytes(CONTENT)
        raise ArtifactError("the compiler said no")

    with pytest.raises(ArtifactError, match="said no"):
        store.find_or_build(make_key(), fail, "piece test")
    assert store.digests() == [] and store.lookup(make_key()) is None


BUILDER = """
import sys, time
from pathlib import Path
from treadle.codegen.store import Store
from tests.codegen.conftest import make_key

def build(out):
    with open(sys.argv[2], "a") as log:
        log.write("built\\n")
    with open(out, "wb") as file:
        for _ in range(20):
            file.write(bytes(range(256)) * 2)
            file.flush()
            time.sleep(float(sys.argv[3]))

print("ready", flush=True)
Store(Path(sys.argv[1])).find_or_build(make_key(), build, "piece test")
"""


def builder(store: Store, log: Path, pause: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(store.root), str(log), str(pause)],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def test_two_processes_that_want_one_key_build_it_once(store: Store, tmp_path: Path) -> None:
    """C09-04, TRAP-21: both succeed, one builds, the other waits."""
    processes = [builder(store, tmp_path / "log", 0.02) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "built\n"
    found = store.lookup(make_key())
    assert found is not None and found.path.read_bytes() == bytes(range(256)) * 40


@pytest.mark.parametrize("delay", [0.0, 0.05, 0.15, 0.3, 0.5])
def test_a_killed_build_leaves_a_usable_store(store: Store, tmp_path: Path, delay: float) -> None:
    """TRAP-21, acceptance 6: kill -9 at five moments; no half object, and gc sweeps what is left."""
    process = builder(store, tmp_path / "log", 0.02)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    found, _ = store.find_or_build(make_key(), lambda out: out.write_bytes(CONTENT), "piece test")
    assert found.path.read_bytes() == CONTENT and store.verify() == []
    store.gc()
    left = [folder for folder in (store.root / "scratch").iterdir() if any(folder.iterdir())]
    assert left == []


def test_gc_leaves_the_scratch_of_a_living_process(store: Store, tmp_path: Path) -> None:
    process = builder(store, tmp_path / "log", 0.05)
    while not (tmp_path / "log").exists():
        time.sleep(0.01)
    assert store.gc().scratch == 0
    assert process.wait(60) == 0 and store.lookup(make_key()) is not None


def test_gc_removes_damaged_then_old_then_least_recently_used(store: Store) -> None:
    keys = [make_key(end=size) for size in (64, 128, 256, 512)]
    stored = [put(store, key) for key in keys]
    damage_flip(stored[0].path)
    for age, item in zip((0, 30, 20, 10), stored, strict=True):
        os.utime(item.path.parent, (time.time() - age, time.time() - age))
    size = sum(path.stat().st_size for path in stored[3].path.parent.iterdir())
    removed = store.gc(max_bytes=2 * size + 10, max_age=3600)
    assert removed.objects == [keys[0].digest, keys[1].digest]
    assert set(store.digests()) == {keys[2].digest, keys[3].digest}
    assert store.gc(max_age=15).objects == [keys[2].digest]


def test_explain_names_the_nearest_object_and_what_differs(store: Store) -> None:
    """Acceptance 8, promise 7."""
    put(store, make_key())
    hit, differences = store.explain(make_key())
    assert hit is not None and differences == []
    nearest, differences = store.explain(make_key(end=128))
    assert nearest is not None and [str(item) for item in differences] == ["end: 64 -> 128"]
    digest = put(store, make_key(target="cpu:x86-64")).digest
    assert [item.field for item in store.diff(make_key().digest[:16], digest[:16])] == ["target"]
    with pytest.raises(ArtifactError, match="no object"):
        store.get("zz")


def test_ls_shows_damage_beside_sound_objects(store: Store) -> None:
    sound, broken = put(store, make_key()), put(store, make_key(end=128))
    damage_truncate(broken.path)
    kinds = {item.digest: type(item) for item in store.ls()}
    assert kinds == {sound.digest: StoredObject, broken.digest: Problem}


def test_the_store_is_private(store: Store) -> None:
    put(store, make_key())
    assert store.root.stat().st_mode & 0o077 == 0
