"""Fixtures of the end-to-end tests: one bundle of the real model, and the reference implementation of it."""

from __future__ import annotations

import fcntl
import os
import random
from pathlib import Path

import pytest
import torch

import treadle
from tests.e2e.reference import Reference

WORDS = (
    "the river house garden machine winter letter bridge small bright answer question history music water mountain "
    "teacher window station language kitchen number simple people morning engine paper green city story light"
).split()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run that all test processes see."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def store(shared: Path) -> Path:
    return shared / "store"


@pytest.fixture(scope="session")
def bundle(store: Path, shared: Path) -> Path:
    """SmolLM2-135M-Instruct in float32, compiled once for the whole run."""
    output = shared / "smollm2.bundle"
    with open(shared / "bundle.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not output.exists():
            treadle.compile("smollm2", output=output, store=store, dtype="float32")
    return output


@pytest.fixture(scope="session")
def reference() -> Reference:
    """The same model in transformers, float32."""
    return Reference.smollm2()


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """32 prompts from 3 to about 250 words, the same in every run."""
    rng = random.Random(7)
    lengths = [3, 5, 8, 12, 20, 33, 60, 100] * 3 + [150, 180, 200, 220, 230, 240, 245, 250]
    return [" ".join(rng.choice(WORDS) for _ in range(length)).capitalize() + "." for length in lengths]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
