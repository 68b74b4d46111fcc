"""Versions of everything that shapes generated code: torch, the C++ compiler, this code generator.

torch's version is read from package metadata, so nothing here imports torch and a start needs no compiler.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from treadle.ir.errors import BundleError
from treadle.kernels.native import compiler_version

CODEGEN_VERSION = "1"
"""Raised whenever the same IR would be compiled to different code or laid out differently in an artifact."""

NO_COMPILER = "none"
_UNKNOWN = "unknown"
LOAD_CRITICAL = ("torch",)
"""What must be equal between compile and load: artifacts link against torch's C shim of one release."""


def torch_version() -> str:
    """The installed torch, for example 2.13.0+cpu."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return _UNKNOWN


def treadle_version() -> str:
    try:
        return version("treadle")
    except PackageNotFoundError:
        return _UNKNOWN


def toolchain(compiler: str | None = None, *, with_compiler: bool = True) -> dict[str, str]:
    """Name -> version of what a compile uses. `compiler` is the C++ compiler (default g++).

    Raises ArtifactError where a compiler is wanted and missing.
    """
    return {
        "torch": torch_version(),
        "compiler": compiler_version(compiler) if with_compiler else NO_COMPILER,
        "codegen": CODEGEN_VERSION,
    }


def check_loadable(recorded: dict[str, str], where: str) -> None:
    """Raises BundleError if artifacts made with `recorded` versions cannot be loaded by what is installed."""
    installed = {"torch": torch_version()}
    for name in LOAD_CRITICAL:
        made, here = recorded.get(name, _UNKNOWN), installed[name]
        if made != here:
            raise BundleError(
                f"{where} was compiled with {name} {made} and {here} is installed; "
                f"install {name} {made} or compile the model again"
            )
