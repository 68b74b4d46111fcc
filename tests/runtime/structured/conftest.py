"""Both backends over the tiny tokenizer, and an engine on the toy model with its vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from tests.runtime.toy_model import TextToyExecutor, toy_config
from tests.server.tiny_tokenizer import write_tokenizer
from treadle.runtime.engine import core as core_module
from treadle.runtime.engine.llm import LLM
from treadle.runtime.renderer import Renderer
from treadle.runtime.structured.backends import STRUCTURED_BACKENDS
from treadle.runtime.structured.interface import Backend, BackendOptions
from treadle.runtime.structured.vocabulary import Vocabulary

BACKENDS = ("xgrammar", "llguidance")
_CLASSES = {name: STRUCTURED_BACKENDS.get(name) for name in BACKENDS}
TIMEOUT = 3.0


@cache
def tiny_renderer() -> Renderer:
    return Renderer.load(write_tokenizer(Path(mkdtemp()) / "tokenizer"))


@cache
def tiny_vocabulary() -> Vocabulary:
    return Vocabulary.of(tiny_renderer(), TextToyExecutor.vocab)


@cache
def made_backend(name: str) -> Backend:
    """One for the whole run of a test process: making xgrammar's takes seconds."""
    return _CLASSES[name](tiny_vocabulary(), BackendOptions(timeout=TIMEOUT, jobs=1, max_whitespace=2))


@pytest.fixture(params=BACKENDS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def backend(name: str) -> Backend:
    return made_backend(name)


MakeLLM = Callable[..., LLM]


@pytest.fixture
def make_llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeLLM]:
    """Makes engines on the toy model. The shared backends are used, and outlive the engine."""
    monkeypatch.setattr(core_module, "_vocabulary", lambda *_: tiny_vocabulary())
    for backend in BACKENDS:
        monkeypatch.setitem(STRUCTURED_BACKENDS._loaded, backend, _Shared(backend))
    made = []

    def make(**changes: Any) -> LLM:
        llm = LLM.from_config(toy_config(TextToyExecutor, **changes), tiny_renderer())
        made.append(llm)
        return llm

    yield make
    for llm in made:
        llm.shutdown()


class _Shared:
    """Stands in the table for a backend: gives out the one of the run."""

    def __init__(self, name: str):
        self.package = name
        self._name = name

    def __call__(self, *_: Any) -> Any:
        return _KeptOpen(made_backend(self._name))


class _KeptOpen:
    def __init__(self, backend: Backend):
        self.unsupported_reason = backend.unsupported_reason
        self.compile = backend.compile

    def close(self) -> None:
        """The run goes on with it."""
