"""The one place where compute threads are set. Imports torch only when it applies the setting.

Waiting OpenMP threads spin for a moment, then sleep: within a step the next loop comes after some microseconds, and a wake-up
costs fifty; but the engine core shares its processors with the front end, and long spinning there costs both of them more.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping

logger = logging.getLogger(__name__)


_WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000"}
"""2000 rounds are about a tenth of a millisecond; GNU's OpenMP, which torch brings, would make it 0 with this policy."""


def default_num_threads() -> int:
    """The processors this process may use."""
    return len(os.sched_getaffinity(0))


def thread_environment(num_threads: int) -> Mapping[str, str]:
    """Variables that a child needs before it loads torch; OpenMP reads them once."""
    return {"OMP_NUM_THREADS": str(num_threads), **_WAITING}


def wait_passively() -> None:
    """Makes this process's OpenMP threads sleep while they wait long, if torch is not loaded yet; a user's choice wins.

    On a busy machine spinning threads take the processors from the ones that work: a step can take thirty times as long.
    """
    if "torch" not in sys.modules:
        for name, value in _WAITING.items():
            os.environ.setdefault(name, value)
    elif "OMP_WAIT_POLICY" not in os.environ:
        logger.info("torch was loaded before the engine, so OpenMP threads spin; set OMP_WAIT_POLICY=PASSIVE to avoid it")


def apply_threads(num_threads: int | None) -> int:
    """Sets torch's threads for this process (default: all processors) and returns their number."""
    import torch

    count = num_threads or default_num_threads()
    torch.set_num_threads(count)
    return count
