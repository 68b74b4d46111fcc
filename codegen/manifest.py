"""The manifest of a bundle: typed structs, encoded as JSON, read strictly. This module imports no torch.

Whatever is loaded from a bundle is listed in `files` with size and SHA-256; the rest of the manifest refers to those
paths. `seal` is a SHA-256 over everything else in the manifest, so that a flipped bit in a scale cannot pass; it guards
against damage, a signature against people. Another schema version is refused before other fields are looked at.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import PurePosixPath
from typing import Any

import msgspec

from treadle.codegen.program import Program
from treadle.ir.errors import BundleError

SCHEMA_VERSION = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")


class FileEntry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`path` is relative to the bundle, with forward slashes; `size` in bytes; `sha256` in hex."""

    path: str
    size: int
    sha256: str


class RangeEntry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One artifact of a piece: it serves every token count in [start, end]. `key` is its key in the store."""

    start: int
    end: int
    file: str
    key: str
    format: str


class PieceEntry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A unique compiled piece: `layers` are the layer indices it serves, `key` the hash of its canonical IR.

    `tokens_from` is [input, axis]: which dimension of which input is the token count; null for a static piece. `ir` is
    the path of its IR text.
    """

    name: str
    key: str
    layers: list[int]
    ranges: list[RangeEntry]
    ir: str
    tokens_from: tuple[int, int] | None
    num_inputs: int
    num_params: int
    num_outputs: int


class TargetEntry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the machine code needs: `name` such as cpu:x86-64-avx2, and the processor features it may execute."""

    name: str
    features: list[str]


class ModelEntry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`fingerprint` is the hash of the source's config and weight index; `config` the model's own config."""

    name: str
    architecture: str
    fingerprint: str
    dtype: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    config: dict[str, Any]


class Limits(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the artifacts were compiled for. `max_model_len` in tokens of one request, prompt and answer."""

    max_num_batched_tokens: int
    max_model_len: int


class WeightEntry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tensor the program's steps name in `params`: its dtype, shape, recipe text and, if stored, its file.

    `stored_as` is its name inside the file; tensors with equal recipes are stored once.
    """

    name: str
    dtype: str
    shape: list[int]
    recipe: str
    file: str | None = None
    stored_as: str | None = None


class WeightsEntry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """With `stored` false the tensors are made from the checkpoint at `source` when the engine starts."""

    stored: bool
    tensors: list[WeightEntry]
    source: str | None = None


class NativeEntry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A native library of kernels, such as the attention kernel; `key` is its key in the store."""

    name: str
    file: str
    key: str


class SettingRow(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One effective setting: where it came from, what was asked for, and why it is not that."""

    field: str
    value: Any
    source: str
    asked: Any = None
    reason: str = ""


class StageTime(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Wall time of one stage of the compile, in seconds."""

    stage: str
    seconds: float


class PluginEntry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A package outside treadle that shaped the compile. `source` is the SHA-256 over the files of its `packages`.

    `uses` says what of it was used; `run_time` what of that is called when the bundle runs, which is refused where the
    package is missing or has another hash. `version` is empty for code that belongs to no installed distribution.
    """

    name: str
    version: str
    source: str
    packages: list[str]
    uses: list[str]
    run_time: list[str]


class Manifest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Everything a start needs to know. `toolchain` maps torch, compiler, codegen and treadle to their versions.

    `weights` are those of rank 0, `rank_weights` those of ranks 1, 2, ... of a model cut over several.
    """

    schema: int
    model: ModelEntry
    target: TargetEntry
    toolchain: dict[str, str]
    pipeline: list[str]
    options: dict[str, Any]
    limits: Limits
    pieces: list[PieceEntry]
    program: Program
    weights: WeightsEntry
    rank_weights: list[WeightsEntry] = []
    native: list[NativeEntry]
    tokenizer: list[str]
    stages: list[str]
    reports: list[str]
    settings: list[SettingRow]
    times: list[StageTime]
    files: list[FileEntry]
    plugins: list[PluginEntry] = []
    seal: str = ""

    @property
    def num_ranks(self) -> int:
        """How many processes run the model together."""
        return 1 + len(self.rank_weights)

    def weights_of(self, rank: int) -> WeightsEntry:
        """The weights of one rank. Raises BundleError if the model is cut over fewer."""
        if not 0 <= rank < self.num_ranks:
            raise BundleError(f"the bundle has weights for {self.num_ranks} ranks, not for rank {rank}")
        return self.rank_weights[rank - 1] if rank else self.weights

    def piece(self, name: str) -> PieceEntry:
        """The piece called `name`. Raises BundleError that lists the pieces there are."""
        for piece in self.pieces:
            if piece.name == name:
                return piece
        raise BundleError(f"the bundle has no piece {name!r}; it has: {', '.join(p.name for p in self.pieces)}")

    def dispatch_table(self) -> dict[str, list[tuple[int, int, str]]]:
        """For each piece: (start, end, file) in the order in which a token count is looked up, exact sizes first."""
        return {
            piece.name: sorted(
                ((r.start, r.end, r.file) for r in piece.ranges), key=lambda r: (r[0] != r[1], r[0], r[1])
            )
            for piece in self.pieces
        }


class _Header(msgspec.Struct):
    schema: int


def encode_manifest(manifest: Manifest) -> bytes:
    """Deterministic, readable JSON with a final newline, sealed."""
    sealed = msgspec.structs.replace(manifest, seal=_seal(manifest))
    return msgspec.json.format(msgspec.json.encode(sealed, order="sorted"), indent=1) + b"\n"


def _seal(manifest: Manifest) -> str:
    bare = msgspec.structs.replace(manifest, seal="")
    return hashlib.sha256(msgspec.json.encode(bare, order="sorted")).hexdigest()


def decode_manifest(data: bytes, where: str) -> Manifest:
    """Reads and checks a manifest. Raises BundleError naming `where` and the field for anything unexpected."""
    try:
        header = msgspec.json.decode(data, type=_Header)
        if header.schema != SCHEMA_VERSION:
            raise BundleError(
                f"{where}: schema version {header.schema} is not {SCHEMA_VERSION}, the one this treadle reads; "
                "compile the model again with this version"
            )
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BundleError(f"{where}: not a valid manifest ({error}); compile the model again") from error
    if manifest.seal != _seal(manifest):
        raise BundleError(f"{where}: damaged, its seal does not match its content; copy or compile the bundle again")
    _check_files(manifest, where)
    return manifest


def _check_files(manifest: Manifest, where: str) -> None:
    listed = set()
    for entry in manifest.files:
        check_relative_path(entry.path, where)
        if entry.path in listed:
            raise BundleError(f"{where}: {entry.path} is listed twice")
        if entry.size < 0 or not _SHA256.fullmatch(entry.sha256):
            raise BundleError(f"{where}: {entry.path} has no valid size and sha256")
        listed.add(entry.path)
    for path in referenced_paths(manifest):
        if path not in listed:
            raise BundleError(f"{where}: {path!r} is used but not listed in files")


def referenced_paths(manifest: Manifest) -> list[str]:
    """Every path that some part of the manifest refers to, each once."""
    paths = [r.file for piece in manifest.pieces for r in piece.ranges]
    paths += [piece.ir for piece in manifest.pieces]
    paths += [native.file for native in manifest.native]
    for weights in (manifest.weights, *manifest.rank_weights):
        paths += [tensor.file for tensor in weights.tensors if tensor.file is not None]
    paths += manifest.tokenizer + manifest.stages + manifest.reports
    return list(dict.fromkeys(paths))


def check_relative_path(path: str, where: str) -> None:
    """Raises BundleError unless `path` is plain, relative and stays inside its folder."""
    parts = PurePosixPath(path).parts
    plain = path == "/".join(parts) and "\\" not in path and "\0" not in path
    if not parts or not plain or path.startswith("/") or ".." in parts or "." in parts:
        raise BundleError(f"{where}: {path!r} is not a plain path inside the bundle")
