"""From a Relax module to a shared library for a target: legalise, fuse, arrange loops, generate machine code, link.

Runs in the worker only.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import tvm
from tvm import relax, tirx
from tvm.relax import transform

from treadle.codegen.tvm_runtime import ENTRY, VERSIONS
from treadle.codegen.tvm_schedule import arrange
from treadle.ir.errors import ArtifactError


def build_library(
    module: Any, target: Mapping[str, Any], compiler: str, flags: Sequence[str], folder: Path, out: Path
) -> None:
    """Writes the shared library. `target` is a TVM target as a dict; `compiler` only links; `folder` is for what lies
    between. Raises ArtifactError.
    """
    made_for = tvm.target.Target(dict(target))
    with made_for:
        for step in _fusion():
            module = step(module)
        module = _arranged(module)
        module = load_any_alignment(module)
    executable = relax.build(module, target=made_for)
    executable.export_library(str(out), fcompile=_linker(compiler, flags), workspace_dir=str(folder))


def _fusion() -> list[Any]:
    return [
        transform.LegalizeOps(),
        transform.AnnotateTIROpPattern(),
        transform.FoldConstant(),
        transform.FuseOps(),
        transform.FuseTIR(),
        transform.DeadCodeElimination([ENTRY, VERSIONS]),
    ]


def _arranged(module: Any) -> Any:
    for name, function in list(module.functions.items()):
        if isinstance(function, tirx.PrimFunc):
            module.update_func(name, arrange(function))
    return module


def load_any_alignment(module: Any) -> Any:
    """The module with buffers that may start at any multiple of their element's size.

    TVM's code takes 64 bytes for granted and dies of a weight that is mapped elsewhere. A buffer's alignment can be
    changed nowhere in Python, only in the written form of the module.
    """
    text = json.loads(tvm.ir.save_json(module))
    nodes = text["nodes"]
    for node in nodes:
        if node["type"] == "tirx.BufferType":
            dtype = nodes[node["data"]["dtype"]]["data"]["dtype"]
            node["data"]["data_alignment"] = item_size(dtype)
    return tvm.ir.load_json(json.dumps(text))


def item_size(dtype: str) -> int:
    """Bytes of one element."""
    return 2 if dtype == "bfloat16" else numpy.dtype(dtype).itemsize


def _linker(compiler: str, flags: Sequence[str]) -> Any:
    def link(output: str, objects: Sequence[str], **_: Any) -> None:
        names = [os.path.basename(name) for name in objects]
        folders = {os.path.dirname(name) for name in objects}
        assert len(folders) == 1, f"objects in several folders: {folders}"
        command = [compiler, "-shared", "-o", os.path.abspath(output), *names, *flags]
        done = subprocess.run(command, cwd=folders.pop(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise ArtifactError(f"linking failed: {done.stderr.strip()[:800]}")

    link.output_format = "so"  # type: ignore[attr-defined]
    return link
