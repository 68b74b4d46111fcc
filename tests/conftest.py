"""What every room's tests share: compiles in one test process use one warm code generator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from treadle.codegen import compile as compile_module
from treadle.codegen.backends import Backend, make_backend


class SharedBackend:
    """A real backend that outlives the compile it was made for: its worker and precompiled headers are paid for once."""

    def __init__(self, made: Backend):
        self._made = made
        self._started = False

    def start(self) -> None:
        if not self._started:
            self._started = True
            self._made.start()

    def close(self) -> None:
        """The next compile goes on with it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)


@pytest.fixture(scope="session", autouse=True)
def warm_compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps backends between compiles of this process. Compiles in processes of their own start cold as ever."""
    shared: dict[Any, SharedBackend] = {}

    def make(name: str, target: Any, scratch: Path, jobs: int, compiler: str | None = None) -> Any:
        if compiler is not None:
            return make_backend(name, target, scratch, jobs, compiler)
        key = (name, target, jobs)
        if key not in shared:
            shared[key] = SharedBackend(make_backend(name, target, tmp_path_factory.mktemp("compiler"), jobs))
        shared[key].start()
        return shared[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_module, "make_backend", make)
        yield
    for backend in shared.values():
        backend._made.close()
