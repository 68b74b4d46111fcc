"""The loop of a worker process: JSON requests on stdin, each run in a fork of its own, one JSON answer each on stdout.

What the process has imported and warmed up is paid for once and shared by the forks. A fork that dies is answered for;
the whole family ends when the parent does. Nothing here may start threads: they do not survive a fork.
"""

from __future__ import annotations

import json
import os
import select
import signal
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

Operation = Callable[[dict[str, Any]], Any]

_CHECK_SECONDS = 0.2
_MAX_ERROR_CHARS = 1500  # an answer must fit in one atomic write to a pipe, escapes included
_MAX_ERROR_LINES = 30


def serve(operations: Mapping[str, Operation], inline: Collection[str] = ()) -> None:
    """Serves requests `{"id", "op", ...}` until stdin closes. Operations in `inline` run in this process, to warm it up.

    An answer is `{"id"}` with what the operation returned, or with `error`. What is printed goes to stderr.
    """
    answers = os.dup(1)
    os.dup2(2, 1)
    children: dict[int, int] = {}
    parent = os.getppid()
    for request in _requests(lambda: _look_after(children, parent, answers)):
        operation = operations[request["op"]]
        if request["op"] in inline:
            _answer(request, operation, answers)
        else:
            children[_fork(request, operation, answers)] = request["id"]
    os.killpg(0, signal.SIGKILL)


def _requests(idle: Callable[[], None]) -> Iterator[dict[str, Any]]:
    """Requests as they come; `idle` is called at least every `_CHECK_SECONDS`."""
    waiting = b""
    while True:
        ready, _, _ = select.select([0], [], [], _CHECK_SECONDS)
        idle()
        if not ready:
            continue
        data = os.read(0, 1 << 16)
        if not data:
            return
        *lines, waiting = (waiting + data).split(b"\n")
        yield from map(json.loads, lines)


def _look_after(children: dict[int, int], parent: int, answers: int) -> None:
    """Ends the family if the parent is gone; answers for children that ended badly."""
    if os.getppid() != parent:
        os.killpg(0, signal.SIGKILL)
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        number = children.pop(pid)
        if status != 0:
            code = os.waitstatus_to_exitcode(status)
            error = f"its process ended unexpectedly with status {code}"
            _send(answers, {"id": number, "error": error, "status": code})


def _fork(request: dict[str, Any], operation: Operation, answers: int) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            _answer(request, operation, answers)
            os._exit(0)
        finally:
            os._exit(70)
    return pid


def _answer(request: dict[str, Any], operation: Operation, answers: int) -> None:
    """Runs the operation. Whatever it raises becomes the answer: the caller, not this process, decides what to do."""
    try:
        answer = operation(request) or {}
    except Exception as error:
        traceback.print_exc()
        answer = {"error": _explain(error)}
    _send(answers, {**answer, "id": request["id"]})


def _explain(error: BaseException) -> str:
    lines = (str(error).strip() or "no message").splitlines()[:_MAX_ERROR_LINES]
    return f"{type(error).__name__}: " + "\n  ".join(lines)[:_MAX_ERROR_CHARS]


def _send(answers: int, answer: dict[str, Any]) -> None:
    os.write(answers, json.dumps(answer).encode() + b"\n")
