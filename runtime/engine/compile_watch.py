"""Counts compilations in this process after it became ready: compilers started, code generators loaded.

The count comes from the interpreter's audit events, so it holds whoever starts the compiler.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

COMPILERS = ("g++", "gcc", "cc", "c++", "clang", "clang++", "nvcc", "ptxas", "ld", "as")
GENERATORS = ("torch._inductor.compile_fx", "torch._dynamo.convert_frame", "triton.compiler.compiler", "tvm.relax.vm_build")


class CompileWatch:
    """Counts from `arm` on. An audit hook cannot be removed, so one watch serves the whole process."""

    def __init__(self) -> None:
        self.count = 0
        self.seen: list[str] = []
        self._armed = False
        self._hooked = False

    def arm(self) -> None:
        """Starts counting; before, nothing is looked at."""
        self._armed = True
        if not self._hooked:
            self._hooked = True
            sys.addaudithook(self._hook)

    def _hook(self, event: str, args: Sequence[Any]) -> None:
        if not self._armed:
            return
        if event in ("subprocess.Popen", "os.posix_spawn", "os.exec"):
            self._note_program(args[0], args[1] if len(args) > 1 else ())
        elif event == "import" and args[0] in GENERATORS and args[0] not in sys.modules:
            self._note(str(args[0]))

    def _note_program(self, executable: Any, argv: Any) -> None:
        words = argv if isinstance(argv, Sequence) and not isinstance(argv, str | bytes) else (executable,)
        program = _name(words[0] if words else executable)
        if program in COMPILERS or program.rpartition("-")[0] in COMPILERS:  # g++-12
            self._note(program)

    def _note(self, what: str) -> None:
        self.count += 1
        self.seen.append(what)


def _name(program: Any) -> str:
    text = program.decode(errors="replace") if isinstance(program, bytes) else str(program)
    return PurePath(text.split()[0] if text.split() else "").name


watch = CompileWatch()
