"""Adding a report to a finished bundle: whole before and after, sealed again, never under a signature that lapses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.codegen.conftest import MakeBundle
from treadle.codegen import write_bundle
from treadle.codegen.amend_bundle import add_report
from treadle.codegen.bundle import open_bundle
from treadle.ir.errors import BundleError

REPORT = "reports/verify.json"


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private, public = tmp_path / "key.pem", tmp_path / "pub.pem"
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return private, public


def test_a_report_is_added_listed_and_replaced(make_bundle: MakeBundle) -> None:
    """C09-04: everything else stays byte for byte, and the manifest's seal holds."""
    path = make_bundle()
    before = {entry.path: entry.sha256 for entry in open_bundle(path).manifest.files}
    for data in (b'{"ok": true}', b'{"ok": false}'):
        add_report(path, REPORT, data)
        bundle = open_bundle(path)
        bundle.verify()
        assert bundle.file(REPORT).read_bytes() == data
        assert bundle.manifest.reports == ["reports/passes.json", REPORT]
        assert before.items() <= {entry.path: entry.sha256 for entry in bundle.manifest.files}.items()
    assert list(path.parent.iterdir()) == [path]


def test_an_interrupted_amendment_leaves_the_bundle(make_bundle: MakeBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_bundle()
    manifest = (path / "manifest.json").read_bytes()

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(write_bundle, "encode_manifest", fail)
    with pytest.raises(KeyboardInterrupt):
        add_report(path, REPORT, b"{}")
    monkeypatch.undo()
    assert (path / "manifest.json").read_bytes() == manifest
    open_bundle(path).verify()
    assert list(path.parent.iterdir()) == [path]


def test_a_signed_bundle_needs_the_key(make_bundle: MakeBundle, keys: tuple[Path, Path]) -> None:
    private, public = keys
    path = make_bundle(sign=private)
    with pytest.raises(BundleError, match="--sign"):
        add_report(path, REPORT, b"{}")
    open_bundle(path, verify_key=public)
    add_report(path, REPORT, b"{}", private)
    assert open_bundle(path, verify_key=public).manifest.reports[-1] == REPORT
