"""Building and loading native libraries: what a library's key holds, and what each failure says."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kernels.attention_case import AttentionCase, make_batch, run
from tests.kernels.tolerance import assert_close
from treadle.ir.errors import ArtifactError
from treadle.kernels import native as native_module
from treadle.kernels.attention.cpu import NATIVE_SOURCE
from treadle.kernels.cpu_features import local_cpu
from treadle.kernels.native import (
    ABI_VERSION,
    NativeLibrary,
    NativeSource,
    TranslationUnit,
    compile_native,
    load_native,
    native_sources,
)


@pytest.fixture
def source_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of kernels/cpu/."""
    monkeypatch.setattr(native_module, "SOURCE_FOLDER", tmp_path)
    return tmp_path


def small_source(folder: Path, text: str) -> NativeSource:
    (folder / "small.cpp").write_text(text)
    return NativeSource(name="small", units=(TranslationUnit(file="small.cpp"),))


def test_abi_version_is_the_headers() -> None:
    """C05-01: Python and C++ agree on the version that guards their structs."""
    text = (native_module.SOURCE_FOLDER / "abi.h").read_text()
    found = re.search(r"#define TREADLE_ABI_VERSION (\d+)", text)
    assert found is not None and int(found[1]) == ABI_VERSION


def test_sources_include_nothing_unlisted() -> None:
    """Every file that decides what a library does is in its key."""
    for source in native_sources().values():
        names = {path.name for path in source.files}
        for path in source.files:
            assert set(re.findall(r'#include "([^"]+)"', path.read_text())) <= names, path.name


def test_key_ingredients_hold_no_path() -> None:
    """The key is the same on another machine with the same compiler, so no folder may enter it."""
    ingredients = native_sources()[NATIVE_SOURCE].key_ingredients("x86_64")
    text = json.dumps({**ingredients, "sources": sorted(ingredients["sources"])})
    assert str(Path(native_module.__file__).parent) not in text and os.getcwd() not in text
    assert set(ingredients) == {"name", "abi", "arch", "flags", "sources", "compiler"}


def test_architectures_choose_units_and_flags() -> None:
    """C05-02: x86-64 has a unit for each instruction set, another architecture the portable one alone."""
    source = native_sources()[NATIVE_SOURCE]
    x86, arm = source.flags_for("x86_64"), source.flags_for("arm64")
    assert "-mavx512f" in x86["attention_avx512.cpp"] and "-mavx2" in x86["attention_avx2.cpp"]
    assert not any(flag.startswith("-mavx") for flag in x86["attention_portable.cpp"] + x86["dispatch.cpp"])
    assert set(arm) == {"dispatch.cpp", "attention_portable.cpp", "link"}


def test_missing_compiler_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"'no-such-compiler' is not installed.*`compiler` option"):
        compile_native(native_sources()[NATIVE_SOURCE], "x86_64", tmp_path / "x.so", compiler="no-such-compiler")


def test_failed_compile_shows_command_and_output(source_folder: Path) -> None:
    source = small_source(source_folder, "int broken(\n")
    with pytest.raises(ArtifactError, match=r"(?s)failed with status 1\n  \S*g\+\+ .*small.cpp.*error:"):
        compile_native(source, local_cpu().arch, source_folder / "out" / "x.so")
    assert list((source_folder / "out").iterdir()) == []


def test_foreign_libraries_are_refused(source_folder: Path) -> None:
    """A damaged file, a library without our version, and one of another version."""
    damaged = source_folder / "damaged.so"
    damaged.write_bytes(b"\x7fELF and nothing else")
    with pytest.raises(ArtifactError, match=r"cannot load native library damaged\.so"):
        load_native(damaged)
    plain = compile_native(small_source(source_folder, "int x;\n"), local_cpu().arch, source_folder / "plain.so")
    with pytest.raises(ArtifactError, match="has no function 'treadle_abi_version'"):
        load_native(plain)
    text = 'extern "C" __attribute__((visibility("default"))) long treadle_abi_version() { return 999; }\n'
    newer = compile_native(small_source(source_folder, text), local_cpu().arch, source_folder / "newer.so")
    with pytest.raises(ArtifactError, match="has ABI version 999"):
        load_native(newer)


def test_library_shares_torchs_openmp(native: NativeLibrary) -> None:
    """Two OpenMP runtimes would fight for the cores: the process has one libgomp mapped."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    assert len(mapped) == 1, mapped


def test_library_exports_the_interface_alone(native: NativeLibrary) -> None:
    """A symbol compiled for a better instruction set must not be visible to anything else in the process."""
    for name in ("treadle_paged_attention", "treadle_write_kv", "treadle_best_isa"):
        native.bind(name, [])
    with pytest.raises(ArtifactError):
        native.bind("_ZN7treadle14attention_avx2ERKNS_5LayerE", [])


def test_library_and_python_agree_on_the_isa(native: NativeLibrary) -> None:
    """C05-02: cpu_features and the dispatcher read the same CPU."""
    codes = {1: "portable", 2: "avx2", 3: "avx512"}
    assert codes[native.bind("treadle_best_isa", [])()] == local_cpu().isa


@pytest.mark.slow
def test_wide_vectors_compute_the_same(tmp_path: Path) -> None:
    """C05-01: the code as AVX-512 has it (16 lanes, groups of 4 rows), run without AVX-512, in a library that holds
    nothing else, as on an architecture with only the portable unit."""
    arch = local_cpu().arch
    wide = replace(
        native_sources()[NATIVE_SOURCE],
        units=(
            TranslationUnit(file="dispatch.cpp", flags={arch: ("-DTREADLE_PORTABLE_ONLY",)}),
            TranslationUnit(file="attention_portable.cpp", flags={arch: ("-DTREADLE_WIDE",)}),
        ),
    )
    library = load_native(compile_native(wide, arch, tmp_path / "wide.so"))
    lengths = ((1, 100), (37, 37), (1, 1), (20, 600), (3, 64))
    for dtype in ("f32", "bf16", "f16"):
        for heads, head_size in ((6, 64), (10, 72), (18, 256)):
            case = AttentionCase(lengths=lengths, dtype=dtype, num_heads=heads, head_size=head_size, window=90)
            batch = make_batch(case, library, "cpu")
            assert_close(run(batch, library, "cpu"), run(batch, None, "torch"))
