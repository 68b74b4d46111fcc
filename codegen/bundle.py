"""A bundle folder: written beside its destination and renamed into place, verified file by file before use.

    manifest.json  manifest.sig (optional)  ir/  reports/  pieces/  native/  weights/  tokenizer/

Nothing is pickled, nothing unlisted is read, and no file is handed out before its size and SHA-256 match. This
module imports no torch.
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from treadle.codegen.files import sha256_file
from treadle.codegen.manifest import Manifest, check_relative_path, decode_manifest
from treadle.codegen.signing import check_signature
from treadle.codegen.target import can_run
from treadle.codegen.toolchain import check_loadable
from treadle.ir.errors import BundleError
from treadle.kernels.cpu_features import CpuFeatures

MANIFEST, SIGNATURE = "manifest.json", "manifest.sig"
MAX_MANIFEST_BYTES = 1 << 28
_HASH_THREADS = 4


class Bundle:
    """An opened bundle. `manifest` is checked; files are verified when first asked for. Safe across threads."""

    def __init__(self, root: Path, manifest: Manifest, manifest_sha256: str):
        self.root = root
        self.manifest = manifest
        self.fingerprint = manifest_sha256
        self._entries = {entry.path: entry for entry in manifest.files}
        self._verified: set[str] = set()

    def file(self, path: str) -> Path:
        """The full path of a listed file, once its size and SHA-256 have been found right.

        Raises BundleError naming the file if it is unlisted, missing, a link or damaged.
        """
        if path not in self._verified:
            self._check_content(path)
            self._verified.add(path)
        return self.root / path

    def verify(self, paths: Iterable[str] | None = None) -> None:
        """Verifies `paths` (default: every listed file), several at a time. Raises BundleError for the first bad one."""
        wanted = [path for path in (self._entries if paths is None else paths) if path not in self._verified]
        with ThreadPoolExecutor(_HASH_THREADS) as pool:
            for _ in pool.map(self.file, wanted):
                pass

    def verify_in_background(self, paths: Iterable[str]) -> Future[None]:
        """Starts verifying (hashing runs without the interpreter lock); await the result before using the files."""
        pool = ThreadPoolExecutor(1)
        future = pool.submit(self.verify, list(paths))
        pool.shutdown(wait=False)
        return future

    def check_host(self, host: CpuFeatures | None = None) -> None:
        """Raises BundleError if `host` (default: this machine), torch or a plugin here cannot run what was compiled."""
        target = self.manifest.target
        if reason := can_run(target.name, target.features, host):
            raise BundleError(f"{self.root.name} cannot run here: {reason}; compile the model for this machine")
        check_loadable(self.manifest.toolchain, self.root.name)
        if self.manifest.plugins:
            from treadle.codegen.used_plugins import check_plugins

            check_plugins(self.manifest.plugins, self.root.name)

    def weight_files(self, rank: int = 0) -> list[str]:
        """Paths of the stored weight files, each once; empty if weights are not stored."""
        return list(dict.fromkeys(t.file for t in self.manifest.weights_of(rank).tensors if t.file is not None))

    def total_bytes(self) -> int:
        return sum(entry.size for entry in self.manifest.files)

    def unlisted(self) -> list[str]:
        """Files in the folder that the manifest does not list; they are never read."""
        known = {*self._entries, MANIFEST, SIGNATURE}
        found = (path.relative_to(self.root).as_posix() for path in self.root.rglob("*") if not path.is_dir())
        return sorted(path for path in found if path not in known)

    def check_presence(self) -> None:
        """Raises BundleError if a listed file is missing, of another size, or reached through a symbolic link."""
        for path in self._entries:
            self._check_size(path)

    def _check_size(self, path: str) -> None:
        entry = self._entries.get(path)
        if entry is None:
            raise BundleError(f"{self.root.name}: {path} is not listed in its manifest and may not be used")
        _refuse_links(self.root, path)
        try:
            status = (self.root / path).lstat()
        except OSError as error:
            raise BundleError(f"{self.root.name}: {path} is missing; copy or compile the bundle again") from error
        if not stat.S_ISREG(status.st_mode):
            raise BundleError(f"{self.root.name}: {path} is not a regular file")
        if status.st_size != entry.size:
            raise BundleError(
                f"{self.root.name}: {path} is damaged, {status.st_size} bytes instead of {entry.size}; "
                "copy or compile the bundle again"
            )

    def _check_content(self, path: str) -> None:
        self._check_size(path)
        try:
            found = sha256_file(self.root / path)
        except OSError as error:
            raise BundleError(f"{self.root.name}: {path} cannot be read ({error.strerror})") from error
        if found != self._entries[path].sha256:
            raise BundleError(
                f"{self.root.name}: {path} is damaged, its SHA-256 does not match the manifest; "
                "copy or compile the bundle again"
            )


def open_bundle(path: str | Path, *, verify_key: str | Path | None = None, for_loading: bool = True) -> Bundle:
    """Reads and checks the manifest, the signature if `verify_key` (PEM, public) is given, and every file's size.

    With `for_loading` also that this machine and the installed torch can run it; `inspect` does without. Raises
    BundleError that names what is wrong and what to do.
    """
    root = Path(path)
    data = _read_manifest(root)
    if verify_key is not None:
        _check_signed(root, data, Path(verify_key))
    bundle = Bundle(root, decode_manifest(data, f"{root.name}/{MANIFEST}"), hashlib.sha256(data).hexdigest())
    bundle.check_presence()
    if for_loading:
        bundle.check_host()
    return bundle


def is_bundle(path: str | Path) -> bool:
    """Whether `path` is a folder with a treadle manifest in it; says nothing about its health."""
    file = Path(path) / MANIFEST
    if not file.is_file():
        return False
    with open(file, "rb") as reader:
        return b'"schema"' in reader.read(MAX_MANIFEST_BYTES)


def _read_manifest(root: Path) -> bytes:
    if not root.is_dir():
        raise BundleError(f"no bundle at {root}; `treadle compile MODEL --output {root}` makes one")
    if (root / MANIFEST).is_symlink() or not (root / MANIFEST).is_file():
        raise BundleError(f"{root} is not a bundle: it has no {MANIFEST}; `treadle compile` makes one")
    if (root / MANIFEST).stat().st_size > MAX_MANIFEST_BYTES:
        raise BundleError(f"{root}/{MANIFEST} is larger than {MAX_MANIFEST_BYTES} bytes; it is not a manifest")
    return (root / MANIFEST).read_bytes()


def _check_signed(root: Path, data: bytes, key_file: Path) -> None:
    signature = root / SIGNATURE
    if signature.is_symlink() or not signature.is_file():
        raise BundleError(f"{root.name} is not signed; compile it with --sign KEY.pem or serve it without --verify")
    check_signature(data, signature.read_bytes(), key_file, root.name)


def _refuse_links(root: Path, path: str) -> None:
    check_relative_path(path, root.name)
    at = root
    for part in Path(path).parts:
        at = at / part
        if at.is_symlink():
            raise BundleError(f"{root.name}: {at.relative_to(root)} is a symbolic link; bundles hold plain files only")
