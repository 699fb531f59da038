"""Processes that a test stops and kills: they print one line when they are where the test wants them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OWNER = """
import sys
from pathlib import Path
from shared.pool.lock import hold_owner
lock = hold_owner(Path(sys.argv[1]), sys.argv[2])
print("ready", flush=True)
sys.stdin.read()
lock.close(delete=True)
"""
"""Arguments: the pool's directory and the owner's name. Ends when its standard input does."""


@contextmanager
def running(program: str, *arguments: str | Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Start a process. Yield it and the line that it printed; kill it at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().decode().strip()
        finally:
            process.kill()


def ended(process: subprocess.Popen[bytes]) -> None:
    """Kill the process, and wait until it has ended."""
    process.kill()
    process.wait(timeout=180)
