"""Where the artifact store is when nobody says: the XDG cache folder, or a private temporary one. Imports no torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def default_store_root(environment: Mapping[str, str]) -> Path:
    """`$TREADLE_STORE`, else `$XDG_CACHE_HOME/treadle/store`, else `~/.cache/treadle/store`, else (no home that can be
    written to) a folder of this user under the system's temporary one. The place enters no key.
    """
    if environment.get("TREADLE_STORE"):
        return Path(environment["TREADLE_STORE"])
    if environment.get("XDG_CACHE_HOME"):
        return Path(environment["XDG_CACHE_HOME"]) / "treadle" / "store"
    home = environment.get("HOME")
    if home and _can_hold(Path(home) / ".cache" / "treadle"):
        return Path(home) / ".cache" / "treadle" / "store"
    return Path(tempfile.gettempdir()) / f"treadle-{os.getuid()}" / "store"


def _can_hold(folder: Path) -> bool:
    """Whether `folder` exists or could be made, judged by its nearest existing parent."""
    while not folder.exists():
        if folder == folder.parent:
            return False
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
