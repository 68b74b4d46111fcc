"""Every call into torch that torch does not promise to keep, in one place, with the versions it was checked with.

Nothing is imported at the top: loading a package needs only `torch._C`, compiling one needs inductor.
"""

from __future__ import annotations

import ctypes
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from treadle.ir.errors import ArtifactError

CHECKED_VERSIONS: Mapping[str, str] = {
    "2.13": "all of this module, by tests/codegen",
    "2.11": "names read in its source; `cpp.march` does not exist there, the compiler shim drops -march=native instead",
}

MODEL_NAME = "model"
_VECTOR_CLASSES = {"avx2": "VecAVX2", "avx512": "VecAVX512"}


def private(module: str, name: str) -> Any:
    """An attribute of a torch module. Raises ArtifactError that names the torch versions that have it."""
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        import torch

        raise ArtifactError(
            f"torch {torch.__version__} has no {module}.{name}, which treadle needs; "
            f"it was checked with torch {', '.join(CHECKED_VERSIONS)}"
        ) from error


def compile_package(
    program: Any, isa: str, options: Mapping[str, Any], out: Path, *, precompiled_headers: bool
) -> None:
    """Compiles a `torch.export.ExportedProgram` into an AOTInductor package at `out`.

    `options` are inductor settings by dotted name; those that this torch does not have are left out if they are in
    `OPTIONAL_SETTINGS`, and an error otherwise.
    """
    compile_and_package = private("torch._inductor", "aoti_compile_and_package")
    with compiling_for(isa, options, precompiled_headers=precompiled_headers):
        compile_and_package(program, package_path=str(out), inductor_configs={})


def emit_cpp(program: Any, isa: str, options: Mapping[str, Any]) -> None:
    """Goes all the way to C++ text and throws it away: loads and fills what inductor sets up on first use."""
    import tempfile

    only = {**options, "aot_inductor.package_cpp_only": True}
    with tempfile.TemporaryDirectory() as folder:
        compile_package(program, isa, only, Path(folder) / "emitted.pt2", precompiled_headers=False)


OPTIONAL_SETTINGS = frozenset({
    "cpp.march", "aot_inductor.enable_line_tables", "aot_inductor.enable_frame_pointer",
})  # fmt: skip


@contextmanager
def compiling_for(isa: str, options: Mapping[str, Any], *, precompiled_headers: bool) -> Iterator[Any]:
    """Inductor set to `options` and one instruction set, probing nothing; all of it undone at the end (R-9.15).

    Yields the instruction set object.
    """
    config = import_module("torch._inductor.config")
    known = {name: value for name, value in options.items() if name not in OPTIONAL_SETTINGS or _has(config, name)}
    if unknown := sorted(name for name in known if not _has(config, name)):
        raise ArtifactError(f"this torch's inductor has no setting {', '.join(unknown)}")
    vector = vector_isa(isa)
    with ExitStack() as stack:
        headers = {"aot_inductor.precompile_headers": precompiled_headers, "aot_inductor.custom_ops_to_c_shims": _c_shims()}
        stack.enter_context(config.patch({**known, **headers}))
        stack.enter_context(_only_isa(vector))
        yield vector


def _c_shims() -> dict[Any, list[str]]:
    """Torch op -> declaration of the C function that compiled code calls for it: the name is aoti_torch_cpu_ and the op's."""
    import torch

    import treadle.ir.ops.packed  # noqa: F401  (registers the torch op)

    tensor, name = "AtenTensorHandle", "AOTITorchError aoti_torch_cpu"
    return {
        torch.ops.treadle.packed_linear_v1.default: [f"{name}_packed_linear_v1({tensor}, {tensor}, int64_t, {tensor}*)"],
        torch.ops.treadle.packed_int8_linear_v1.default: [
            f"{name}_packed_int8_linear_v1({tensor}, {tensor}, {tensor}, int64_t, {tensor}*)"
        ],
    }


def vector_isa(isa: str) -> Any:
    """Inductor's description of a vector instruction set, which says yes without building a probe."""
    if isa not in _VECTOR_CLASSES:
        return private("torch._inductor.cpu_vec_isa", "invalid_vec_isa")
    base = private("torch._inductor.cpu_vec_isa", _VECTOR_CLASSES[isa])
    fixed = type(f"Fixed{base.__name__}", (base,), {"__bool__": lambda self: True, "__hash__": base.__hash__})
    return fixed()


@contextmanager
def _only_isa(vector: Any) -> Iterator[None]:
    """`pick_vec_isa` chooses from this list; the original asks the local CPU and test-compiles."""
    module = import_module("torch._inductor.cpu_vec_isa")
    original = private("torch._inductor.cpu_vec_isa", "valid_vec_isa_list")
    module.valid_vec_isa_list = lambda: [vector] if vector else []  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.valid_vec_isa_list = original  # type: ignore[attr-defined]


def precompile_header(which: str, isa: str, options: Mapping[str, Any]) -> None:
    """Builds the precompiled header of wrappers or kernels now, so that the first piece finds it.

    `which` is "wrapper" or "kernel". The arguments are those that AotCodeCompiler uses; if another torch uses others,
    it builds its own header and nothing else changes.
    """
    builder = private("torch._inductor.cpp_builder", "CppBuilder")
    device_options = private("torch._inductor.cpp_builder", "CppTorchDeviceOptions")
    build = private("torch._inductor.codecache", "_precompile_header")
    with compiling_for(isa, options, precompiled_headers=True) as vector:
        probe = device_options(vec_isa=vector, device_type="cpu", aot_mode=True)
        command = repr(builder(name="o", sources="i", BuildOption=probe).get_command_line())
        arguments: dict[str, Any] = {
            "aot_mode": True,
            "device_type": "cpu",
            "use_mmap_weights": False,
            "use_mmap_weights_external": False,
            "use_relative_path": False,
            "vec_isa": vector,
        }
        if which == "wrapper":
            header = private("torch._inductor.codecache", "_get_cpp_wrapper_header")("cpu", aot_mode=True)
            build(header, command, min_optimize=True, **arguments)
        else:
            header = private("torch._inductor.codecache", "_get_cpp_prefix_header")("cpu")
            build(header, command, **arguments)


def load_package(path: Path) -> Any:
    """The loader of a package; `boxed_run(list)` runs it. Does not import inductor.

    Raises ArtifactError if the file cannot be loaded.
    """
    loader = private("torch._C._aoti", "AOTIModelPackageLoader")
    try:
        return loader(str(path), MODEL_NAME, False, 1, -1)
    except RuntimeError as error:
        first = str(error).splitlines()[0] if str(error) else "no reason given"
        raise ArtifactError(f"torch cannot load {path.name}: {first}; compile the bundle again") from error


def boxed_run(loader: Any, inputs: list[Any]) -> Sequence[Any]:
    """Runs a loaded package; the list of inputs is emptied."""
    return loader.boxed_run(inputs)


@dataclass(frozen=True)
class NativePiece:
    """A piece as C sees it: `run(container, inputs, ...)` as AOTInductorModelContainerRunSingleThreaded. Closed with the object."""

    container: int
    run: int
    close: Callable[[], object]

    def __del__(self) -> None:
        self.close()


def open_native(path: Path) -> NativePiece:
    """The shared library inside a package, opened beside torch's loader. Raises ArtifactError if C alone cannot run it."""
    with zipfile.ZipFile(path) as package:
        names = [name for name in package.namelist() if f"/aotinductor/{MODEL_NAME}/" in name]
        if any(name.endswith(".json") and not name.endswith("_metadata.json") for name in names):
            raise ArtifactError(f"{path.name} calls ops through torch's dispatcher")
        code = package.read(next(name for name in names if name.endswith(".so")))
    with tempfile.NamedTemporaryFile(prefix="treadle-piece-", suffix=".so") as file:
        file.write(code)
        file.flush()
        library = ctypes.CDLL(file.name)
    container = ctypes.c_void_p()
    if library.AOTInductorModelContainerCreateWithDevice(ctypes.byref(container), ctypes.c_size_t(1), b"cpu", None):
        raise ArtifactError(f"torch cannot make a container of {path.name}; compile the bundle again")
    run = ctypes.cast(library.AOTInductorModelContainerRunSingleThreaded, ctypes.c_void_p).value
    assert container.value and run
    return NativePiece(container.value, run, lambda: library.AOTInductorModelContainerDelete(container))


def shim_address(name: str) -> int:
    """The address of a function of torch's C shim. Raises ArtifactError if this torch has it not."""
    import torch

    shim = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    try:
        address = ctypes.cast(shim[name], ctypes.c_void_p).value
    except AttributeError as error:
        raise ArtifactError(f"torch {torch.__version__} has no {name}, which launch plans need") from error
    assert address
    return address


def tensor_handle(tensor: Any) -> int:
    """A new handle of a tensor for torch's C shim; whoever gets it deletes it or passes it on."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.argtypes, get.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
    return get(private("torch._C._aoti", "unsafe_alloc_void_ptr_from_tensor")(tensor), None)


def take_tensor(handle: int) -> Any:
    """The tensor of a handle, which is taken over."""
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.argtypes, capsule.restype = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p], ctypes.py_object
    return private("torch._C._aoti", "alloc_tensor_by_stealing_from_void_ptr")(capsule(handle, None, None))


def _has(config: Any, dotted: str) -> bool:
    at = config
    for part in dotted.split("."):
        if not hasattr(at, part):
            return False
        at = getattr(at, part)
    return True
