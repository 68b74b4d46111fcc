"""The executor: how many workers there are and how to reach them. The engine core sees nothing else of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from treadle.runtime.config import EngineConfig
from treadle.runtime.runner.kv_cache import CachePlan
from treadle.runtime.runner.model import ModelSpec
from treadle.runtime.runner_output import RunnerOutput
from treadle.runtime.scheduler.output import SchedulerOutput
from treadle.runtime.structured.mask import GrammarMask


@dataclass(frozen=True, kw_only=True)
class WorkerInfo:
    """What the workers ended up with once they loaded the model and took memory for the cache."""

    spec: ModelSpec
    plan: CachePlan
    max_num_batched_tokens: int
    num_threads: int
    attention_backends: list[str]
    capture_support: str
    notes: dict[str, str] = field(default_factory=dict)
    """What was passed over or lowered, with the reason."""


class Executor(ABC):
    """Made from the configuration; `start` loads the model. The class flags are a contract with upper layers."""

    uses_ray: ClassVar[bool] = False
    supports_pp: ClassVar[bool] = False
    externally_launched: ClassVar[bool] = False
    """Whether every rank runs a scheduler of its own: what they decide may then not depend on time."""

    def __init__(self, config: EngineConfig):
        self.config = config
        self.sleeping_tags: set[str] = set()
        self._tasks: list[str] | None = None

    @abstractmethod
    def start(self) -> WorkerInfo:
        """Loads the model, sizes and allocates the cache. Raises UserError for what a user can fix."""

    @abstractmethod
    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of every worker; one result each, the first worker's first. Control messages only."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the workers. May be called twice."""

    def execute_model(self, step: SchedulerOutput) -> None:
        """Launches the forward of a step; its state stays with the workers until `sample_tokens`."""
        self.collective_rpc("execute_model", step)

    def sample_tokens(self, mask: GrammarMask | None = None) -> RunnerOutput:
        """The first worker's result of the launched step; `mask` says what its constrained requests may sample."""
        return self.collective_rpc("sample_tokens", mask)[0]

    @property
    def supported_tasks(self) -> list[str]:
        """What the model can be asked for, such as "generate"; asked of the workers once."""
        tasks = self._tasks
        if tasks is None:
            tasks = self._tasks = list(self.collective_rpc("supported_tasks")[0])
        return tasks

    def check_health(self) -> None:
        """Raises EngineDeadError if a worker does not answer."""
        self.collective_rpc("supported_tasks")
