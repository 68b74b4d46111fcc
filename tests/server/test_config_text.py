"""The table behind `--print-config`."""

from __future__ import annotations

from treadle.codegen.config import resolve_compile
from treadle.ir.config import resolve
from treadle.server.config import ServerConfig
from treadle.server.config_text import config_text


def cells(text: str, name: str) -> list[str]:
    """The words of a setting's line."""
    return next(line for line in text.splitlines() if line.startswith(f"{name} ")).split()


def test_each_line_says_what_was_asked_what_would_hold_and_what_holds() -> None:
    """C14-02, R-14.6: user, level and default are told apart, and a value that was lowered has its reason."""
    resolved = resolve_compile({"level": 1, "max_model_len": 900})
    text = config_text(resolved.override("model", "the model has only 512 positions", max_model_len=512))
    assert text.splitlines()[0] == "CompileConfig"
    assert cells(text, "level") == ["level", "1", "2", "1", "user"]
    assert cells(text, "fuse_act_quant") == ["fuse_act_quant", "-", "False", "False", "level", "1"]
    assert cells(text, "exact_sizes") == ["exact_sizes", "-", "none", "none", "default"]
    assert cells(text, "max_model_len")[1:5] == ["900", "automatic", "512", "model"]
    assert "the model has only 512 positions" in text


def test_secrets_are_not_shown() -> None:
    """C14-02: neither as asked for nor as effective."""
    text = config_text(resolve(ServerConfig, {"api_keys": ("hunter2",)}))
    assert cells(text, "api_keys")[1:4] == ["***", "none", "***"]
    assert "hunter2" not in text
