"""What this process has compiled and loaded. After ready, `compilations` must not move; a test and a metric watch it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass
class Counters:
    """Totals that only grow: artifacts built, found in the store, loaded."""

    compilations: int = 0
    store_hits: int = 0
    loads: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, name: str, number: int = 1) -> None:
        with self._lock:
            setattr(self, name, getattr(self, name) + number)


COUNTERS = Counters()
