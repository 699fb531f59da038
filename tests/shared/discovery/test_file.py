"""What only the file back end does: locks, sweeping, and files that other programs may delete."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
from pathlib import Path

import pytest

from shared.discovery import directory_events, file
from shared.discovery.contract import Synced
from shared.discovery.file import POLL_S, FileDiscovery, FileLease, scan, sweep
from shared.errors import ConfigError
from tests.shared.watched import LIMIT_S, watching

NEVER_S = 36000.0
"""Longer than any test."""

OWNER = """
import sys
from pathlib import Path
from shared.discovery.file import FileLease
lease = FileLease(Path(sys.argv[1]))
lease.write({"/a": b"1"})
print("ready", flush=True)
sys.stdin.read()
"""


def names(directory: Path) -> list[str]:
    return [file.name for file in directory.iterdir()]


def open_descriptors() -> int:
    return len(names(Path("/proc/self/fd")))


async def start_owner(directory: Path) -> asyncio.subprocess.Process:
    owner = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        OWNER,
        str(directory),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert owner.stdout is not None
    assert await owner.stdout.readline() == b"ready\n"
    return owner


async def test_a_killed_owners_keys_are_gone_at_once_and_its_files_swept(tmp_path: Path) -> None:
    owner = await start_owner(tmp_path)
    assert scan(tmp_path) == {"/a": b"1"}
    sweep(tmp_path)
    assert scan(tmp_path) == {"/a": b"1"}
    owner.kill()
    await owner.wait()
    assert scan(tmp_path) == {}
    sweep(tmp_path)
    assert not names(tmp_path)


async def test_a_stopped_owner_keeps_its_keys(tmp_path: Path) -> None:
    owner = await start_owner(tmp_path)
    owner.send_signal(signal.SIGSTOP)
    sweep(tmp_path)
    assert scan(tmp_path) == {"/a": b"1"}
    owner.kill()
    await owner.wait()


def test_keys_are_listed_oldest_lease_first(tmp_path: Path) -> None:
    leases = [FileLease(tmp_path) for _ in range(5)]
    for n, lease in reversed(list(enumerate(leases))):
        lease.write({f"/{9 - n}": b"1"})
    assert list(scan(tmp_path)) == ["/9", "/8", "/7", "/6", "/5"]
    for lease in leases:
        lease.close()
    assert not names(tmp_path)


def test_a_file_that_is_not_ours_is_passed_over(tmp_path: Path) -> None:
    lease = FileLease(tmp_path)
    lease.write({"/a": b"1"})
    (tmp_path / "z.json").write_text("{}")
    (tmp_path / "y.json").write_bytes(b"\xff{")
    (tmp_path / "y.lock").touch()
    assert scan(tmp_path) == {"/a": b"1"}
    lease.close()


async def test_a_deleted_directory_is_made_again_under_the_next_epoch(tmp_path: Path) -> None:
    discovery = FileDiscovery(tmp_path / "d")
    registration = await discovery.register(lambda epoch: {"/a": b"%d" % epoch})
    async with watching(discovery, "/") as watched:
        shutil.rmtree(tmp_path / "d")
        await watched.until_entries({"/a": b"2"})
    await registration.close()
    await discovery.close()


async def test_deleted_keys_are_written_again_under_the_same_epoch(tmp_path: Path) -> None:
    discovery = FileDiscovery(tmp_path)
    registration = await discovery.register(lambda epoch: {"/a": b"%d" % epoch})
    [keys] = [tmp_path / name for name in names(tmp_path) if name.endswith(".json")]
    keys.unlink()
    async with watching(discovery, "/") as watched:
        await watched.until_entries({"/a": b"1"})
    await registration.close()
    await discovery.close()
    assert not names(tmp_path)


async def test_a_directory_that_cannot_be_written_is_waited_for(tmp_path: Path) -> None:
    discovery = FileDiscovery(tmp_path / "d")
    (tmp_path / "d").rmdir()
    (tmp_path / "d").touch()
    registering = asyncio.create_task(discovery.register(lambda epoch: {"/a": b"1"}))
    done, _ = await asyncio.wait([registering], timeout=2 * POLL_S)
    assert not done
    (tmp_path / "d").unlink()
    registration = await registering
    assert await discovery.list("/") == {"/a": b"1"}
    await registration.close()
    await discovery.close()


def test_the_directory_is_private(tmp_path: Path) -> None:
    FileDiscovery(tmp_path / "d")
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o700
    (tmp_path / "d").chmod(0o777)
    with pytest.raises(ConfigError, match="no other user may write to it"):
        FileDiscovery(tmp_path / "d")


async def test_a_directory_that_cannot_be_is_a_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="file"):
            FileDiscovery(directory)


async def test_changes_are_seen_without_a_poll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "POLL_S", NEVER_S)
    discovery = FileDiscovery(tmp_path / "d")
    value = b"1"
    async with watching(discovery, "/") as watched:
        await watched.until(lambda seen: seen.synced)
        owner = await start_owner(tmp_path / "d")
        registration = await discovery.register(lambda epoch: {"/b": value})
        await watched.until_entries({"/a": b"1", "/b": b"1"})
        value = b"2"
        await registration.publish()
        await watched.until_entries({"/a": b"1", "/b": b"2"})
        await registration.close()
        await watched.until_entries({"/a": b"1"})
        owner.kill()
        await owner.wait()
        (tmp_path / "d" / "any").touch()  # the kernel frees a lock after it has told that the file was closed
        await watched.until_entries({})
    await discovery.close()


async def test_changes_are_seen_where_the_kernel_tells_of_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    discovery = FileDiscovery(tmp_path)
    monkeypatch.setattr(directory_events._libc, "inotify_init1", lambda _flags: -1)
    async with watching(discovery, "/") as watched:
        await watched.until(lambda seen: seen.synced)
        registration = await discovery.register(lambda epoch: {"/a": b"1"})
        await watched.until_entries({"/a": b"1"})
        await registration.close()
        await watched.until_entries({})
    await discovery.close()


async def test_the_end_of_discovery_ends_a_watch_and_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "POLL_S", NEVER_S)
    before = open_descriptors()
    discovery = FileDiscovery(tmp_path)
    watch = discovery.watch("/")
    assert await anext(watch) == Synced()
    ending = asyncio.ensure_future(anext(watch, None))
    await asyncio.sleep(0)
    await discovery.close()
    assert await asyncio.wait_for(ending, LIMIT_S) is None
    assert open_descriptors() == before
