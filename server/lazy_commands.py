"""Commands that are imported when they run: `treadle --help` needs none of what they need."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

COMMANDS = {
    "compile": ("treadle.server.commands_compile", "Compile a model ahead of time and write a bundle."),
    "serve": ("treadle.server.commands_serve", "Serve a bundle over the OpenAI API."),
    "generate": ("treadle.server.commands_generate", "Complete prompts from a bundle, without a server."),
    "chat": ("treadle.server.commands_chat", "Chat with a bundle, without a server."),
    "inspect": ("treadle.server.commands_inspect", "Show what a bundle holds and how it was made."),
    "trace": ("treadle.server.commands_trace", "Trace a model and write its graph as text."),
    "opt": ("treadle.server.commands_opt", "Run passes on a graph's text."),
    "bisect": ("treadle.server.commands_bisect", "Find the first pass that changes a graph's outputs."),
    "verify": ("treadle.server.commands_verify", "Prove a bundle: each pass and each compiled piece on seeded inputs."),
    "passes": ("treadle.server.commands_passes", "List the passes, or explain one."),
    "ops": ("treadle.server.commands_ops", "List the ops of the IR's dialect, or explain one."),
    "bench": ("treadle.server.commands_bench", "Measure a bundle, a start, a compile, or any OpenAI-compatible server."),
    "cache": ("treadle.server.commands_cache", "List, verify, explain, compare and clean the artifact store."),
    "doctor": ("treadle.server.commands_doctor", "Check this machine and report what treadle finds."),
}
"""Name -> module with a Typer `app`, which owns the parameters, and the line that `--help` shows."""


class LazyGroup(TyperGroup):
    """A group whose commands are the rows of COMMANDS."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns a stand-in that knows its one line of help, or None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        module, summary = COMMANDS[cmd_name]
        return _LazyCommand(cmd_name, module, summary)


class _LazyCommand(TyperCommand):
    """Stands in for a command until it is invoked."""

    def __init__(self, name: str, module: str, summary: str):
        super().__init__(name=name, help=summary, short_help=summary)
        self._module = module

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Imports the real command and lets it parse its arguments."""
        real = typer.main.get_command(import_module(self._module).app)
        real.name = self.name
        return real.make_context(info_name, args, parent=parent, **extra)
