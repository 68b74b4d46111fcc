"""Advisory file locks that the kernel drops when their holder dies, and scratch folders that can be told from stale ones."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OWNER = ".owner"


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Holds the lock file `path`, waiting for whoever has it. The file stays: removing it would split waiters."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def owned_scratch(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder in `parent` that is removed at the end; `sweep_scratch` removes it if this process is killed."""
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    with open(folder / _OWNER, "ab") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def sweep_scratch(parent: Path, prefix: str) -> list[Path]:
    """Removes the scratch folders in `parent` whose owner has died; returns them."""
    return [folder for folder in sorted(parent.glob(f"{prefix}*")) if folder.is_dir() and _sweep(folder)]


def _sweep(folder: Path) -> bool:
    owner = folder / _OWNER
    try:
        descriptor = os.open(owner, os.O_RDWR)
    except FileNotFoundError:
        return _sweep_ownerless(folder)
    with os.fdopen(descriptor, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        shutil.rmtree(folder, ignore_errors=True)
    return True


def _sweep_ownerless(folder: Path) -> bool:
    """A folder is without owner for an instant after it was made; an empty one is left for the next sweep."""
    if not any(folder.iterdir()):
        return False
    shutil.rmtree(folder, ignore_errors=True)
    return True
