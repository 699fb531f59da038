"""When a killed process's lock is free, its GPU writes no more."""

from __future__ import annotations

import fcntl
import mmap
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.gpu.device import cupy_on_a_device
from tests.gpu.endless_writer import OWNER
from tests.integration.kinds import SHARED_MEMORY
from tests.integration.stack import ROOT

pytestmark = pytest.mark.gpu
cupy_on_a_device()

SIZE_BYTES = 512 << 20
"""10 ms of the link, and the GPU is 30 copies ahead."""
WATCHED_S = 0.5


@pytest.mark.parametrize("attempt", range(4))
def test_a_free_lock_says_that_the_gpu_of_a_killed_process_writes_no_more(tmp_path: Path, attempt: int) -> None:
    (tmp_path / "owners").mkdir(mode=0o700)
    with tempfile.NamedTemporaryFile(dir=SHARED_MEMORY) as file:
        file.truncate(SIZE_BYTES)
        command = [sys.executable, "-m", "tests.gpu.endless_writer", str(tmp_path), file.name]
        with (
            mmap.mmap(file.fileno(), 0) as memory,
            subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as writer,
        ):
            assert writer.stdout is not None
            for _ in range(5):
                assert writer.stdout.readline() == "going\n"
            with (tmp_path / "owners" / OWNER).open() as lock:
                killed_s = time.monotonic()
                writer.kill()
                fcntl.flock(lock, fcntl.LOCK_EX)
                free_s = time.monotonic()
            places = range(0, SIZE_BYTES, 1 << 20)
            seen = [memory[place] for place in places]
            while time.monotonic() - free_s < WATCHED_S:
                assert [memory[place] for place in places] == seen, f"{time.monotonic() - free_s} s after it was free"
            print(f"free {free_s - killed_s:.4f} s after SIGKILL")
