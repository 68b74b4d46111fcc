"""The seam between codegen and its backends: what each says of itself, and that none is known by name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import treadle
from treadle.codegen.backends import BACKENDS, Backend, make_backend
from treadle.codegen.loader import FORMATS
from treadle.codegen.target import resolve_target
from treadle.ir.errors import ConfigError

ROOMS = ("ir", "passes", "kernels", "codegen", "runtime", "server")
TABLES = {"codegen/backends.py", "codegen/loader.py"}


def test_an_unknown_backend_is_refused_with_the_choices(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown codegen backend 'tmv'; choose one of: .*tvm"):
        make_backend("tmv", resolve_target("cpu"), tmp_path, 1)


@pytest.mark.parametrize("name", BACKENDS.names())
def test_every_backend_says_what_the_seam_asks(name: str, tmp_path: Path) -> None:
    """Parity over the table; a backend whose package is missing says which extra brings it."""
    try:
        made: Backend = make_backend(name, resolve_target("cpu"), tmp_path, 1)
    except ConfigError as error:
        assert f"treadle[{name}]" in str(error)
        pytest.skip(str(error))
    assert made.name == name and made.format in FORMATS and made.suffix.startswith(".")
    assert isinstance(made.needs_compiler, bool) and made.options() == made.options()
    made.close()


@pytest.mark.parametrize("name", BACKENDS.names())
def test_no_backend_is_known_by_name_outside_its_files(name: str) -> None:
    """Choice goes through the table: no string in the code is the name of a backend."""
    own = re.compile(rf"codegen/(backend_)?{name}(_\w+)?\.py")
    root = Path(treadle.__file__).parent.parent
    found = []
    for path in (path for room in ROOMS for path in sorted((root / room).rglob("*.py"))):
        place = path.relative_to(root).as_posix()
        if place in TABLES or own.fullmatch(place):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value == name:
                found.append(f"{place}:{node.lineno}")
    assert not found, f"{name!r} stands in {', '.join(found)}"
