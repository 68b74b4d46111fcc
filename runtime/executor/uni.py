"""The executor with one worker in the same process, called directly."""

from __future__ import annotations

from typing import Any

from treadle.runtime.config import EngineConfig
from treadle.runtime.executor.interface import Executor, WorkerInfo
from treadle.runtime.executor.worker import Worker
from treadle.runtime.runner.model import LoadedModel


class UniExecutor(Executor):
    """A subclass may bring its own model by overriding `load_model`."""

    def __init__(self, config: EngineConfig):
        super().__init__(config)
        self._worker: Worker | None = Worker(config, self.load_model)

    def load_model(self, config: EngineConfig) -> LoadedModel:
        """The model of the configuration's bundle."""
        from treadle.runtime.runner.load_bundle import load_bundle

        return load_bundle(config)

    def start(self) -> WorkerInfo:
        assert self._worker is not None, "the executor was shut down"
        return self._worker.start()

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        assert self._worker is not None, "the executor was shut down"
        return [getattr(self._worker, method)(*args)]

    def shutdown(self) -> None:
        self._worker = None
