"""`treadle doctor`: what this machine offers. Exit code 1 if bundles cannot be served here, else 0."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import typer

import treadle
from treadle.ir.errors import TreadleError
from treadle.kernels.cpu_features import local_cpu
from treadle.kernels.native import compiler_version
from treadle.server.environment import store_root

app = typer.Typer(add_completion=False)

NEEDED = ("torch", "tokenizers", "safetensors", "msgspec", "pyzmq", "fastapi", "uvicorn", "jinja2")
FOR_COMPILING = ("transformers", "gguf")


class Finding(NamedTuple):
    """One line of the report: `fail` stops serving, `warn` stops something less."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str


@app.command(help="Check this machine: versions, processor, compiler, store, memory.")
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False) -> None:
    """Prints the report and exits with its code."""
    findings = [finding for check in CHECKS for finding in check()]
    if as_json:
        import json

        typer.echo(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            typer.echo(f"{finding.status:>4}  {finding.name:<{width}}  {finding.detail}")
    raise typer.Exit(1 if any(finding.status == "fail" for finding in findings) else 0)


def check_versions() -> Iterator[Finding]:
    """The interpreter and the packages."""
    python_ok = sys.version_info >= (3, 11)
    yield Finding("python", "ok" if python_ok else "fail", platform.python_version() + ("" if python_ok else ", needs 3.11"))
    yield Finding("treadle", "ok", treadle.__version__)
    for names, missing in ((NEEDED, "fail"), (FOR_COMPILING, "warn")):
        for name in names:
            try:
                yield Finding(name, "ok", version(name))
            except PackageNotFoundError:
                what = "serving" if missing == "fail" else "compiling"
                yield Finding(name, missing, f"not installed, needed for {what}")  # type: ignore[arg-type]


def check_processor() -> Iterator[Finding]:
    """The instruction sets that generated code may use."""
    cpu = local_cpu()
    system_ok = platform.system() == "Linux"
    yield Finding("system", "ok" if system_ok else "fail", f"{platform.system()} {platform.release()}, {cpu.arch}")
    isas = ", ".join(cpu.runnable_isas)
    extra = " ".join(flag for flag in ("avx512_bf16", "amx_bf16", "amx_int8", "avx512_vnni") if flag in cpu.flags)
    yield Finding("processor", "ok", f"{len(os.sched_getaffinity(0))} usable; runs {isas} {extra}".rstrip())


def check_compiler() -> Iterator[Finding]:
    """The C++ compiler; serving a bundle needs none."""
    try:
        yield Finding("c++ compiler", "ok", compiler_version())
    except TreadleError as error:
        yield Finding("c++ compiler", "warn", f"{error}; bundles can be served, not compiled")


def check_store() -> Iterator[Finding]:
    """The artifact store and the space beside it."""
    root = store_root()
    sizes = [path.stat().st_size for path in root.rglob("*") if path.is_file()] if root.exists() else []
    state = f"{len(sizes)} files, {_size(sum(sizes))}" if root.exists() else "not made yet"
    parent = next(path for path in (root, *root.parents) if path.exists())
    writable = os.access(parent, os.W_OK)
    yield Finding("store", "ok" if writable else "warn", f"{root}: {state}" + ("" if writable else ", not writable"))
    free = shutil.disk_usage(parent).free
    yield Finding("disk", "ok" if free > 2 << 30 else "warn", f"{_size(free)} free at {parent}")


def check_memory() -> Iterator[Finding]:
    """What the kernel says is available."""
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.endswith("kB")}
    if not sizes:
        yield Finding("memory", "warn", "cannot be read on this system")
        return
    free, total = sizes["MemAvailable"], sizes["MemTotal"]
    yield Finding("memory", "ok" if free > 1 << 30 else "warn", f"{_size(free)} available of {_size(total)}")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_versions,
    check_processor,
    check_compiler,
    check_store,
    check_memory,
)


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.1f} MiB"
