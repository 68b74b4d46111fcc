"""The page of `treadle inspect --html`, as a browser without a network sees it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.server.tiny_bundle import compile_tiny
from treadle.server.cli import app

pytestmark = pytest.mark.slow
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --virtual-time-budget=3000"
).split()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_tiny(tmp_path_factory.mktemp("page"), "b<i>&.bundle")


def page(bundle: Path, out: Path, *options: str) -> str:
    result = CliRunner().invoke(app, ["inspect", str(bundle), "--html", str(out), *options])
    assert result.exit_code == 0, result.output
    return out.read_text()


def dump(file: Path, profile: Path) -> str:
    """The document after its script ran."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    found = subprocess.run(
        [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "--dump-dom", f"file://{file}"],
        capture_output=True, text=True, timeout=90, check=True,
    )  # fmt: skip
    return found.stdout


def test_the_page_needs_nothing_but_itself(bundle: Path, tmp_path: Path) -> None:
    """Promise 1: no address is fetched, names are escaped, and everything the bundle says is in it."""
    text = page(bundle, tmp_path / "page.html", "--time")
    assert not re.search(r"""(?:src|href)=["'](?!#|data:)""", text) and "@import" not in text and "url(" not in text
    assert "b<i>" not in text and "b&lt;i&gt;&amp;.bundle" in text
    for words in ("raise_rope", "fuse_qkv", "pieces/layer-1-64.ir", "model.layers.0", "T = 16", "asked for"):
        assert words in text, words
    assert text.count("<section") == text.count("</section>") == 8


def test_a_browser_shows_one_diff_and_opens_what_is_folded(bundle: Path, tmp_path: Path) -> None:
    """The script runs under the page's own policy: the first pair of stages is shown; a click opens a folded run."""
    file = tmp_path / "page.html"
    text = page(bundle, file)
    shown = dump(file, tmp_path / "profile")
    assert shown.count('class="panel open"') == 1 and '<html lang="en" class="script">' in shown
    assert shown.count('aria-pressed="true">') == 1 and shown.count('aria-pressed="false">') == 4
    file.write_text(text.replace("</script>", 'tabs[2].click(); document.querySelector("#diff2 .gap button").click();</script>'))
    clicked = dump(file, tmp_path / "profile")
    assert '<div class="panel open" id="diff2">' in clicked
    assert clicked.count('<tbody class="gap">') == shown.count('<tbody class="gap">') - 1
    assert clicked.count("<tbody hidden") == shown.count("<tbody hidden") - 1


def test_time_alone_is_refused(bundle: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(bundle), "--time"])
    assert result.exit_code == 1 and "--html" in str(result.exception)
