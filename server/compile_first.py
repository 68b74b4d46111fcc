"""Compiles a model that is asked to be served, in a process of its own: compiling needs torch, serving does not."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from treadle.ir.errors import ArtifactError
from treadle.server.environment import store_root


def compile_first(model: str, level: int | None = None) -> str:
    """Returns the folder of a bundle made from `model` now at `level` (None: the default), beside the store, named after its path. Raises ArtifactError if that fails.

    What the store already holds is not compiled again. The compile prints its own progress and reasons.
    """
    place = Path(model).expanduser().resolve()
    name = f"{place.name.removesuffix('.gguf')}-{hashlib.sha256(str(place).encode()).hexdigest()[:8]}.bundle"
    folder = store_root().parent / "bundles" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "treadle.server.cli", "compile", model, "--output", str(folder), "--force"]
    command += [] if level is None else ["-O", str(level)]
    code = subprocess.run(command, check=False).returncode
    if code != 0:
        raise ArtifactError(f"{model} was not compiled (exit code {code}, reason above), so there is nothing to serve")
    return str(folder)
