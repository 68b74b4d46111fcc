"""The command line. Errors of the user are one line on stderr and exit code 1; bad arguments are 2."""

from __future__ import annotations

import logging
import sys

import typer

from treadle.ir.errors import TreadleError
from treadle.runtime.executor.threads import wait_passively
from treadle.server.environment import log_level
from treadle.server.lazy_commands import LazyGroup

app = typer.Typer(cls=LazyGroup, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def _show_version(wanted: bool) -> None:
    if wanted:
        import treadle

        typer.echo(f"treadle {treadle.__version__}")
        raise typer.Exit


@app.callback(help="Compile a language model ahead of time, then serve it.")
def _root(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version."),
    log: str = typer.Option(None, "--log-level", help="DEBUG, INFO, WARNING or ERROR; also TREADLE_LOG_LEVEL."),
) -> None:
    level = (log or log_level()).upper()
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise typer.BadParameter(f"{level!r} is not one of DEBUG, INFO, WARNING, ERROR", param_hint="--log-level")
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    for chatty in ("uvicorn", "httpx", "httpcore", "asyncio", "filelock", "urllib3"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def main() -> None:
    """Runs the command line and exits."""
    wait_passively()  # before anything imports torch: commands that time or prove pieces compute in this process
    try:
        app()
    except TreadleError as error:
        _fail(str(error))
    except OSError as error:  # a path that cannot be read or written, a full disk, a pipe nobody reads
        logging.getLogger(__name__).debug("where it happened", exc_info=True)
        _fail(": ".join(part for part in (error.strerror or str(error), error.filename and str(error.filename)) if part))


def _fail(reason: str) -> None:
    print(f"treadle: {reason}", file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()
