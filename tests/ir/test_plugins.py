"""What other packages add: found by entry points, loaded when used, told apart, hashed, and named when they fail."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from treadle.ir import plugins as plugins_module
from treadle.ir.errors import ConfigError, PluginError, VerifyError
from treadle.ir.ops import registry as ops_registry
from treadle.ir.plugins import GROUPS, hash_of_module, package_of, plugins
from treadle.ir.registry import Registry

Install = Callable[..., Path]


def _forget() -> None:
    for cached in (plugins_module.plugins, plugins_module.hash_of_module, plugins_module.package_of):
        cached.cache_clear()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a distribution of one module with entry points `group: {name: target}`, for one test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(ops_registry, "_DIALECT", dict(ops_registry.dialect()))

    def make(name: str, module: str, text: str, *, version: str = "1.0", **groups: dict[str, str]) -> Path:
        (tmp_path / f"{module}.py").write_text(text)
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        sections = []
        for group, rows in groups.items():
            points = "\n".join(f"{key} = {target}" for key, target in rows.items())
            sections.append(f"[treadle.{group}]\n{points}\n")
        (info / "entry_points.txt").write_text("\n".join(sections))
        _forget()
        return tmp_path / f"{module}.py"

    yield make
    _forget()
    ops_registry.get_op.cache_clear()
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def _table() -> Registry:
    return Registry("pass", {"ours": "treadle.ir.types:T"}, group="treadle.passes")


def test_a_plugin_is_found_and_not_imported_before_it_is_used(install: Install) -> None:
    """C13-01: listing names imports nothing; getting one imports its module."""
    install("some-passes", "some_passes", "THING = 7", passes={"theirs": "some_passes:THING"})
    table = _table()
    assert table.names() == ["ours", "theirs"] and "theirs" in table and "some_passes" not in sys.modules
    assert table.get("theirs") == 7
    plugin = table.plugin("theirs")
    assert plugin is not None and (plugin.distribution, plugin.version) == ("some-passes", "1.0")
    assert table.plugin("ours") is None


def test_what_is_ours_is_got_without_looking_for_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that uses no plugin does not search the installed packages."""
    monkeypatch.setattr(plugins_module, "entry_points", lambda **_: pytest.fail("looked for entry points"))
    _forget()
    _table().get("ours")
    ops_registry.get_op("linear")


def test_importing_the_rooms_looks_nothing_up() -> None:
    """C13-01: discovery is lazy, never at import."""
    code = (
        "import importlib.metadata as m; m.entry_points = None\n"
        "import treadle.codegen.backends, treadle.codegen.used_plugins, treadle.kernels.attention, treadle.ir.adapters"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_clash_names_both(install: Install) -> None:
    """A plugin cannot take a name of treadle's own, nor one of another plugin's."""
    install("taker", "taker", "", passes={"ours": "taker:THING"})
    with pytest.raises(PluginError, match=r"'ours' \(taker:THING\).*taker 1.0 has the name of treadle's own pass 'ours'"):
        _table().names()
    install("one", "one", "", ops={"mine": "one:f", "linear": "one:linear"})
    with pytest.raises(PluginError, match="of one 1.0 has the name of treadle's own op 'linear'"):
        ops_registry.plugin_ops()
    install("two", "two", "", ops={"mine": "two:f"})
    with pytest.raises(PluginError, match=r"one 1.0.*two 1.0|two 1.0.*one 1.0"):
        plugins("treadle.ops")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import no_such_module_at_all", "ModuleNotFoundError"),
        ("raise RuntimeError('not today')", "RuntimeError: not today"),
        ("", "AttributeError"),
    ],
)
def test_a_broken_plugin_is_named_and_breaks_nothing_else(install: Install, text: str, words: str) -> None:
    """C13-03: the message has the distribution and the entry point; other names still work."""
    install("broken-one", "broken_one", text, passes={"theirs": "broken_one:THING"})
    with pytest.raises(PluginError, match=rf"entry point 'theirs' \(broken_one:THING\).*broken-one 1.0 cannot be loaded: {words}"):
        _table().get("theirs")
    _table().get("ours")
    with pytest.raises(ConfigError, match="unknown pass 'other'; choose one of: ours, theirs"):
        _table().get("other")


OP = """
from treadle.ir.ops.registry import op

@op("{name}(Tensor x) -> Tensor")
def double(x):
    return x + x
"""


def test_an_op_is_found_when_a_graph_names_it(install: Install) -> None:
    """A text with a plugin's op parses and runs, without anybody having imported the plugin."""
    import torch

    from treadle.ir.interpret import run
    from treadle.ir.text import parse_graph

    install("doubling", "doubling", OP.format(name="double"), ops={"double": "doubling:double"})
    text = "graph @g(T in 1..8) {\n  input %x: f32[T]\n  %y: f32[T] = double(%x)\n  return %y\n}\n"
    (y,) = run(parse_graph(text), [torch.ones(3)], [])
    assert y.tolist() == [2, 2, 2]


def test_an_op_must_have_its_entry_points_name(install: Install) -> None:
    install("doubling", "doubling", OP.format(name="twice"), ops={"double": "doubling:double"})
    with pytest.raises(PluginError, match="defines no op of that name"):
        ops_registry.get_op("double")
    with pytest.raises(VerifyError, match="unknown op 'nothing'.*double.*linear"):
        ops_registry.get_op("nothing")


def test_the_hash_follows_every_file_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other contents or another name change it; a cache, the folder it lies in, and other members of its namespace do not."""
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "space" / "pack"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "deep.py").write_text("x = 1")
    _forget()

    def now() -> str:
        _forget()
        return hash_of_module("space.pack.deep")

    first = now()
    assert package_of("space.pack.deep") == "space.pack" and hash_of_module("space.pack") == first
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "deep.pyc").write_text("")
    (tmp_path / "space" / "other.py").write_text("")
    assert now() == first
    (package / "deep.py").write_text("x = 2")
    changed = now()
    (package / "kernel.cpp").write_text("int x;")
    assert len({first, changed, now()}) == 3
    with pytest.raises(PluginError, match="nowhere_at_all"):
        hash_of_module("nowhere_at_all.deep")
    _forget()


def test_every_group_is_described() -> None:
    """A table that opens a group opens one that is in the list."""
    from treadle.codegen.backends import BACKENDS
    from treadle.codegen.loader import FORMATS
    from treadle.ir.adapters import ADAPTERS
    from treadle.kernels.attention import ATTENTION_BACKENDS
    from treadle.kernels.native import NATIVE_SOURCES
    from treadle.passes.registry import PASSES

    opened = {table.group for table in (BACKENDS, FORMATS, ADAPTERS, ATTENTION_BACKENDS, NATIVE_SOURCES, PASSES)}
    assert opened | {"treadle.ops"} <= set(GROUPS)
