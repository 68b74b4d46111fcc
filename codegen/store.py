"""The content-addressed store of artifacts: objects appear whole or not at all, and are verified whenever they are read.

    root/objects/ab/<digest>/data        the artifact
    root/objects/ab/<digest>/meta.json   schema, key fields, size and SHA-256 of data, time, label
    root/locks/<digest>                  who is building this key now; the kernel frees it if they die
    root/scratch/                        work in progress; `gc` sweeps what a killed process left

Safe under many processes. Imports no torch.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.codegen.files import clear_disk_errors, copy_durably, sha256_file, sync_path, write_durably
from treadle.codegen.key import ArtifactKey, Difference, explain, key_from_fields
from treadle.codegen.locks import exclusive, owned_scratch, sweep_scratch
from treadle.ir.errors import ArtifactError, ConfigError

STORE_SCHEMA = 1
_DATA, _META = "data", "meta.json"


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """A verified artifact: `path` may be read; `label` is for people, for example `piece middle 1-2048`."""

    key: ArtifactKey
    path: Path
    sha256: str
    size: int
    created: float
    label: str

    @property
    def digest(self) -> str:
        return self.key.digest


@dataclass(frozen=True)
class Problem:
    """An object that cannot be used, and why."""

    digest: str
    reason: str


@dataclass(frozen=True)
class Collected:
    """What `gc` removed: digests of objects, number of scratch folders, bytes freed."""

    objects: list[str]
    scratch: int
    bytes: int


class Store:
    """The store at `root`, made on first write and readable by its owner only."""

    def __init__(self, root: Path):
        """Raises ConfigError if something that is no folder is in the way."""
        self.root = Path(os.path.abspath(root))
        if blocker := next((p for p in (self.root, *self.root.parents) if p.exists() and not p.is_dir()), None):
            raise ConfigError(f"the store {self.root} cannot be a folder: {blocker} is a file; choose another with --store")
        self._objects = self.root / "objects"
        self._scratch = self.root / "scratch"

    def lookup(self, key: ArtifactKey) -> StoredObject | None:
        """The verified object, or None if there is none. Raises ArtifactError if it is damaged or foreign."""
        folder = self._folder(key.digest)
        if not folder.is_dir():
            return None
        found = self._verified(key.digest)
        # The time of last use only helps gc choose; a store that may not be written to works without it.
        with suppress(OSError):
            os.utime(folder)
        return found

    def put(self, key: ArtifactKey, source: Path, label: str) -> StoredObject:
        """Publishes a copy of the file `source` under `key`. If a sound object is already there, that one stays.

        Raises ArtifactError if the disk is full; then nothing is published.
        """
        digest = key.digest
        with clear_disk_errors(f"writing {label} to the store"), owned_scratch(self._scratch, "put-") as scratch:
            self.root.chmod(0o700)
            staged = scratch / digest
            staged.mkdir()
            copy_durably(source, staged / _DATA)
            write_durably(staged / _META, _encode_meta(key, staged / _DATA, label))
            sync_path(staged)
            self._publish(staged, digest, scratch)
        return self._verified(digest)

    def find_or_build(
        self,
        key: ArtifactKey,
        build: Callable[[Path], object],
        label: str,
        report: Callable[[str], None] = lambda reason: None,
    ) -> tuple[StoredObject, bool]:
        """The object under `key`, built if it is missing or damaged; the flag says whether it was built.

        `build(path)` writes the artifact to `path`. `report` gets the reason when a damaged object is replaced. Of
        several processes that ask for one key, one builds and the others wait for it.
        """
        with clear_disk_errors(f"building {label}"), exclusive(self.root / "locks" / key.digest):
            try:
                found = self.lookup(key)
            except ArtifactError as error:
                report(f"{error}; building it again")
                found = None
            if found is not None:
                return found, False
            with owned_scratch(self._scratch, "build-") as scratch:
                built = scratch / _DATA
                build(built)
                return self.put(key, built, label), True

    def digests(self) -> list[str]:
        return sorted(folder.name for folder in self._objects.glob("*/*") if folder.is_dir())

    def ls(self) -> list[StoredObject | Problem]:
        """Every object by digest; only sizes are checked, see `verify`."""
        return [self._described(digest, deep=False) for digest in self.digests()]

    def verify(self) -> list[Problem]:
        """Re-hashes everything; returns what is damaged or foreign."""
        described = (self._described(digest, deep=True) for digest in self.digests())
        return [item for item in described if isinstance(item, Problem)]

    def get(self, prefix: str) -> StoredObject:
        """The verified object whose digest starts with `prefix`. Raises ArtifactError if there is not exactly one."""
        found = [digest for digest in self.digests() if digest.startswith(prefix)]
        if len(found) != 1:
            what = f"{len(found)} objects" if found else "no object"
            raise ArtifactError(f"{what} in the store start with {prefix!r}; `treadle cache ls` lists them")
        return self._verified(found[0])

    def diff(self, a: str, b: str) -> list[Difference]:
        """How the keys of two objects differ; both are named by a prefix of their digest."""
        return explain(self.get(a).key, self.get(b).key)

    def explain(self, key: ArtifactKey) -> tuple[StoredObject | None, list[Difference]]:
        """For a hit (object, []); for a miss the nearest object, or None, and on what it differs from `key`."""
        if (hit := self.lookup(key)) is not None:
            return hit, []
        others = [item for item in self.ls() if isinstance(item, StoredObject) and item.key.kind == key.kind]
        if not others:
            return None, []
        nearest = min(others, key=lambda item: (len(explain(item.key, key)), item.digest))
        return nearest, explain(nearest.key, key)

    def gc(self, *, max_bytes: int | None = None, max_age: float | None = None) -> Collected:
        """Removes damaged objects, scratch of killed processes, objects unused for `max_age` seconds, and then the
        least recently used until `max_bytes` are left. Objects that a bundle holds are copies, so bundles stay whole.
        """
        removed, freed = [], 0
        sound: list[tuple[float, str, int]] = []
        for digest in self.digests():
            described, size = self._described(digest, deep=True), _folder_bytes(self._folder(digest))
            used = self._folder(digest).stat().st_mtime
            if isinstance(described, Problem) or (max_age is not None and time.time() - used > max_age):
                removed.append(digest)
                freed += size
            else:
                sound.append((used, digest, size))
        left = sum(size for _, _, size in sound)
        for _, digest, size in sorted(sound) if max_bytes is not None else ():
            if left <= (max_bytes or 0):
                break
            removed.append(digest)
            left, freed = left - size, freed + size
        for digest in removed:
            self._remove(digest)
        return Collected(removed, len(sweep_scratch(self._scratch, "")), freed)

    def _folder(self, digest: str) -> Path:
        return self._objects / digest[:2] / digest

    def _publish(self, staged: Path, digest: str, scratch: Path) -> None:
        final = self._folder(digest)
        final.parent.mkdir(parents=True, exist_ok=True)
        while True:
            try:
                os.rename(staged, final)
                break
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            if not isinstance(self._described(digest, deep=True), Problem):
                return
            with suppress(FileNotFoundError):
                os.rename(final, scratch / f"damaged-{time.monotonic_ns()}")
        sync_path(final.parent)

    def _remove(self, digest: str) -> None:
        with owned_scratch(self._scratch, "remove-") as scratch, suppress(FileNotFoundError):
            os.rename(self._folder(digest), scratch / digest)

    def _described(self, digest: str, *, deep: bool) -> StoredObject | Problem:
        try:
            return self._verified(digest, deep=deep)
        except ArtifactError as error:
            return Problem(digest, str(error))

    def _verified(self, digest: str, *, deep: bool = True) -> StoredObject:
        folder = self._folder(digest)
        where = f"store object {digest[:12]}"
        meta = _decode_meta(folder / _META, where)
        key = key_from_fields(meta["key"])
        if key.digest != digest:
            raise ArtifactError(f"{where} is foreign: its key fields hash to {key.digest[:12]}")
        data = folder / _DATA
        try:
            size = data.lstat().st_size
            if size != meta["size"]:
                raise ArtifactError(f"{where} is damaged: {size} bytes instead of {meta['size']}")
            if deep and sha256_file(data) != meta["sha256"]:
                raise ArtifactError(f"{where} is damaged: its SHA-256 does not match")
        except OSError as error:
            raise ArtifactError(f"{where} is damaged: its data cannot be read ({error.strerror})") from error
        return StoredObject(
            key=key, path=data, sha256=meta["sha256"], size=size, created=meta["created"], label=meta["label"]
        )


def _encode_meta(key: ArtifactKey, data: Path, label: str) -> bytes:
    meta = {
        "schema": STORE_SCHEMA,
        "key": key.fields(),
        "size": data.stat().st_size,
        "sha256": sha256_file(data),
        "created": time.time(),
        "label": label,
    }
    return json.dumps(meta, indent=1, sort_keys=True).encode() + b"\n"


_META_TYPES: dict[str, type | tuple[type, ...]] = {
    "schema": int, "key": dict, "size": int, "sha256": str, "created": (int, float), "label": str,
}  # fmt: skip


def _decode_meta(path: Path, where: str) -> dict[str, Any]:
    try:
        meta = json.loads(path.read_bytes())
    except OSError as error:
        raise ArtifactError(f"{where} is damaged: its header cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ArtifactError(f"{where} is damaged: its header is not JSON") from error
    sound = isinstance(meta, dict) and set(meta) == set(_META_TYPES)
    if not sound or any(not isinstance(meta[name], wanted) for name, wanted in _META_TYPES.items()):
        raise ArtifactError(f"{where} is damaged: its header lacks fields")
    if meta["schema"] != STORE_SCHEMA:
        raise ArtifactError(f"{where} is foreign: schema {meta['schema']} instead of {STORE_SCHEMA}")
    return meta


def _folder_bytes(folder: Path) -> int:
    return sum(_size(path) for path in _walk(folder))


def _walk(folder: Path) -> Iterator[Path]:
    yield from (path for path in folder.rglob("*") if not path.is_dir())


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


