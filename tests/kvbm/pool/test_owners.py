"""Engine processes as the kvbm sees them: attached, frozen, killed, and files that no engine made."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from services.kvbm.pool import owners as module
from services.kvbm.pool.owners import OwnerLocks
from shared.pool.lock import hold_owner
from tests.kvbm.processes import OWNER, ended, running


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def owners(directory: Path) -> OwnerLocks:
    return OwnerLocks(directory)


def files(directory: Path) -> set[str]:
    return {file.name for file in (directory / "owners").iterdir()}


def test_an_owner_lives_until_it_is_killed_and_is_reported_dead_once(directory: Path, owners: OwnerLocks) -> None:
    with running(OWNER, directory, "w-1") as (process, _):
        assert owners.is_alive("w-1")
        assert owners.poll() == []
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert owners.is_alive("w-1")
        assert owners.poll() == []
        ended(process)
        assert not owners.is_alive("w-1")
        assert files(directory) == {"w-1"}
    assert owners.poll() == ["w-1"]
    assert owners.poll() == []
    assert not files(directory)
    assert not owners.is_alive("w-1")
    owners.close()


def test_an_owner_that_ends_by_itself_is_dead_too(directory: Path, owners: OwnerLocks) -> None:
    held = hold_owner(directory, "w-1")
    assert owners.poll() == []
    assert owners.watched == {"w-1"}
    held.close(delete=True)
    assert owners.poll() == ["w-1"]
    owners.close()


def test_a_living_owner_whose_file_was_deleted_stays_alive(directory: Path, owners: OwnerLocks) -> None:
    held = hold_owner(directory, "w-1")
    assert owners.is_alive("w-1")
    held.path.unlink()
    held.path.touch()
    assert owners.is_alive("w-1")
    assert owners.poll() == []
    held.close()
    assert owners.poll() == ["w-1"]
    assert files(directory) == {"w-1"}, "another's, which the next look deletes"
    assert owners.poll() == []
    assert not files(directory)
    owners.close()


def test_what_the_dead_of_another_time_left_is_deleted_without_a_word(directory: Path, owners: OwnerLocks) -> None:
    for n in range(5):
        hold_owner(directory, f"w-{n}").close()
    with running(OWNER, directory, "living") as (_, line):
        assert line == "ready"
        assert owners.poll() == []
        assert files(directory) == {"living"}
    owners.close()


def test_files_that_no_engine_made_are_left_alone_and_prove_nothing(directory: Path, owners: OwnerLocks) -> None:
    place = directory / "owners"
    (place / ".hidden").touch()
    (place / "link").symlink_to(directory / "elsewhere")
    (place / "dir").mkdir()
    os.mkfifo(place / "pipe")
    assert owners.poll() == []
    assert owners.watched == frozenset()
    for name in ("link", "dir", "pipe", ".hidden", "..", "../owners", "", "missing"):
        assert not owners.is_alive(name)
    assert files(directory) == {".hidden", "link", "dir", "pipe"}
    owners.close()


def test_beyond_the_bound_an_engine_cannot_attach_until_another_ends(
    directory: Path, owners: OwnerLocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_OWNERS", 2)
    held = [hold_owner(directory, f"w-{n}") for n in range(3)]
    assert owners.is_alive("w-0")
    assert owners.is_alive("w-1")
    assert owners.full
    assert not owners.is_alive("w-2")
    assert owners.poll() == []
    assert held[2].held
    held[0].close(delete=True)
    assert owners.poll() == ["w-0"]
    assert owners.is_alive("w-2")
    owners.close()
    for lock in held:
        lock.close()
