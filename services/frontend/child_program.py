"""The program of a child process: it answers questions of one frontend, within limits (child_processes.py asks them).

    standard input   length, question │ length, question │ …        each length is a u32
    standard output  length, answer   │ length, answer   │ …

A question that takes more processor time than the limit ends the process; so may one that takes too much memory.
"""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Callable
from struct import Struct

from services.frontend.freed_memory import give_back_freed_memory, keep_freed_memory

FRAME = Struct("<I")
IDLE_BYTES = 128 << 20
"""Most bytes of memory that the process keeps between two questions, if they are not in use."""


def run_program(answer: Callable[[bytes], bytes], *, cpu_limit_s: float, memory_limit_bytes: int) -> None:
    """Answer questions from standard input until it ends."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    keep_freed_memory()
    given, out = sys.stdin.buffer, sys.stdout.buffer
    while len(head := given.read(FRAME.size)) == FRAME.size:
        [size] = FRAME.unpack(head)
        question = given.read(size)
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)  # its signal ends the process
        said = answer(question)
        signal.setitimer(signal.ITIMER_PROF, 0)
        out.write(FRAME.pack(len(said)))
        out.write(said)
        out.flush()
        del question, said
        give_back_freed_memory(IDLE_BYTES)
