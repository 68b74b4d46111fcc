"""The documentation says what the code says: generated pages are current, links resolve, commands and imports exist."""

from __future__ import annotations

import ast
import re
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from docs.generate import FOLDER, PAGES, commands, render

ROOT = Path(__file__).parent.parent
PAGE_FILES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
RUN_WHOLE = ("add-a-pass.md", "add-an-attention-backend.md")
"""Pages whose Python blocks run as they stand."""

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(treadle [a-z][^`]*)`")


def name_of(page: Path) -> str:
    """The page's path in the repository, as the test's id."""
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    """The contents of the page's fenced blocks of a language."""
    return [body for kind, body in _FENCE.findall(page.read_text()) if kind == language]


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_are_current(name: str) -> None:
    """C14-12: the reference is made from the code; run `python -m docs.generate` after a change."""
    assert (FOLDER / name).read_text() == render(name), f"{name} is stale: run python -m docs.generate"


@pytest.mark.parametrize("page", PAGE_FILES, ids=name_of)
def test_links_resolve(page: Path) -> None:
    """Relative links lead to files, and fragments to headings."""
    for target in _LINK.findall(_FENCE.sub("", page.read_text())):
        if "://" in target:
            continue
        path, _, fragment = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target} leads nowhere"
        assert not fragment or fragment in _anchors(file), f"{target} names no heading"


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_reachable_from_the_index() -> None:
    """No page is orphaned."""
    seen, todo = set(), [ROOT / "docs" / "index.md"]
    while todo:
        page = todo.pop()
        if page in seen:
            continue
        seen.add(page)
        links = (target.partition("#")[0] for target in _LINK.findall(page.read_text()) if "://" not in target)
        todo += [file for file in ((page.parent / link).resolve() for link in links if link.endswith(".md")) if file.exists()]
    assert set((ROOT / "docs").rglob("*.md")) <= seen


def command_lines(page: Path) -> list[str]:
    """Every `treadle ...` line that the page shows or names."""
    lines = [line[2:] for body in blocks(page, "console") for line in body.splitlines() if line.startswith("$ ")]
    shown = [line[line.index("treadle ") :] for line in lines if "treadle " in line and not line.startswith("curl")]
    return shown + _INLINE.findall(_FENCE.sub("", page.read_text()))


def known_flags() -> dict[str, set[str]]:
    """Command -> its flags."""
    return {name: {flag for item in command.params for flag in _flags(item)} for name, command in commands()}


def _flags(item: Any) -> list[str]:
    return [*item.opts, *item.secondary_opts] if item.param_type_name == "option" else []


def problem_of(line: str, flags: dict[str, set[str]]) -> str | None:
    """What is wrong with a command line, or None."""
    words = shlex.split(line)[1:]
    if words and words[0].startswith("-"):
        return None
    name = next((name for name in (" ".join(words[:2]), words[0]) if name in flags), None)
    if name is None:
        groups = {known.split()[0] for known in flags}
        return None if len(words) == 1 and words[0] in groups else f"no command {' '.join(words[:2])!r}"
    for word in words:
        if word.startswith("-") and word.partition("=")[0] not in flags[name] | {"--help"}:
            return f"{name} has no {word}"
    return None


@pytest.mark.parametrize("page", PAGE_FILES, ids=name_of)
def test_commands_exist(page: Path) -> None:
    """Each command and flag that a page names is the program's."""
    flags = known_flags()
    problems = [f"{line}: {problem}" for line in command_lines(page) if (problem := problem_of(line, flags))]
    assert not problems


def test_a_wrong_command_is_found() -> None:
    """The check above can fail."""
    flags = known_flags()
    assert problem_of("treadle serve b --block-size 16", flags) is None
    assert problem_of("treadle serve b --blok-size 16", flags) == "serve has no --blok-size"
    assert problem_of("treadle cache explode b", flags) == "no command 'cache explode'"


@pytest.mark.parametrize("page", [page for page in PAGE_FILES if blocks(page, "python")], ids=name_of)
def test_python_blocks_import_what_exists(page: Path) -> None:
    """Python on a page parses, and what it imports from treadle is there."""
    for body in blocks(page, "python"):
        _check_imports(ast.parse(body))


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_examples_import_what_exists(example: Path) -> None:
    """The same for the examples."""
    _check_imports(ast.parse(example.read_text()))


def _check_imports(tree: ast.AST) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "treadle":
            module = import_module(str(node.module))
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "treadle":
                    import_module(alias.name)


@pytest.mark.parametrize("name", RUN_WHOLE)
def test_recipes_run_as_they_stand(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of a recipe, put into one module in the order of the page, runs and its assertions hold."""
    monkeypatch.syspath_prepend(str(tmp_path))
    source = "\n".join(body.replace("from __future__ import annotations\n", "") for body in blocks(ROOT / "docs/how-to" / name, "python"))
    module = "recipe_" + name.removesuffix(".md").replace("-", "_")
    (tmp_path / f"{module}.py").write_text("from __future__ import annotations\n" + source)
    import_module(module)
