"""What the server reads from environment variables. Secrets are taken out of the environment when read, so that no
child process inherits them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from treadle.codegen.store_location import default_store_root

API_KEY, LOG_LEVEL = "TREADLE_API_KEY", "TREADLE_LOG_LEVEL"


def take_api_keys() -> tuple[str, ...]:
    """Returns the keys in TREADLE_API_KEY, separated by commas or spaces, and removes the variable."""
    return tuple(key for key in re.split(r"[,\s]+", os.environ.pop(API_KEY, "")) if key)


def store_root() -> Path:
    """Returns the folder of the artifact store, which TREADLE_STORE or the user's cache folder says."""
    return default_store_root(os.environ)


def log_level() -> str:
    """Returns the log level asked for in TREADLE_LOG_LEVEL, else INFO."""
    return os.environ.get(LOG_LEVEL, "INFO").upper()
