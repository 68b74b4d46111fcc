"""C++ kernels with a plain C ABI: what they are built from, how they are compiled, how they are loaded.

Sources include no torch header, so a library takes seconds to build and does not depend on the torch build.
Storing the result under a key is codegen's business.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treadle.ir.errors import ArtifactError
from treadle.ir.registry import Registry
from treadle.kernels.cpu_features import normalize_arch

ABI_VERSION = 1
"""Must equal TREADLE_ABI_VERSION in kernels/cpu/abi.h; raised whenever a struct or a signature changes."""

DEFAULT_COMPILER = "g++"
SOURCE_FOLDER = Path(__file__).parent / "cpu"
MAX_ERROR_LINES = 20

# No contraction: a*b+c is fused only where the source says so, or results would depend on the inliner.
COMMON_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno",
    "-fno-trapping-math", "-fno-exceptions", "-fno-rtti", "-Wall", "-Wextra", "-Wno-psabi", "-Wno-ignored-attributes",
)  # fmt: skip
LINK_FLAGS = ("-shared", "-fopenmp", "-Wl,-z,now", "-Wl,-z,noexecstack", "-ldl")

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (
    *_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512",
    "-Wno-maybe-uninitialized",  # gcc 12's own intrinsics header
)  # fmt: skip

_AVX512_BF16 = (*_AVX512, "-mavx512bf16")
_AMX = (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16")


@dataclass(frozen=True, kw_only=True)
class TranslationUnit:
    """One .cpp file; `flags` are its extra flags by architecture, and it is left out where its architecture has none."""

    file: str
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    only: tuple[str, ...] | None = None

    def applies_to(self, arch: str) -> bool:
        return self.only is None or arch in self.only


@dataclass(frozen=True, kw_only=True)
class NativeSource:
    """One native library: its translation units and the headers they include, all in kernels/cpu/."""

    name: str
    units: tuple[TranslationUnit, ...]
    headers: tuple[str, ...] = ()
    folder: Path | None = None
    exported: bool = False
    """Whether compiled pieces call its functions by name: then it is loaded before them, for all to see."""

    @property
    def root(self) -> Path:
        """Where the files lie; a plugin's source says so in `folder`."""
        return self.folder or SOURCE_FOLDER

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file whose text decides what the library does, in a fixed order."""
        return tuple(self.root / name for name in (*self.headers, *(unit.file for unit in self.units)))

    def flags_for(self, target: str) -> dict[str, tuple[str, ...]]:
        """Compile flags of each unit for an architecture (`x86_64`, `aarch64`), plus `link`."""
        arch = normalize_arch(target)
        flags = {u.file: (*COMMON_FLAGS, *u.flags.get(arch, ())) for u in self.units if u.applies_to(arch)}
        return {**flags, "link": LINK_FLAGS}

    def key_ingredients(self, target: str, compiler: str | None = None) -> dict[str, Any]:
        """Everything the built library depends on, as JSON-able values without any path: name, ABI, arch, flags,
        source texts, first line of the compiler's version. Raises ArtifactError where there is no compiler."""
        return {
            "name": self.name,
            "abi": ABI_VERSION,
            "arch": normalize_arch(target),
            "flags": {unit: list(flags) for unit, flags in sorted(self.flags_for(target).items())},
            "sources": {path.name: path.read_text() for path in self.files},
            "compiler": compiler_version(compiler),
        }


CPU_ATTENTION = NativeSource(
    name="cpu_attention",
    headers=("abi.h", "vector.h", "paged_attention.h"),
    units=(
        TranslationUnit(file="dispatch.cpp"),
        TranslationUnit(file="attention_portable.cpp"),
        TranslationUnit(file="attention_avx2.cpp", flags={"x86_64": _AVX2}, only=("x86_64",)),
        TranslationUnit(file="attention_avx512.cpp", flags={"x86_64": _AVX512}, only=("x86_64",)),
    ),
)
_X86 = ("x86_64",)
CPU_LINEAR = NativeSource(
    name="cpu_linear",
    headers=("abi.h", "vector.h", "packed_linear_abi.h", "packed_linear.h"),
    units=(
        TranslationUnit(file="packed_linear_dispatch.cpp"),
        TranslationUnit(file="packed_linear_portable.cpp"),
        TranslationUnit(file="packed_linear_avx2.cpp", flags={"x86_64": _AVX2}, only=_X86),
        TranslationUnit(file="packed_linear_avx512.cpp", flags={"x86_64": _AVX512}, only=_X86),
        TranslationUnit(file="packed_linear_avx512_bf16.cpp", flags={"x86_64": _AVX512_BF16}, only=_X86),
        TranslationUnit(file="packed_linear_amx.cpp", flags={"x86_64": _AMX}, only=_X86),
    ),
    exported=True,
)
LAUNCH_PLAN = NativeSource(
    name="launch_plan", headers=("abi.h", "launch_plan.h"), units=(TranslationUnit(file="launch_plan.cpp"),)
)
NATIVE_SOURCES = Registry(
    "native library",
    {
        "cpu_attention": "treadle.kernels.native:CPU_ATTENTION",
        "cpu_linear": "treadle.kernels.native:CPU_LINEAR",
        "launch_plan": "treadle.kernels.native:LAUNCH_PLAN",
    },
    group="treadle.kernels",
    prefix="native.",
)


def native_sources() -> dict[str, NativeSource]:
    """Name -> source of every native library; codegen builds each as one artifact. Plugins add theirs as `native.NAME`."""
    return {name: NATIVE_SOURCES.get(name) for name in NATIVE_SOURCES.names()}


def find_compiler(compiler: str | None = None) -> str:
    """Full path of `compiler` (default g++). Raises ArtifactError that names it when it is not installed."""
    wanted = compiler or DEFAULT_COMPILER
    found = shutil.which(wanted)
    if found is None:
        raise ArtifactError(
            f"no C++ compiler: {wanted!r} is not installed or not on PATH; "
            "install g++ (version 12 or newer) or name another one with the `compiler` option"
        )
    return found


def compiler_version(compiler: str | None = None) -> str:
    """First line of `compiler --version`, without the name it was called by."""
    command = [find_compiler(compiler), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not done.stdout:
        raise ArtifactError(_failure_text(command, done.returncode, done.stderr))
    words = done.stdout.splitlines()[0].split(maxsplit=1)
    return words[-1]


def compile_native(source: NativeSource, target: str, out_path: Path, compiler: str | None = None) -> Path:
    """Builds `source` for the architecture `target` into `out_path`, which appears whole or not at all.

    Units compile side by side. Raises ArtifactError with the command and the first lines of its output when the
    compiler is missing or fails.
    """
    program = find_compiler(compiler)
    flags = source.flags_for(target)
    out_path = Path(out_path)
    out_path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_path.parent, prefix=f".{source.name}-") as scratch:
        objects = {unit: Path(scratch) / f"{unit}.o" for unit in flags if unit != "link"}
        _run_all([
            [program, *flags[unit], "-c", str(source.root / unit), "-o", str(path)]
            for unit, path in objects.items()
        ])  # fmt: skip
        linked = Path(scratch) / out_path.name
        _run_all([[program, *flags["link"], *map(str, objects.values()), "-o", str(linked)]])
        os.replace(linked, out_path)
    return out_path


def _run_all(commands: list[list[str]]) -> None:
    """Runs commands at the same time; after all have ended, raises for the first that failed."""
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for command in commands
    ]
    outputs = [process.communicate()[0] for process in running]
    for command, process, output in zip(commands, running, outputs, strict=True):
        if process.returncode != 0:
            raise ArtifactError(_failure_text(command, process.returncode, output))


def _failure_text(command: list[str], code: int, output: str) -> str:
    lines = output.strip().splitlines()
    shown = "\n".join(f"  {line}" for line in lines[:MAX_ERROR_LINES])
    left = f"\n  ... {len(lines) - MAX_ERROR_LINES} more lines" if len(lines) > MAX_ERROR_LINES else ""
    return f"the C++ compiler failed with status {code}\n  {' '.join(command)}\n{shown}{left}"


@dataclass(frozen=True)
class NativeLibrary:
    """A loaded library. `functions` is the ctypes handle; callers set argtypes once through `bind`."""

    path: Path
    functions: ctypes.CDLL

    def bind(self, name: str, argtypes: list[Any], restype: Any = ctypes.c_int64) -> Any:
        """The C function `name` with its signature set. Raises ArtifactError when the library lacks it."""
        try:
            function = self.functions[name]
        except AttributeError as error:
            raise ArtifactError(f"{self.path.name} has no function {name!r}; compile the bundle again") from error
        function.argtypes, function.restype = argtypes, restype
        return function


def load_native(path: Path, *, exported: bool = False) -> NativeLibrary:
    """Opens a built library; `exported` makes its functions known to libraries that are loaded later.

    Raises ArtifactError when it is no loadable library or has another ABI version.
    """
    # torch brings its own libgomp; with it in the process first, ours resolves to that one and shares its threads.
    import torch  # noqa: F401

    path = Path(path)
    try:
        handle = ctypes.CDLL(str(path.resolve()), mode=os.RTLD_GLOBAL if exported else os.RTLD_LOCAL)
    except OSError as error:
        raise ArtifactError(f"cannot load native library {path.name}: {error}; compile the bundle again") from error
    library = NativeLibrary(path, handle)
    found = library.bind("treadle_abi_version", [])()
    if found != ABI_VERSION:
        raise ArtifactError(
            f"{path.name} has ABI version {found}, this treadle needs {ABI_VERSION}; compile the bundle again"
        )
    return library
