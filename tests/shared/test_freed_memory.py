"""Memory that was freed goes back to the system."""

from __future__ import annotations

import subprocess
import sys

_FREED = """
from pathlib import Path
from shared.freed_memory import give_memory_back

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])

pieces = [bytes(100_000) for _ in range(500)]
last = bytes(100_000)  # behind them, in use
del pieces
before = resident()
give_memory_back()
print(before - resident())
"""


def test_memory_before_some_in_use_goes_back() -> None:
    done = subprocess.run([sys.executable, "-c", _FREED], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 4096 > 25_000_000
