"""Where the time of a start goes: each part of it says in the log when it has ended. Imports no torch."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger(__name__)


def phase_ended(phase: str) -> None:
    """Logs, at level DEBUG, the end of a phase with the seconds since the epoch, which all processes share."""
    logger.debug("start phase %r ended at %.6f", phase, time.time())
