"""Kernel locks: whose life they prove, and when they are released. Real processes are frozen and killed."""

from __future__ import annotations

import fcntl
import os
import signal
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from shared.pool.format import PoolUnfit
from shared.pool.lock import HeldLock, LockTaken, hold_directory, hold_owner, is_owner, join_owner
from tests.kvbm.processes import OWNER, ended, running


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "owners").mkdir(mode=0o700)
    return tmp_path


def free(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_a_lock_is_taken_once_and_names_its_holder(tmp_path: Path) -> None:
    held = HeldLock.acquire(tmp_path / "lock", "17\n")
    with pytest.raises(LockTaken) as taken:
        HeldLock.acquire(tmp_path / "lock", "18\n")
    assert taken.value.note == "17"
    held.close()
    held.close()
    again = HeldLock.acquire(tmp_path / "lock", "9\n")
    assert (tmp_path / "lock").read_text() == "9\n"
    again.close()


def test_a_lock_moves_to_another_descriptor_and_the_lock_that_was_there_is_let_go(directory: Path) -> None:
    number = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    former, latter = hold_owner(directory, "a"), hold_owner(directory, "b")
    former.move_to(number)
    assert not free(former.path)
    latter.move_to(number)
    assert os.path.samestat(os.fstat(number), latter.path.stat())
    assert not os.get_inheritable(number)
    assert free(former.path)
    former.close()
    assert not free(latter.path)
    latter.close()
    assert free(latter.path)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_a_lock_is_not_taken_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="lock"):
        HeldLock.acquire(tmp_path / "lock", "")
    assert not (tmp_path / "elsewhere").exists()


def test_the_note_names_the_kvbm_that_holds_a_directory_and_stays_until_the_next_one(tmp_path: Path) -> None:
    for instance in ("a" * 64, "b2"):
        with closing(hold_directory(tmp_path, instance)):
            assert (tmp_path / "lock").read_text() == f"{os.getpid()} {instance}\n"
        assert (tmp_path / "lock").read_text() == f"{os.getpid()} {instance}\n"


def test_a_deleted_file_is_no_longer_held(directory: Path) -> None:
    held = hold_owner(directory, "w-1")
    file = directory / "owners" / "w-1"
    assert held.held
    file.unlink()
    assert not held.held
    file.touch()
    assert not held.held
    held.close(delete=True)
    assert file.exists(), "not the one that was made"


def test_a_clean_end_leaves_no_file(directory: Path) -> None:
    hold_owner(directory, "w-1").close(delete=True)
    assert not list((directory / "owners").iterdir())


def test_a_name_is_used_once(directory: Path) -> None:
    held = hold_owner(directory, "w-1")
    with pytest.raises(PoolUnfit, match="exists"):
        hold_owner(directory, "w-1")
    held.close()


def test_names_that_could_leave_the_directory_are_no_owners() -> None:
    assert is_owner("0f3a-77")
    for name in ("", ".", "..", "../x", "a/b", "a\0b", "a\n", "é", "a" * 129):
        assert not is_owner(name), name


def test_an_owner_needs_a_directory_that_only_its_user_can_change(directory: Path) -> None:
    with pytest.raises(PoolUnfit, match="No such file"):
        hold_owner(directory / "missing", "w-1")
    (directory / "owners").chmod(0o722)
    with pytest.raises(PoolUnfit, match="no other user may write to it"):
        hold_owner(directory, "w-1")
    (directory / "owners").rmdir()
    (directory / "owners").touch(0o600)
    with pytest.raises(PoolUnfit, match="is not a directory"):
        hold_owner(directory, "w-1")


def test_a_stopped_process_holds_its_lock_and_a_killed_one_lets_go_at_once(directory: Path) -> None:
    file = directory / "owners" / "w-1"
    with running(OWNER, directory, "w-1") as (process, line):
        assert line == "ready"
        assert not free(file)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert not free(file)
        ended(process)
        assert free(file)


CHILDREN = """
import os, subprocess, sys
from pathlib import Path
from shared.pool.lock import hold_owner
lock = hold_owner(Path(sys.argv[1]), "w-1")
read, write = os.pipe()
forked = os.fork()
if forked == 0:
    os.write(write, b".")
    sys.stdin.read()
    os._exit(0)
os.read(read, 1)
executed = subprocess.Popen(
    [sys.executable, "-c", "import sys; print('here', flush=True); sys.stdin.read()"],
    close_fds=False,
    stdout=subprocess.PIPE,
)
executed.stdout.readline()
print(forked, executed.pid, flush=True)
sys.stdin.read()
"""


def test_children_do_not_keep_a_dead_owners_lock(directory: Path) -> None:
    file = directory / "owners" / "w-1"
    with running(CHILDREN, directory) as (process, line):
        children = [int(pid) for pid in line.split()]
        try:
            assert len(children) == 2
            assert not free(file), "nor do they let go of a living one's"
            ended(process)
            assert free(file)
            for child in children:
                os.kill(child, 0)
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("deletes", [True, False])
def test_a_file_that_another_takes_before_it_is_locked_is_made_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch, deletes: bool
) -> None:
    """A sweeper finds the new file unlocked between its maker's two calls, locks it, and perhaps deletes it."""
    file = directory / "owners" / "w-1"
    flock = fcntl.flock
    with ExitStack() as sweeper:

        def sweep_first(descriptor: int, how: int) -> None:
            monkeypatch.setattr(fcntl, "flock", flock)
            flock(sweeper.enter_context(file.open("rb")), fcntl.LOCK_EX)
            if deletes:
                file.unlink()
            flock(descriptor, how)

        monkeypatch.setattr(fcntl, "flock", sweep_first)
        held = hold_owner(directory, "w-1")
        assert fcntl.flock is flock
    assert held.held
    assert not free(file)
    held.close()


# --- a lock that several processes share

JOINS = """
import sys
from pathlib import Path
from shared.pool.lock import join_owner
lock = join_owner(Path(sys.argv[1]), sys.argv[2])
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_shared_lock_is_free_when_the_last_process_has_ended(directory: Path) -> None:
    held = hold_owner(directory, "w-1", shared=True)
    with running(JOINS, directory, "w-1") as (first, said), running(JOINS, directory, "w-1") as (second, also):
        assert (said, also) == ("ready", "ready")
        held.close()
        assert not unused(held.path)
        ended(first)
        assert not unused(held.path)
        second.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, second.pid, os.WSTOPPED | os.WNOWAIT)
        assert not unused(held.path), "it may go on and write"
        ended(second)
        assert unused(held.path)


def unused(path: Path) -> bool:
    """Return whether a kvbm could take the lock, as `free` does for locks that are not shared."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def descriptors() -> int:
    """Return how many files this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_lock_is_joined_only_while_it_is_held_under_its_name(directory: Path) -> None:
    with pytest.raises(PoolUnfit, match="No such file"):
        join_owner(directory, "w-1")
    held = hold_owner(directory, "w-1", shared=True)
    joined = join_owner(directory, "w-1")
    assert joined.held
    assert joined.path == held.path
    held.close(delete=True)
    assert not joined.held
    with pytest.raises(PoolUnfit, match="No such file"):
        join_owner(directory, "w-1")
    joined.close()


def test_a_lock_that_another_holds_alone_is_not_joined(directory: Path) -> None:
    alone = hold_owner(directory, "w-1")
    before = descriptors()
    with pytest.raises(PoolUnfit, match="temporarily unavailable"):
        join_owner(directory, "w-1")
    assert descriptors() == before, "the file is closed again"
    assert not free(alone.path)
    alone.close()


def test_a_lock_is_not_joined_through_a_link(directory: Path) -> None:
    held = hold_owner(directory, "w-1", shared=True)
    (directory / "owners" / "w-2").symlink_to(held.path)
    with pytest.raises(PoolUnfit, match="symbolic links"):
        join_owner(directory, "w-2")
    held.close()


def test_a_file_that_a_sweeper_deletes_while_it_is_joined_is_not_held(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner ended between the two calls of `join`; the kvbm then gives its slots to others."""
    held = hold_owner(directory, "w-1", shared=True)
    flock = fcntl.flock

    def sweep_first(descriptor: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        held.close(delete=True)
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    before = descriptors()
    with pytest.raises(PoolUnfit, match="No such file"):
        join_owner(directory, "w-1")
    assert fcntl.flock is flock
    assert descriptors() == before - 1, "only the maker's is gone"
