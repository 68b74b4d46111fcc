"""The one place where compute threads are set. Imports torch only when it applies the setting.

Waiting OpenMP threads sleep instead of spinning: the engine core shares its processors with the front end, and
spinning there costs both of them more than the wake-up does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping


def default_num_threads() -> int:
    """The processors this process may use."""
    return len(os.sched_getaffinity(0))


def thread_environment(num_threads: int) -> Mapping[str, str]:
    """Variables that a child needs before it loads torch; OpenMP reads them once."""
    return {"OMP_NUM_THREADS": str(num_threads), "OMP_WAIT_POLICY": "PASSIVE"}


def apply_threads(num_threads: int | None) -> int:
    """Sets torch's threads for this process (default: all processors) and returns their number."""
    import torch

    count = num_threads or default_num_threads()
    torch.set_num_threads(count)
    return count
