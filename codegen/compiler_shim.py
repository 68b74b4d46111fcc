"""A small script that calls the C++ compiler for inductor: code for the stated target only, no path of this machine in it."""

from __future__ import annotations

import shlex
import sysconfig
from pathlib import Path

_SCRIPT = """#!/bin/sh
# Drops -march=native (the target says what may be used) and keeps folder names out of the code.
count=$#
while [ "$count" -gt 0 ]; do
  argument=$1
  shift
  count=$((count - 1))
  [ "$argument" = "-march=native" ] || set -- "$@" "$argument"
done
exec {compiler} "$@" {flags}
"""


def write_shim(folder: Path, compiler: str, scratch: Path) -> Path:
    """Writes `folder`/g++ which calls `compiler`; the paths of `scratch` and of installed packages are mapped away."""
    folder.mkdir(parents=True, exist_ok=True)
    maps = {str(scratch): "build", sysconfig.get_path("purelib"): "site", sysconfig.get_path("include"): "include"}
    flags = " ".join(shlex.quote(f"-ffile-prefix-map={path}={name}") for path, name in maps.items())
    shim = folder / "g++"
    shim.write_text(_SCRIPT.format(compiler=shlex.quote(compiler), flags=flags))
    shim.chmod(0o755)
    return shim
