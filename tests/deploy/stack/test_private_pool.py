"""deploy/local/stack/private_pool.py: where the block store of one `up` lies, and that nothing of it stays."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.local.stack.private_pool import MEMORY, private_pool
from shared.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
HOLDS = """
import sys
from pathlib import Path
from deploy.local.stack.private_pool import private_pool
with private_pool(Path(sys.argv[1])) as directory:
    (directory / "pool").write_bytes(b"blocks")
    print(directory, flush=True)
    sys.stdin.read()
"""


def holder(memory: Path) -> tuple[subprocess.Popen[str], Path]:
    """Another `up`, as far as its directory goes."""
    command = [sys.executable, "-c", HOLDS, str(memory)]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str]) -> None:
    with process:
        process.kill()


def test_it_is_private_and_gone_at_the_end(tmp_path: Path) -> None:
    with private_pool(tmp_path) as directory:
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert directory.parent == tmp_path
        assert directory.name.startswith(f"headrace-{os.geteuid()}-")
        (directory / "owners").mkdir()
        (directory / "owners" / "engine").write_text("")
    assert list(tmp_path.iterdir()) == []


def test_it_is_gone_after_a_failure_too(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), private_pool(tmp_path):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_two_at_once_have_one_each(tmp_path: Path) -> None:
    other, theirs = holder(tmp_path)
    try:
        with private_pool(tmp_path) as ours:
            assert ours != theirs
            assert (theirs / "pool").read_bytes() == b"blocks"
        assert list(tmp_path.iterdir()) == [theirs]
    finally:
        end(other)


def test_what_a_killed_one_left_is_swept_by_the_next(tmp_path: Path) -> None:
    killed, left = holder(tmp_path)
    end(killed)
    assert (left / "pool").exists()
    with private_pool(tmp_path) as ours:
        assert list(tmp_path.iterdir()) == [ours]


def test_what_only_looks_like_one_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_text("")
    (tmp_path / f"headrace-{os.geteuid()}-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / f"headrace-{os.geteuid()}-file").write_text("")
    (tmp_path / f"headrace-{os.geteuid() + 1}-other").mkdir()
    with private_pool(tmp_path):
        pass
    assert len(list(tmp_path.iterdir())) == 4
    assert (tmp_path / "elsewhere" / "precious").exists()


def test_no_such_memory_is_said_in_one_line(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"no memory for a block store: .*none.*: No such file or directory"),
        private_pool(tmp_path / "none"),
    ):
        pass


def test_the_default_is_memory_indeed() -> None:
    assert os.major(MEMORY.stat().st_dev) == 0
