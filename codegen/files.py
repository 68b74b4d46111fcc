"""Writing files so that they are whole or absent, and hashing them. Imports no torch."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from treadle.ir.errors import ArtifactError

_REMEDIES = {
    errno.ENOSPC: ("the disk is full", "free some space"),
    errno.EDQUOT: ("the disk quota is used up", "free some space"),
    errno.EFBIG: ("a file size limit was hit", "raise the limit"),
    errno.EACCES: ("permission was denied", "choose a place that this user may write to"),
    errno.EROFS: ("the file system is read-only", "choose a place that can be written to"),
}


@contextmanager
def clear_disk_errors(doing: str) -> Iterator[None]:
    """Turns "no space left", "permission denied" and the like into an ArtifactError that says what was being written."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REMEDIES:
            raise
        what, remedy = _REMEDIES[error.errno]
        raise ArtifactError(f"{what} while {doing}; nothing half-written was kept: {remedy} and run it again") from error


def sha256_file(path: Path) -> str:
    """64 hex digits. Refuses to follow a symbolic link (OSError ELOOP)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_durably(path: Path, data: bytes) -> None:
    """Writes and flushes to disk; the caller renames the folder around it."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def copy_durably(source: Path, path: Path) -> None:
    with open(source, "rb") as reader, open(path, "wb") as writer:
        shutil.copyfileobj(reader, writer, 1 << 20)
        writer.flush()
        os.fsync(writer.fileno())


def sync_path(path: Path) -> None:
    """Flushes a file or the entries of a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
