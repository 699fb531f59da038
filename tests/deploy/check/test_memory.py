"""deploy/local/check/memory.py: of the machine that the tests run on."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.local.check.memory import existing, measure, mounted


def test_the_room_is_that_of_the_file_system() -> None:
    found = measure(Path("/dev/shm"))
    about = os.statvfs("/dev/shm")
    assert found.filesystem == "tmpfs"
    assert found.directory == "/dev/shm"
    assert found.free_bytes is None or found.free_bytes <= about.f_blocks * about.f_frsize
    assert 0 < found.available_bytes <= found.total_bytes
    assert found.overcommit in (0, 1, 2)


def test_a_directory_that_is_not_there_yet_stands_for_the_one_above(tmp_path: Path) -> None:
    assert existing(tmp_path / "a" / "b") == tmp_path
    assert measure(tmp_path / "a" / "b").directory == str(tmp_path)


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert existing(tmp_path / "file") == tmp_path


def test_the_limit_of_locked_memory_is_that_of_the_process() -> None:
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    program = (
        "import resource; from pathlib import Path; from deploy.local.check.memory import measure;"
        f"resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, {hard})); print(measure(Path('/dev/shm')).memlock_bytes)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "65536\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_a_tmpfs_of_its_own_is_seen_with_its_size_and_huge_pages(tmp_path: Path) -> None:
    mounting = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"mount -t tmpfs -o size=8m,huge=within_size x {tmp_path} && {sys.executable} -c"
         f" 'from pathlib import Path; from deploy.local.check.memory import measure;"
         f' m = measure(Path("{tmp_path}")); print(m.filesystem, m.free_bytes, m.mount_options)\''],
        capture_output=True,
        text=True,
    )  # fmt: skip
    if mounting.returncode:
        pytest.skip(f"no tmpfs with huge pages can be mounted: {mounting.stderr.strip()}")
    kind, free, options = mounting.stdout.split(maxsplit=2)
    assert (kind, int(free)) == ("tmpfs", 8 << 20)
    assert "huge=within_size" in options


def test_a_file_system_that_the_kernel_does_not_list_is_unknown() -> None:
    kind, options = mounted(Path("/proc"))
    assert kind == "proc"
    assert options
