"""Writes a bundle: into a scratch folder beside the destination, then renamed over it in one step. Imports no torch."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from treadle.codegen.bundle import MANIFEST, SIGNATURE, is_bundle
from treadle.codegen.files import clear_disk_errors, copy_durably, sha256_file, sync_path, write_durably
from treadle.codegen.locks import owned_scratch, sweep_scratch
from treadle.codegen.manifest import (
    FileEntry,
    Manifest,
    check_relative_path,
    decode_manifest,
    encode_manifest,
)
from treadle.codegen.program import check_program
from treadle.codegen.signing import sign
from treadle.ir.errors import ArtifactError, BundleError

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class BundleWriter:
    """Collects the files of a bundle. Made by `writing_bundle`; nothing is visible at the destination until `finish`."""

    def __init__(self, folder: Path, destination: Path, force: bool):
        self._folder = folder
        self.destination = destination
        self._force = force
        self._files: dict[str, FileEntry] = {}

    def place(self, path: str) -> Path:
        """Where to write the file `path` of the bundle yourself (its folder exists); call `seal` afterwards."""
        check_relative_path(path, "bundle")
        full = self._folder / path
        full.parent.mkdir(parents=True, exist_ok=True)
        return full

    def seal(self, path: str) -> None:
        """Hashes a file written at `place(path)`, flushes it to disk and lists it."""
        full = self._folder / path
        sync_path(full)
        self._files[path] = FileEntry(path=path, size=full.stat().st_size, sha256=sha256_file(full))

    def add_bytes(self, path: str, data: bytes) -> str:
        """Writes a file; returns `path`."""
        write_durably(self.place(path), data)
        self.seal(path)
        return path

    def add_file(self, path: str, source: Path, sha256: str | None = None) -> str:
        """Copies a file; returns `path`. Raises ArtifactError if `sha256` is given and the copy has another one."""
        copy_durably(source, self.place(path))
        self.seal(path)
        if sha256 is not None and self._files[path].sha256 != sha256:
            raise ArtifactError(f"{source.name} changed while it was copied into the bundle; run it again")
        return path

    def adopt(self, entry: FileEntry, source: Path) -> None:
        """Takes over a listed file of another bundle as it is: linked where the file system can, else copied."""
        try:
            os.link(source, self.place(entry.path), follow_symlinks=False)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
                raise
            copy_durably(source, self.place(entry.path))
        self._files[entry.path] = entry

    def finish(self, manifest: Manifest, sign_with: Path | None = None) -> Path:
        """Completes `manifest` with the list of files, signs it, and puts the bundle in its place. Returns that."""
        check_program(manifest.program)
        listed = msgspec.structs.replace(manifest, files=[self._files[path] for path in sorted(self._files)])
        data = encode_manifest(listed)
        decode_manifest(data, MANIFEST)
        write_durably(self._folder / MANIFEST, data)
        if sign_with is not None:
            write_durably(self._folder / SIGNATURE, sign(data, sign_with))
        for folder in sorted({path.parent for path in self._folder.rglob("*")}):
            sync_path(folder)
        _put_in_place(self._folder, self.destination, self._force)
        return self.destination


@contextmanager
def writing_bundle(destination: Path, *, force: bool = False) -> Iterator[BundleWriter]:
    """A writer for a bundle at `destination`. If the block raises, or the process dies, the destination is untouched.

    Raises BundleError at once if something is there: a bundle needs `force`, anything else is never replaced. A
    full disk becomes an ArtifactError. What earlier killed runs left beside the destination is swept.
    """
    destination = Path(os.path.abspath(destination))
    check_destination(destination, force=force)
    prefix = f".{destination.name}.writing-"
    with clear_disk_errors(f"writing the bundle {destination.name}"):
        if destination.parent.is_dir():
            sweep_scratch(destination.parent, prefix)
        with owned_scratch(destination.parent, prefix) as scratch:
            folder = scratch / destination.name
            folder.mkdir()
            yield BundleWriter(folder, destination, force)


def check_destination(destination: Path, *, force: bool) -> None:
    """Raises BundleError unless a bundle may be written to `destination`: free or a bundle, in a place that can be written."""
    if destination.is_symlink():
        raise BundleError(f"{destination} is a symbolic link, which is not followed; give --output the folder itself")
    if destination.exists() and not destination.is_dir():
        raise BundleError(f"{destination} exists and is not a folder; choose another --output")
    _check_writable(destination)
    if not destination.exists() or not any(destination.iterdir()):
        return
    if not is_bundle(destination):
        raise BundleError(f"{destination} holds something that is not a bundle; choose another --output")
    if not force:
        raise BundleError(f"{destination} already holds a bundle; replace it with --force or choose another --output")


def _check_writable(destination: Path) -> None:
    """The folder that will hold the bundle, or the nearest one above it that exists, must take new entries."""
    above = next(parent for parent in Path(os.path.abspath(destination)).parents if os.path.lexists(parent))
    if not above.is_dir():
        raise BundleError(f"cannot write {destination}: {above} is not a folder; choose another --output")
    if not os.access(above, os.W_OK | os.X_OK):
        raise BundleError(f"cannot write {destination}: no permission to write into {above}; choose another --output")


def _put_in_place(folder: Path, destination: Path, force: bool) -> None:
    check_destination(destination, force=force)
    if destination.exists() and any(destination.iterdir()):
        _exchange(folder, destination)
    else:
        os.rename(folder, destination)
    sync_path(destination.parent)


def _exchange(new: Path, old: Path) -> None:
    """Swaps two folders in one step (renameat2, Linux); the old one then lies in the scratch and goes with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    swap = getattr(libc, "renameat2", None)
    if swap is not None:
        if swap(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(code, os.strerror(code), str(old))
    # This file system cannot swap: for an instant there is no bundle at the destination, but never a mixed one.
    aside = new.with_name(f"{new.name}.replaced")
    os.rename(old, aside)
    os.rename(new, old)
    shutil.rmtree(aside, ignore_errors=True)
