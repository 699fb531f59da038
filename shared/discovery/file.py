"""Discovery on one machine without a server: files in a directory, with kernel locks as leases.

    NAME.lock   locked (flock) by the owner; the kernel releases the lock when the process ends, for whatever reason
    NAME.json   {key: value}, replaced as a whole

NAME begins with the time when the lease was made. A lease whose lock is free is dead. The directory is read at each
change that the kernel tells of, and every POLL_S. A process that is stopped (SIGSTOP) or stuck keeps its lock, and so
its keys; only etcd detects such a process.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from weakref import WeakSet

import msgspec

from shared.discovery.contract import AskOwner, Change, Entries, LeftOut, Read
from shared.discovery.directory_events import DirectoryEvents
from shared.discovery.intake import DEFAULT, Intake, IntakeLimits
from shared.discovery.key_feed import listed
from shared.discovery.key_view import KeyView
from shared.errors import MALFORMED, ConfigError, DiscoveryDown
from shared.rate_limited_log import RateLimitedLog
from shared.regular_file import ownership_fault

POLL_S = 0.25
"""Seconds after which the directory is read again, whatever the kernel tells."""

_log = logging.getLogger(__name__)
_FILE = msgspec.json.Decoder(dict[str, str])


class FileLease:
    """The files of one lease. Its methods block, and raise OSError."""

    def __init__(self, directory: Path) -> None:
        while True:
            self._lock = directory / f"{time.time_ns():020d}-{secrets.token_hex(4)}.lock"
            self._descriptor = os.open(self._lock, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            if self.held:
                return
            os.close(self._descriptor)  # another process swept it between the two calls

    @property
    def held(self) -> bool:
        """Whether the lock file that others see is still ours."""
        try:
            return self._lock.stat().st_ino == os.fstat(self._descriptor).st_ino
        except FileNotFoundError:
            return False

    @property
    def written(self) -> bool:
        """Whether others find the file with the keys."""
        return self._lock.with_suffix(".json").exists()

    def write(self, entries: Mapping[str, bytes]) -> None:
        content = msgspec.json.encode({key: value.decode() for key, value in entries.items()})
        aside = self._lock.with_suffix(".tmp")
        aside.touch(0o600)
        aside.write_bytes(msgspec.json.format(content))
        aside.replace(self._lock.with_suffix(".json"))

    def close(self) -> None:
        _remove(self._lock)
        os.close(self._descriptor)


def _remove(lock: Path) -> None:
    """Delete the files of a lease, the lock last: while it exists, some process owns or sweeps the others."""
    for suffix in (".json", ".tmp", ".lock"):
        lock.with_suffix(suffix).unlink(missing_ok=True)


def _dead(lock: Path, mode: int) -> int | None:
    """Lock a file in `mode`. Return the descriptor that holds the lock; None if another process holds it."""
    descriptor = os.open(lock, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def sweep(directory: Path) -> None:
    """Delete the files of dead owners."""
    for lock in list(directory.glob("*.lock")):
        with suppress(FileNotFoundError):
            descriptor = _dead(lock, fcntl.LOCK_EX)
            if descriptor is not None:
                _remove(lock)
                os.close(descriptor)


def scan(directory: Path) -> dict[str, bytes]:
    """Return the keys and values of all live leases, oldest first."""
    found: dict[str, bytes] = {}
    for file in sorted(directory.glob("*.json")):
        try:
            descriptor = _dead(file.with_suffix(".lock"), fcntl.LOCK_SH)
            if descriptor is not None:
                os.close(descriptor)
                continue
            content = _FILE.decode(file.read_bytes())
        except (FileNotFoundError, *MALFORMED):
            continue  # just deleted; or not our file, since ours are replaced as a whole
        found.update({key: value.encode() for key, value in content.items()})
    return found


class FileRegistration:
    """Keys in one lease. A task restores the files, which other programs may delete.

    The files are small and local. They are written in the event loop, so that no write stays half done.
    """

    def __init__(self, directory: Path, entries: Entries) -> None:
        self._directory = directory
        self._entries = entries
        self.epoch = 1
        self.wanted: Mapping[str, bytes] = {}
        """The keys and values that `entries` returned last."""
        self._lease: FileLease | None = None
        self._task = asyncio.create_task(self._look_after(), name="file-registration")

    async def publish(self) -> None:
        while True:
            if self._write():
                return
            await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        self.wanted = {}
        self._task.cancel()
        await asyncio.wait((self._task,))
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    def _write(self) -> bool:
        """Publish, under a new lease if there is none. Return False if the directory cannot be written."""
        wanted = self.wanted = dict(self._entries(self.epoch))
        try:
            if self._lease is None:
                _make(self._directory)
                self._lease = FileLease(self._directory)
            self._lease.write(wanted)
        except OSError as wrong:
            _log.warning("discovery: %s", wrong)
            return False
        return True

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            if self._lease is not None and not self._lease.held:
                self._lease.close()
                self._lease = None
                self.epoch += 1
            if self._lease is None or not self._lease.written:
                self._write()


class FileDiscovery:
    """One process's endpoint at a directory, which all processes of one user on one machine share."""

    def __init__(self, directory: Path, *, limits: IntakeLimits = DEFAULT) -> None:
        self._directory = directory
        self._limits = limits
        self._left_out = RateLimitedLog()
        try:
            _make(directory)
            sweep(directory)
        except OSError as wrong:
            raise ConfigError(f"discovery: {directory}: {wrong.strerror}") from None
        self._closed = False
        self._watches: set[DirectoryEvents] = set()
        self._registrations: WeakSet[FileRegistration] = WeakSet()

    async def register(self, entries: Entries) -> FileRegistration:
        registration = FileRegistration(self._directory, entries)
        self._registrations.add(registration)
        async with AsyncExitStack() as unpublished:
            unpublished.push_async_callback(registration.close)
            await registration.publish()
            unpublished.pop_all()
        return registration

    async def watch(
        self, prefix: str, *, ask_owner: AskOwner | None = None, read: Read | None = None
    ) -> AsyncGenerator[Change]:
        """`ask_owner` is never called: a lock is a proof."""
        del ask_owner
        view = KeyView(ttl_s=0.0)
        intake = Intake(read, self._limits)
        counted = 0
        events = DirectoryEvents(self._directory)
        self._watches.add(events)
        try:
            while not self._closed:
                events.watch()
                with suppress(DiscoveryDown):
                    intake.load(await self._found(prefix))
                    left_out = intake.left_out
                    if left_out.count > counted:
                        yield LeftOut(left_out.count - counted, left_out.key, left_out.why)
                        counted = left_out.count
                    now = time.monotonic()
                    for change in view.update(now, intake.entries, 0):
                        yield change
                    for change in view.apply_owner_answers(now, dict.fromkeys(view.keys_to_verify(now), "gone")):
                        yield change
                await events.wait(POLL_S)
        finally:
            self._watches.discard(events)
            events.close()

    def publishes(self, key: str) -> bool:
        return any(key in registration.wanted for registration in self._registrations)

    async def list(self, prefix: str) -> dict[str, bytes]:
        intake = Intake(limits=self._limits)
        intake.load(await self._found(prefix))
        return listed(intake, self._left_out)

    async def _found(self, prefix: str) -> dict[str, bytes]:
        try:
            found = await asyncio.to_thread(scan, self._directory)
        except OSError as wrong:
            raise DiscoveryDown(f"discovery: {wrong}") from None
        return {key: value for key, value in found.items() if key.startswith(prefix)}

    async def close(self) -> None:
        self._closed = True
        for events in self._watches:
            events.wake()


def _make(directory: Path) -> None:
    """Create the directory. Raise ConfigError if others can write to it, since they could invent instances."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if wrong := ownership_fault(directory.stat(), "directory", "write to"):
        raise ConfigError(f"discovery: {directory} {wrong}")
