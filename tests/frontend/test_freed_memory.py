"""Memory that a request has freed serves the next one."""

from __future__ import annotations

import subprocess
import sys

_REPEATED = """
import resource
from services.frontend.freed_memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        bodies = [b"x" * (2 << 20) for _ in range(4)]
        del bodies
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
faults()
print(faults())
"""


def test_memory_that_a_request_has_freed_serves_the_next_one() -> None:
    done = subprocess.run([sys.executable, "-c", _REPEATED], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2048, "a single one of the ten has 2,048 pages"
