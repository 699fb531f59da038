"""MediaStore: files of pictures and videos in `media.directory`.

    keep, receive ──▶ under another name, then renamed ──▶ served to the key that made it ──▶ removed after `kept_s`

Frontends with the same directory serve one another's files. Each removes what has expired; a file that another one has
removed is gone. Reading and writing is done in threads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Struct

from services.frontend.config import MediaConfig
from services.frontend.media.files import (
    CONTENT_TYPES,
    ID,
    MEDIA_PATH,
    NAME,
    UNFINISHED,
    KeptFile,
    expired,
    guessed_bytes,
    room_fault,
)
from services.frontend.protocol.errors import field_error
from shared.errors import MALFORMED, InvalidRequest, Overloaded, Unavailable
from shared.messages.generate import Picture

SWEEP_S = 60.0
"""Seconds between two looks for files that have expired, unless they are kept for less."""
FULL_RETRY_S = 60.0

_log = logging.getLogger(__name__)


class Owner(Struct, frozen=True):
    """The file next to a picture's."""

    key: str
    """The name of the API key that made it. Empty without keys."""


class IncomingFile:
    """A file of which parts come, one after the other, and perhaps again from an earlier byte on. Its methods block,
    and may be called in threads whose caller has gone."""

    def __init__(self, directory: Path) -> None:
        """Nothing is written before the first part."""
        self._directory = directory
        self._file: IO[bytes] | None = None
        self._closed = False
        self._lock = threading.Lock()
        """Held while the file is used, so that it is not closed meanwhile."""
        self.name = ""
        """What it is called until it is complete. Empty before the first part."""
        self.size_bytes = 0

    def put(self, first: int, content: bytes) -> None:
        """Write what begins at the byte `first`, and forget what came after it. Raise OSError."""
        with self._lock:
            if self._closed:
                return
            if self._file is None:
                self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                descriptor, path = tempfile.mkstemp(dir=self._directory, prefix=UNFINISHED)
                self._file, self.name = os.fdopen(descriptor, "wb"), Path(path).name
            self._file.seek(first)
            self._file.write(content)
            self._file.truncate()
            self.size_bytes = first + len(content)

    def rename(self, name: str) -> None:
        """Give the file its name. Raise OSError."""
        with self._lock:
            if self._file is not None and not self._closed:
                self._file.flush()
                (self._directory / self.name).rename(self._directory / name)

    def close(self) -> None:
        """Close it, and remove it if it has no name yet."""
        with self._lock, suppress(OSError):
            self._closed = True
            if self._file is not None:
                (self._directory / self.name).unlink(missing_ok=True)
                self._file.close()


class MediaStore:
    """The files of one directory. Without `media.directory` nothing is kept."""

    def __init__(self, config: MediaConfig, base_url: Callable[[], str]) -> None:
        """`base_url` returns the URL of this frontend's API, without its /v1."""
        self.config = config
        self._base_url = base_url
        self.directory = Path(config.directory) if config.directory else None
        self._writing = asyncio.Lock()

    def check(self, param: str) -> None:
        """Raise InvalidRequest that names the parameter if no files are kept."""
        if self.directory is None:
            raise field_error(
                param, "this server keeps no files: set media.directory of its frontends", "unsupported_value"
            )

    async def check_room(self, pictures: Sequence[Picture]) -> None:
        """Check, before pictures or videos are computed, that there is room for files of about their size. It is not
        kept for them. Raise Overloaded if the directory is full, and Unavailable if it cannot be read."""
        try:
            held = await asyncio.to_thread(self._list)
        except OSError as wrong:
            raise Unavailable(f"media.directory cannot be read: {wrong.strerror}") from None
        if fault := room_fault(held, sum(map(guessed_bytes, pictures)), self.config.bytes):
            raise Overloaded(fault, retry_after_s=FULL_RETRY_S)

    def url_of(self, name: str) -> str:
        """Return the URL of a file."""
        return f"{self.config.base_url or self._base_url()}{MEDIA_PATH}/{name}"

    async def keep(self, content: bytes, kind: str, key: str) -> str:
        """Keep a picture for a key. Return its URL. Raise Overloaded if the directory is full, and Unavailable."""
        name = f"picture_{secrets.token_hex(16)}"
        await self.write({f"{name}.json": msgspec.json.encode(Owner(key)), f"{name}.{kind}": content})
        return self.url_of(f"{name}.{kind}")

    async def write(self, files: dict[str, bytes], *, bounded: bool = True) -> None:
        """Write files, in this order; each is there at once. Raise Overloaded if the directory is full, unless they are
        not `bounded`, and Unavailable if it cannot be written."""
        async with self._writing:
            try:
                await asyncio.to_thread(self._write, files, bounded)
            except OSError as wrong:
                raise Unavailable(f"media.directory cannot be written: {wrong.strerror}") from None

    def _write(self, files: dict[str, bytes], bounded: bool) -> None:
        assert self.directory is not None
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        others = (each for each in self._list() if each.name not in files)
        if bounded and (fault := room_fault(others, sum(map(len, files.values())), self.config.bytes)):
            raise Overloaded(fault, retry_after_s=FULL_RETRY_S)
        for name, content in files.items():
            descriptor, temporary = tempfile.mkstemp(dir=self.directory, prefix=UNFINISHED)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(content)
                Path(temporary).rename(self.directory / name)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise

    @contextmanager
    def receive(self) -> Iterator[IncomingFile]:
        """Take a file that comes in parts; it is there after `complete`, or else gone with the context."""
        assert self.directory is not None
        file = IncomingFile(self.directory)
        try:
            yield file
        finally:
            asyncio.get_running_loop().run_in_executor(None, file.close)  # a thread may still write

    async def complete(self, file: IncomingFile, name: str) -> None:
        """Give a file that has come its name. Raise Overloaded if the directory is full, and OSError."""
        async with self._writing:
            await asyncio.to_thread(self._complete, file, name)

    def _complete(self, file: IncomingFile, name: str) -> None:
        others = (each for each in self._list() if each.name != file.name)
        if fault := room_fault(others, file.size_bytes, self.config.bytes):
            raise Overloaded(fault, retry_after_s=FULL_RETRY_S)
        file.rename(name)

    async def find(self, name: str, key: str) -> Path:
        """Return the path of a picture that a key has made. Raise InvalidRequest with 404 for all else, also for one
        that another key has made."""
        match = NAME.fullmatch(name)
        if self.directory is not None and match is not None and match["kind"] in CONTENT_TYPES:
            path = self.directory / name
            owner = await asyncio.to_thread(self.read, f"{match['id']}.json")
            with suppress(*MALFORMED):
                if owner is not None and msgspec.json.decode(owner, type=Owner).key == key and path.is_file():
                    return path
        raise InvalidRequest(f"no such file: {name[:64]}", param="name", code="file_not_found", status=404)

    def read(self, name: str) -> bytes | None:
        """Return the content of a file. None if it is gone. Blocks."""
        assert self.directory is not None
        try:
            return (self.directory / name).read_bytes()
        except OSError:
            return None

    def has(self, name: str) -> bool:
        """Return whether there is such a file. Blocks."""
        assert self.directory is not None
        return (self.directory / name).exists()

    async def remove(self, name: str, *, but: Collection[str] = ()) -> None:
        """Remove all files of a name, but those with these endings."""
        assert ID.fullmatch(name)
        await asyncio.to_thread(self._remove, name, but)

    def _remove(self, name: str, but: Collection[str]) -> None:
        assert self.directory is not None
        for path in self.directory.glob(f"{name}.*"):
            if path.suffix[1:] not in but:
                path.unlink(missing_ok=True)

    async def run(self) -> None:
        """Remove what expires, until cancelled."""
        while self.directory is not None:
            try:
                await asyncio.to_thread(self.sweep, time.time())
            except OSError as wrong:  # such as of a network's file system; requests for files say so themselves
                _log.error("media.directory cannot be read: %s", wrong)
            await asyncio.sleep(min(SWEEP_S, self.config.kept_s))

    def sweep(self, now_s: float) -> None:
        """Remove what has expired. Blocks."""
        assert self.directory is not None
        for each in expired(self._list(), now_s, self.config.kept_s):
            with suppress(OSError):
                (self.directory / each.name).unlink()

    def names(self) -> list[str]:
        """Return the names of all files, newest first. Blocks."""
        return [each.name for each in sorted(self._list(), key=lambda each: -each.changed_s)]

    def _list(self) -> list[KeptFile]:
        assert self.directory is not None
        found: list[KeptFile] = []
        with suppress(FileNotFoundError), os.scandir(self.directory) as entries:
            for entry in entries:
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    found.append(KeptFile(entry.name, status.st_size, status.st_mtime))
        return found
