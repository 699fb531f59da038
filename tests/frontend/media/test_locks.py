from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.frontend.media.locks import JobLock

HOLD = """
import sys
from pathlib import Path
from services.frontend.media.locks import JobLock
assert JobLock.take(Path(sys.argv[1]), create=True)
print("held", flush=True)
sys.stdin.read()
"""


def test_one_owner_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    assert JobLock.take(path) is None, "it has no file"
    lock = JobLock.take(path, create=True)
    assert lock is not None
    assert JobLock.take(path) is None
    with pytest.raises(FileExistsError):
        JobLock.take(path, create=True)
    lock.release(over=False)
    again = JobLock.take(path)
    assert again is not None
    again.release(over=True)
    assert not path.exists()


def test_the_death_of_its_process_gives_a_job_free(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    with holder.stdin, holder.stdout:
        assert holder.stdout.readline() == "held\n"
        assert JobLock.take(path) is None
        holder.kill()
        holder.wait()
    lock = JobLock.take(path)
    assert lock is not None
    lock.release(over=True)
