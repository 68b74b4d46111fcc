"""Bundles: written whole or not at all, verified before use, signed, movable, never more than what is listed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.codegen.conftest import MakeBundle, make_manifest
from tests.codegen.test_store import DAMAGES
from treadle.codegen import files
from treadle.codegen.bundle import open_bundle
from treadle.codegen.loader import load_pieces
from treadle.codegen.manifest import Manifest, check_relative_path, encode_manifest
from treadle.codegen.program import Step
from treadle.codegen.write_bundle import writing_bundle
from treadle.ir.errors import ArtifactError, BundleError, ConfigError
from treadle.kernels.cpu_features import CpuFeatures


def use_everything(root: Path, verify_key: Path | None = None) -> None:
    """What a start does: open, verify each file, load the pieces."""
    bundle = open_bundle(root, verify_key=verify_key)
    bundle.verify()
    load_pieces(bundle)


def test_a_bundle_opens_and_every_file_verifies(make_bundle: MakeBundle) -> None:
    root = make_bundle()
    use_everything(root)
    assert sorted(path.name for path in root.iterdir()) == [
        "ir", "manifest.json", "native", "pieces", "reports", "tokenizer", "weights",
    ]  # fmt: skip


LISTED = [
    "ir/00-traced.ir",
    "ir/pieces/only.ir",
    "native/lib.so",
    "pieces/only-1-64.ir",
    "reports/passes.json",
    "tokenizer/tokenizer.json",
    "weights/weights-00000.safetensors",
]


@pytest.mark.parametrize("path", LISTED)
@pytest.mark.parametrize("damage", DAMAGES)
def test_each_file_damaged_in_each_way_is_refused_by_name(
    make_bundle: MakeBundle, path: str, damage: Callable[[Path], None]
) -> None:
    """Acceptance 6, TRAP-21: truncated, emptied, bit-flipped, removed, grown or replaced by a link."""
    root = make_bundle()
    assert [entry.path for entry in open_bundle(root).manifest.files] == LISTED
    damage(root / path)
    with pytest.raises(BundleError, match=path):
        use_everything(root)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_manifest_is_refused(make_bundle: MakeBundle, damage: Callable[[Path], None]) -> None:
    """Acceptance 6. A flipped bit that still reads as JSON changes a name or a hash, and something does not fit."""
    root = make_bundle()
    damage(root / "manifest.json")
    if damage.__name__ == "damage_append":
        (root / "manifest.json").write_bytes((root / "manifest.json").read_bytes() + b"{")
    with pytest.raises(BundleError):
        use_everything(root)


@pytest.mark.parametrize("old_new", [("128", "129"), ('"layer": 0', '"layer": 1'), ("float32", "float36")])
def test_a_manifest_damaged_into_another_valid_one_is_refused(make_bundle: MakeBundle, old_new: tuple[str, str]) -> None:
    """Acceptance 6: never a wrong answer, even where the damage still reads as a manifest."""
    root = make_bundle()
    text = (root / "manifest.json").read_text()
    assert old_new[0] in text
    (root / "manifest.json").write_text(text.replace(*old_new))
    with pytest.raises(BundleError, match="seal"):
        open_bundle(root)


def test_an_unlisted_file_is_never_handed_out(make_bundle: MakeBundle) -> None:
    root = make_bundle()
    (root / "native" / "extra.so").write_bytes(b"evil")
    bundle = open_bundle(root)
    bundle.verify()
    assert bundle.unlisted() == ["native/extra.so"]
    with pytest.raises(BundleError, match=r"extra.so is not listed"):
        bundle.file("native/extra.so")


@pytest.mark.parametrize("path", ["../outside", "/etc/passwd", "a/../../b", "./a", "a//b", "", "a\\b", "a\0b", "."])
def test_paths_that_leave_the_bundle_are_refused(make_bundle: MakeBundle, path: str) -> None:
    with pytest.raises(BundleError, match="plain path"):
        check_relative_path(path, "here")
    root = make_bundle()
    edit(root, lambda m: m["files"][0].update(path=path))  # type: ignore[index]
    with pytest.raises(BundleError, match="plain path"):
        open_bundle(root)


def test_a_linked_folder_inside_is_refused(make_bundle: MakeBundle, tmp_path: Path) -> None:
    root = make_bundle()
    (root / "pieces").rename(tmp_path / "elsewhere")
    (root / "pieces").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleError, match="pieces is a symbolic link"):
        open_bundle(root)


def edit(root: Path, change: Callable[[dict[str, object]], None]) -> None:
    """Changes the manifest and, if it still is one, seals it again: an attack or a foreign build, not damage."""
    fields = json.loads((root / "manifest.json").read_text())
    change(fields)
    data = json.dumps(fields).encode()
    with contextlib.suppress(msgspec.ValidationError):
        data = encode_manifest(msgspec.json.decode(data, type=Manifest))
    (root / "manifest.json").write_bytes(data)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update(schema=2), "schema version 2 is not 1"),
        (lambda m: m.update(surprise=1), "surprise"),
        (lambda m: m.pop("program"), "program"),
        (lambda m: m["files"].pop(), "not listed in files"),
        (lambda m: m["files"].append(m["files"][0]), "listed twice"),
        (lambda m: m["files"][0].update(sha256="zz"), "size and sha256"),
        (lambda m: m["toolchain"].update(torch="2.1.0"), r"compiled with torch 2.1.0"),
        (lambda m: m["target"]["features"].append("avx512f-of-the-future"), "lacks avx512f-of-the-future"),
        (lambda m: m["target"].update(name="cpu:pdp11"), "cpu:pdp11"),
    ],
)
def test_a_foreign_or_odd_manifest_is_refused_with_the_reason(
    make_bundle: MakeBundle, change: Callable[[dict[str, object]], None], words: str
) -> None:
    """Acceptance 6, TRAP-22: other schema, torch or target; unknown and missing fields."""
    root = make_bundle()
    edit(root, change)
    with pytest.raises(BundleError, match=words):
        open_bundle(root)


def test_a_raised_isa_is_refused_and_a_lower_one_loads(make_bundle: MakeBundle) -> None:
    """TRAP-22: re-sealed for AVX-512 on a processor without it, refused by feature name; the safe direction is silent."""
    avx2_host = CpuFeatures(arch="x86_64", flags=frozenset({"avx2", "fma", "f16c"}))
    root = make_bundle()
    edit(root, lambda m: m["target"].update(name="cpu:x86-64-avx512", features=[]))  # type: ignore[attr-defined]
    bundle = open_bundle(root, for_loading=False)
    with pytest.raises(BundleError, match="lacks avx512bw, avx512dq, avx512f, avx512vl"):
        bundle.check_host(avx2_host)
    edit(root, lambda m: m["target"].update(name="cpu:x86-64", features=[]))  # type: ignore[attr-defined]
    open_bundle(root, for_loading=False).check_host(avx2_host)
    with pytest.raises(BundleError, match="x86_64 processors and this one is aarch64"):
        bundle.check_host(CpuFeatures(arch="aarch64", flags=frozenset()))


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """A private and a public key file."""
    return write_keys(tmp_path, "signer")


def write_keys(folder: Path, name: str) -> tuple[Path, Path]:
    private = Ed25519PrivateKey.generate()
    secret = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    (folder / f"{name}.pem").write_bytes(secret)
    (folder / f"{name}.pub.pem").write_bytes(public)
    return folder / f"{name}.pem", folder / f"{name}.pub.pem"


def test_a_signed_bundle_verifies_with_its_key_only(
    make_bundle: MakeBundle, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    secret, public = keys
    root = make_bundle(sign=secret)
    use_everything(root, public)
    _, other = write_keys(tmp_path, "other")
    with pytest.raises(BundleError, match=r"not made with the key of other.pub.pem"):
        open_bundle(root, verify_key=other)
    with pytest.raises(BundleError, match="is not signed"):
        open_bundle(make_bundle("unsigned.bundle"), verify_key=public)


def test_a_change_after_signing_is_found(make_bundle: MakeBundle, keys: tuple[Path, Path]) -> None:
    root = make_bundle(sign=keys[0])
    edit(root, lambda m: m["options"].update(dtype="bfloat16"))  # type: ignore[attr-defined]
    with pytest.raises(BundleError, match="manifest was changed"):
        open_bundle(root, verify_key=keys[1])
    (root / "manifest.sig").write_bytes(b"!!!")
    with pytest.raises(BundleError, match="signature is damaged"):
        open_bundle(root, verify_key=keys[1])


def test_odd_keys_are_refused_in_words(make_bundle: MakeBundle, keys: tuple[Path, Path], tmp_path: Path) -> None:
    root = make_bundle(sign=keys[0])
    with pytest.raises(ConfigError, match="cannot read the public key"):
        open_bundle(root, verify_key=tmp_path / "none.pem")
    with pytest.raises(ConfigError, match="PEM"):
        open_bundle(root, verify_key=keys[0])
    elliptic = generate_private_key(SECP256R1()).public_key()
    (tmp_path / "ec.pem").write_bytes(
        elliptic.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    with pytest.raises(ConfigError, match="not an ed25519 public key"):
        open_bundle(root, verify_key=tmp_path / "ec.pem")


def test_a_copied_bundle_loads_under_another_home_without_a_compiler(make_bundle: MakeBundle, tmp_path: Path) -> None:
    """Acceptance 5: another folder, another HOME, no g++ on PATH; neither inductor nor transformers is imported."""
    copy = tmp_path / "elsewhere" / "copied"
    shutil.copytree(make_bundle(), copy)
    shutil.rmtree(tmp_path / "tiny.bundle")
    code = (
        "import sys; from treadle.codegen.bundle import open_bundle; from treadle.codegen.loader import load_pieces;"
        "bundle = open_bundle(sys.argv[1]); assert 'torch' not in sys.modules; bundle.verify();"
        "import torch; pieces = load_pieces(bundle);"
        "print(pieces['only']([torch.ones(3, 8), torch.ones(8, 8)])[0].sum().item());"
        "assert not {'torch._inductor', 'transformers'} & set(sys.modules)"
    )
    environment = {"HOME": str(tmp_path / "nobody"), "PATH": "/nonexistent", "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", code, str(copy)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "192.0", done.stderr


def test_nothing_is_replaced_without_force_and_only_bundles_with_it(make_bundle: MakeBundle, tmp_path: Path) -> None:
    root = make_bundle()
    with pytest.raises(BundleError, match="--force"):
        make_bundle()
    make_bundle(force=True, change=lambda m: setattr(m.model, "name", "second"))
    assert open_bundle(root).manifest.model.name == "second"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("dear")
    with pytest.raises(BundleError, match="not a bundle"):
        make_bundle("other", force=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(BundleError, match="not a folder"):
        make_bundle("file", force=True)
    (tmp_path / "link").symlink_to(root)
    with pytest.raises(BundleError, match="symbolic link"):
        make_bundle("link", force=True)
    with pytest.raises(BundleError, match=r"file is not a folder; choose another --output"):
        make_bundle("file/x.bundle")
    assert [path.name for path in tmp_path.iterdir() if "writing" in path.name] == []


def test_a_failure_while_writing_leaves_the_old_bundle(make_bundle: MakeBundle, tmp_path: Path) -> None:
    root = make_bundle()
    before = (root / "manifest.json").read_bytes()
    with pytest.raises(RuntimeError), writing_bundle(root, force=True) as writer:
        make_manifest(writer)
        raise RuntimeError("power cut")
    assert (root / "manifest.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.bundle"]


def test_a_full_disk_leaves_no_bundle(
    make_bundle: MakeBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acceptance 6"""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(ArtifactError, match="disk is full"):
        make_bundle()
    assert list(tmp_path.iterdir()) == []


WRITER = """
import sys, time
from pathlib import Path
from tests.codegen.conftest import make_manifest
from treadle.codegen.write_bundle import writing_bundle

print("ready", flush=True)
while True:
    with writing_bundle(Path(sys.argv[1]), force=True) as writer:
        writer.finish(make_manifest(writer))
"""


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.05, 0.1, 0.2])
def test_a_killed_writer_leaves_a_whole_bundle_or_none(tmp_path: Path, make_bundle: MakeBundle, delay: float) -> None:
    """Acceptance 6: kill -9 at random moments of writing and replacing; the next write sweeps what is left."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "b")], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.wait()
    if (tmp_path / "b").exists():
        use_everything(tmp_path / "b")
    use_everything(make_bundle("b", force=True))
    left = [path for path in tmp_path.iterdir() if path.name != "b"]
    assert all(not any(path.iterdir()) for path in left), left


def test_the_manifest_is_deterministic(make_bundle: MakeBundle) -> None:
    first = open_bundle(make_bundle("a")).manifest
    assert encode_manifest(first) == encode_manifest(open_bundle(make_bundle("b")).manifest)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.program.steps.append(Step(kind="op", op="x", inputs=["nowhere"], outputs=["z"])), "reads 'nowhere'"),
        (lambda m: m.program.steps.append(Step(kind="op", op="x", inputs=[], outputs=["y"])), "second time"),
        (lambda m: m.program.steps.append(Step(kind="op", piece="only", inputs=[], outputs=["z"])), "exactly one"),
        (lambda m: m.program.outputs.append("z"), "never defined"),
        (lambda m: m.program.kv_layers.clear(), "kv_layers"),
    ],
)
def test_a_program_that_cannot_run_is_not_written(
    make_bundle: MakeBundle, tmp_path: Path, change: Callable[[Manifest], None], words: str
) -> None:
    with pytest.raises(BundleError, match=words):
        make_bundle(change=change)
    assert not (tmp_path / "tiny.bundle").exists()


def test_background_verification_reports_damage(make_bundle: MakeBundle) -> None:
    root = make_bundle()
    weights = "weights/weights-00000.safetensors"
    assert open_bundle(root).verify_in_background([weights]).result() is None
    data = bytearray((root / weights).read_bytes())
    data[0] ^= 1
    (root / weights).write_bytes(data)
    with pytest.raises(BundleError, match="SHA-256"):
        open_bundle(root).verify_in_background([weights]).result()



