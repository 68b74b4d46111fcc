"""Quiet transformers, and one folder with a Llama model that tests may read but not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ir.families import save_model


@pytest.fixture(scope="session", autouse=True)
def quiet_transformers() -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, save_model("llama", folder)
