"""The tutorial for pass authors does what it says: every file in it is written, every command run, in its order."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fresh_environment import ROOT, FreshEnvironment

PAGE = ROOT / "docs" / "passes" / "tutorial.md"
_BLOCK = re.compile(r"(`([\w.]+)`:\n\n)?^```(python|toml|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def steps(page: str) -> Iterator[tuple[str, str, str]]:
    """(file, kind, text) of each block, in order; a block of code belongs to the file that the line above it names."""
    for _, file, kind, text in _BLOCK.findall(page):
        yield file, kind, text


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each command of a console block, and the words that its output is said to hold, a line each."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, *shown = part.splitlines()
        yield line, [words for words in shown if words.strip()]


def spelled(line: str, environment: FreshEnvironment) -> list[str]:
    """The command for this environment: its own Python, pip from outside and without a network, treadle as a module."""
    program, *arguments = shlex.split(line)
    python = str(environment.python)
    known = {"python": [python], "treadle": [python, "-m", "treadle.server.cli"]}
    return environment.pip(*arguments) if program == "pip" else [*known[program], *arguments]


def test_every_block_is_a_file_or_commands() -> None:
    """No code of the page is left out of the run."""
    page = PAGE.read_text()
    found = list(steps(page))
    assert len(found) == page.count("\n```") // 2
    assert all(file for file, kind, _ in found if kind != "console")


@pytest.mark.slow
def test_the_tutorial_works(tmp_path: Path) -> None:
    """Acceptance 8: following only the page, in a new environment, gives what the page shows."""
    environment = FreshEnvironment.make(tmp_path)
    folder = tmp_path / "work"
    folder.mkdir()
    ran = 0
    for file, kind, text in steps(PAGE.read_text()):
        if kind != "console":
            with open(folder / file, "a") as out:
                out.write(text)
            continue
        for line, shown in commands(text):
            done = environment.run(spelled(line, environment), cwd=folder)
            missing = [words for words in shown if words not in done.stdout]
            assert not missing, f"$ {line}\ndid not say {missing}:\n{done.stdout}{done.stderr}"
            ran += 1
    assert ran == PAGE.read_text().count("\n$ ") > 8
