"""What a bundle records of other packages, and when it is refused without them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.codegen.conftest import MakeBundle
from treadle.codegen.bundle import open_bundle
from treadle.codegen.manifest import Manifest, PluginEntry
from treadle.codegen.used_plugins import installed, key_pairs
from treadle.ir import plugins as plugins_module
from treadle.ir.errors import BundleError


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of one file that belongs to no distribution."""
    folder = tmp_path / "packages" / "loose_ops"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    _forget()
    yield folder
    _forget()


def _forget() -> None:
    plugins_module.hash_of_module.cache_clear()
    plugins_module.package_of.cache_clear()
    importlib.invalidate_caches()


def entry(**changes: object) -> PluginEntry:
    bare = PluginEntry(
        name="loose_ops", version="", source="", packages=["loose_ops"], uses=["op twice"], run_time=["op twice"]
    )
    return msgspec.structs.replace(installed(bare) or bare, **changes)


def _with(*entries: PluginEntry) -> Callable[[Manifest], None]:
    def change(manifest: Manifest) -> None:
        manifest.plugins = list(entries)

    return change


def test_a_bundle_loads_where_its_plugin_is_as_it_was(package: Path, make_bundle: MakeBundle) -> None:
    made = make_bundle(change=_with(entry()))
    open_bundle(made)
    (package / "__init__.py").write_text("x = 2\n")
    _forget()
    with pytest.raises(BundleError, match=r"runs op twice of loose_ops, and the one installed here is loose_ops with other source"):
        open_bundle(made)
    open_bundle(made, for_loading=False)


@pytest.mark.parametrize(("run_time", "refused"), [(["op twice"], True), ([], False)])
def test_a_missing_plugin_matters_at_run_time_only(make_bundle: MakeBundle, run_time: list[str], refused: bool) -> None:
    """What was only needed to compile need not be there to serve."""
    made = make_bundle(change=_with(entry(name="gone-ops", version="2.0", source="ab" * 32, run_time=run_time)))
    if not refused:
        open_bundle(made)
        return
    with pytest.raises(BundleError, match=r"runs op twice of gone-ops 2.0, which is not installed here; install gone-ops 2.0"):
        open_bundle(made)


def test_the_key_holds_version_and_source() -> None:
    """C09-02: either of them changes the key."""
    first = entry(name="p", version="1", source="ab")
    assert key_pairs([first]) == (("p", ("1", "ab")),)
    assert key_pairs([msgspec.structs.replace(first, source="cd")]) != key_pairs([first])
