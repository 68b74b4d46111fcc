"""A small Llama compiled op by op, without native kernels: enough for commands that look at a bundle and never serve it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import save_model
from treadle.codegen import compile as compile_module


def compile_tiny(folder: Path, name: str = "tiny.bundle") -> Path:
    """A bundle of three layers for 1 to 64 tokens, all passes run, pieces as IR text."""
    save_model("llama", folder / "tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_module, "compile_natives", lambda *given, **named: {})
        return compile_module.compile(
            folder / "tiny", folder / name, store=folder / "store", level=1, backend="eager", max_num_batched_tokens=64
        )
