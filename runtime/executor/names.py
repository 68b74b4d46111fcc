"""How an executor is written down for another process. Imports no torch."""

from __future__ import annotations

from typing import Any


def executor_name(asked: Any) -> str:
    """The text that selects the same executor in another process."""
    return asked if isinstance(asked, str) else f"{asked.__module__}:{asked.__qualname__}"
