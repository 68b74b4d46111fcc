"""A Python environment of its own whose only packages are those a test installs; dependencies come from this one."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_OFFLINE = ("--no-deps", "--no-index", "--no-build-isolation", "--quiet")


@dataclass(frozen=True)
class FreshEnvironment:
    """`python` is the environment's own; commands run in `folder`."""

    python: Path
    folder: Path

    @staticmethod
    def make(folder: Path) -> FreshEnvironment:
        """A new environment in `folder/env`, without pip: packages are installed from outside, see `pip`."""
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
        (site,) = (folder / "env" / "lib").glob("python*/site-packages")
        (site / "around.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        return FreshEnvironment(folder / "env" / "bin" / "python", folder)

    def pip(self, *arguments: str) -> list[str]:
        """The command that runs pip on this environment; `install` and `wheel` work without a network."""
        return [sys.executable, "-m", "pip", "--python", str(self.python), arguments[0], *_OFFLINE, *arguments[1:]]

    def run(self, command: list[str], *, cwd: Path | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Runs a command; asserts that it succeeded unless `check` is off."""
        done = subprocess.run(command, cwd=cwd or self.folder, env=self.variables(), capture_output=True, text=True)
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        return done

    def variables(self) -> dict[str, str]:
        """The environment variables that commands get."""
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TREADLE_STORE": str(self.folder / "store")}
        return {**os.environ, **own}
