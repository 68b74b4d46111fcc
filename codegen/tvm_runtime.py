"""Loads and runs libraries that the TVM backend made: TVM's runtime alone, and the products they call out to.

Neither TVM's compiler nor its Python package is imported: the interface layer (tvm_ffi) and one library suffice.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.ir.errors import ArtifactError, ConfigError

if TYPE_CHECKING:
    import torch

ENTRY = "piece"
VERSIONS = "versions"
LIBRARY_PREFIX = "treadle.library."
_PACKAGES = ("apache-tvm", "apache-tvm-ffi")
_CPU, _INDEX, _UNPOOLED = 1, 0, 1
"""Device type and index, and an allocator that keeps nothing: its pools grow with every token count there ever was."""


def installed_versions() -> str:
    """TVM and its interface layer with versions. Raises ConfigError that names the extra where they are missing."""
    try:
        return ", ".join(f"{package} {version(package)}" for package in _PACKAGES)
    except PackageNotFoundError as error:
        raise ConfigError(
            f"backend 'tvm' needs the package {error.name}, which is not installed; pip install 'treadle[tvm]'"
        ) from error


def load_tvm(path: Path) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """A shared library that holds a piece. Raises ConfigError without TVM, ArtifactError for one of another version."""
    installed = installed_versions()
    ffi = _runtime()
    try:
        library = ffi.get_global_func("ffi.Module.load_from_file.so")(_name_of_its_own(path), "so")
        machine = library["vm_load_executable"]()
        machine["vm_initialization"](_CPU, _INDEX, _UNPOOLED)
        made_with = str(machine[VERSIONS]())
    except (RuntimeError, AttributeError, ValueError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise ArtifactError(f"TVM cannot load {path.name}: {reason}; compile the bundle again") from error
    if made_with != installed:
        raise ArtifactError(
            f"{path.name} was made with {made_with}, and {installed} is installed; install what made it, "
            "or compile the bundle again"
        )
    run = machine[ENTRY]

    def call(arguments: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return [_as_torch(result) for result in run(*arguments)]

    return call


def _name_of_its_own(path: Path) -> str:
    """Another name for a copy of the file. The loader of the system takes files of one name for one library, also after
    a bundle was replaced; the descriptor stays open, so that the name is given out only once.
    """
    descriptor = os.memfd_create(path.name)
    with open(descriptor, "wb", closefd=False) as copy:
        copy.write(path.read_bytes())
    return f"/proc/self/fd/{descriptor}"


@cache
def _runtime() -> Any:
    """The interface layer, with TVM's runtime loaded and our products registered."""
    # Otherwise a torch that lacks the exchange of tensors makes the import start a C++ compiler.
    os.environ["TVM_FFI_DISABLE_TORCH_C_DLPACK"] = "1"
    import tvm_ffi

    spec = find_spec("tvm")
    assert spec is not None and spec.submodule_search_locations, "its version was found"
    ctypes.CDLL(
        str(Path(spec.submodule_search_locations[0]) / "lib" / "libtvm_runtime.so"), ctypes.RTLD_GLOBAL
    )
    for name, function in LIBRARY.items():
        tvm_ffi.register_global_func(LIBRARY_PREFIX + name, function)
    return tvm_ffi


def _linear(x: Any, weight: Any, *rest: Any) -> None:
    """`out = x @ weight.T + bias`: x [..., K], weight [N, K], then bias [N] if there is one, then out [..., N]."""
    import torch

    *bias, out = map(_as_torch, rest)
    rows, columns = _rows(_as_torch(x)), _as_torch(weight).t()
    if bias:
        torch.addmm(bias[0], rows, columns, out=_rows(out))
    else:
        torch.mm(rows, columns, out=_rows(out))


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 2 else tensor.flatten(0, -2)


def _as_torch(tensor: Any) -> torch.Tensor:
    """The same memory as torch's tensor. `torch.from_dlpack` takes three times as long: it negotiates."""
    from torch.utils.dlpack import from_dlpack

    return from_dlpack(tensor.__dlpack__())


LIBRARY: dict[str, Callable[..., None]] = {"linear": _linear}
"""Op -> packed function over its operands and the result's memory. Generated code calls them by name."""
