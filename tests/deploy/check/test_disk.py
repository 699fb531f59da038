"""deploy/local/check/disk.py: on real file systems."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deploy.local.check import disk
from deploy.local.check.measurements import Unmeasured


def test_a_disk_is_measured_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "FILE_BYTES", 64 << 20)
    found = disk.measure(tmp_path)
    if isinstance(found, Unmeasured):
        pytest.skip(found.reason)
    assert (found.directory, found.free_bytes > 0) == (str(tmp_path), True)
    assert list(tmp_path.iterdir()) == []
    if found.direct:
        assert found.written_bytes == 64 << 20
        assert found.write_bytes_s > 0
        assert found.read_bytes_s > 0
        assert found.read_s > 0


def test_a_slow_disk_gets_a_smaller_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "LIMIT_S", 0.0)
    found = disk.measure(tmp_path)
    if isinstance(found, Unmeasured) or not found.direct:
        pytest.skip("there is no O_DIRECT here, or no room")
    assert found.written_bytes == disk.THREADS * disk.REQUEST_BYTES


def test_a_disk_that_is_nearly_full_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = os.statvfs(tmp_path)
    monkeypatch.setattr(disk, "LEFT_BYTES", about.f_bavail * about.f_frsize)
    found = disk.measure(tmp_path)
    assert isinstance(found, Unmeasured)
    assert "kvbm leaves" in found.reason


def test_a_file_system_without_unnamed_files_gets_one_whose_name_goes_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # what a kernel without it sees: EISDIR
    file = disk.unnamed(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert os.fstat(file).st_nlink == 0
    assert os.pwrite(file, b"x", 0) == 1
    os.close(file)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_of_others_raises_what_the_system_says(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError):
        disk.measure(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_where_it_is_interrupted(tmp_path: Path, number: signal.Signals) -> None:
    program = (
        "from pathlib import Path; from deploy.local.check import disk; disk.LIMIT_S = 60.0\n"
        f"while True: disk.measure(Path({str(tmp_path)!r}))"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not any(link.startswith(str(tmp_path)) for link in _open_files(child.pid)):
            assert child.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        child.send_signal(number)
        assert child.wait(60) != 0
    finally:
        child.kill()
        child.wait()
    assert list(tmp_path.iterdir()) == []


def _open_files(pid: int) -> list[str]:
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(str(link.readlink()))
        except FileNotFoundError:  # closed meanwhile
            continue
    return found
