"""Adds a report to a finished bundle: a new folder beside it, files linked, then swapped for the old one in one step."""

from __future__ import annotations

from pathlib import Path

import msgspec

from treadle.codegen.bundle import SIGNATURE, open_bundle
from treadle.codegen.write_bundle import writing_bundle
from treadle.ir.errors import BundleError


def check_amendable(bundle: Path, sign_with: Path | None) -> None:
    """Raises BundleError for a signed bundle without a key: its signature would no longer hold."""
    if (bundle / SIGNATURE).exists() and sign_with is None:
        raise BundleError(
            f"{bundle.name} is signed, and a new report changes what was signed; give the private key with --sign "
            "KEY.pem, or keep the bundle as it is with --no-store"
        )


def add_report(bundle: Path, path: str, data: bytes, sign_with: Path | None = None) -> None:
    """Writes or replaces the report `path` (such as reports/verify.json), lists it, and seals the manifest again.

    Whoever opens the bundle sees it whole, before or after. Raises BundleError as `check_amendable`, or if a file of the
    bundle is missing.
    """
    check_amendable(bundle, sign_with)
    opened = open_bundle(bundle, for_loading=False)
    with writing_bundle(bundle, force=True) as writer:
        for entry in opened.manifest.files:
            if entry.path != path:
                writer.adopt(entry, opened.root / entry.path)
        writer.add_bytes(path, data)
        reports = list(dict.fromkeys([*opened.manifest.reports, path]))
        writer.finish(msgspec.structs.replace(opened.manifest, reports=reports), sign_with)
