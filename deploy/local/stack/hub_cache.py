"""The cache of Hugging Face's tools, in which models of a hub are kept.

    HF_HUB_CACHE/models--ORG--NAME/
      blobs/DIGEST                   a file, put there when its digest is right. Of another tool's, the size counts
      blobs/DIGEST.headrace.incomplete     a part of it, which a fetch has left; the next one takes it over
      blobs/DIGEST.headrace-HOST-PID-PROCESS-FETCH.incomplete       a part that a fetch writes now
      snapshots/COMMIT/FILE          a link to its blob; the model's directory
      .no_exist/COMMIT/FILE          empty: the repository has no such file at this commit
      refs/main                      the commit of a branch or tag, written when all files are there
    HF_HUB_CACHE/.locks/models--ORG--NAME/headrace.lock      held while files are fetched

The layout is that of https://huggingface.co/docs/hub/local-cache, so other tools find these files, and we find theirs.
On some file systems a lock is granted to everyone (NFS, Lustre, FUSE, as they are mounted). Therefore each fetch writes
parts of its own: without a lock two processes fetch the same file twice, and neither writes into the other's.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from huggingface_hub import constants

from deploy.local.stack.hub_files import HubFile, HubModel, is_commit
from shared.errors import ModelError

HEAD_LIMIT_BYTES = 16 << 20
"""The largest head of a safetensors file that is fetched for the check. The worker refuses a larger one."""
ABANDONED_S = 3600.0
"""Seconds without a write after which a part of another host's process is taken over. One that writes is never silent
for so long; a process of this host is looked up instead."""
_PROCESS = secrets.token_hex(4)
"""A mark of this process. In a container, a process may have the host name and PID of one that was killed."""
_PART = re.compile(
    r"[0-9a-f]+\.headrace(?:-(?P<host>.*)-(?P<pid>\d+)-(?P<process>[0-9a-f]{8})-[0-9a-f]{8})?\.incomplete"
)


class HubCache:
    """The part of the cache that belongs to one repository."""

    def __init__(self, model: HubModel) -> None:
        """Name the repository's directories. Nothing is made before `lock_file`."""
        self._cache = Path(constants.HF_HUB_CACHE).absolute()
        self._folder = "--".join(("models", *model.repository.split("/")))
        self._writer = f"headrace-{socket.gethostname()}-{os.getpid()}-{_PROCESS}-{secrets.token_hex(4)}"
        self._parts: dict[str, Path] = {}
        """Digest → the part that this fetch has made or taken over."""
        self._taken_over = set[str]()
        """The digests of the parts that were taken over."""

    def blob(self, file: HubFile) -> Path:
        """Return the path of a file that is whole."""
        return self._cache / self._folder / "blobs" / file.digest

    def part(self, file: HubFile) -> Path:
        """Return the path of what was fetched of a file that is not whole yet. Only this fetch writes there.

        The first call takes over the largest part that another fetch has left, and removes the others.
        """
        part = self._parts.get(file.digest)
        if part is None:
            part = self._parts[file.digest] = self.blob(file).with_suffix(f".{self._writer}.incomplete")
            for size_bytes, left in sorted(self._left(file), reverse=True):
                with suppress(FileNotFoundError):  # another process has taken it over
                    if size_bytes > file.size_bytes or part.exists():
                        left.unlink()
                    else:
                        left.rename(part)
                        self._taken_over.add(file.digest)
        return part

    def _left(self, file: HubFile) -> list[tuple[int, Path]]:
        """Return the parts of a file that no process writes any more, with their sizes."""
        left: list[tuple[int, Path]] = []
        for path in self.blob(file).parent.glob(f"{file.digest}.headrace*"):
            with suppress(FileNotFoundError):
                status, match = path.stat(), _PART.fullmatch(path.name)
                if match and _is_abandoned(match, status.st_mtime):
                    left.append((status.st_size, path))
        return left

    def close(self) -> None:
        """Give this fetch's parts the name under which the next fetch finds them."""
        while self._parts:
            digest, part = self._parts.popitem()
            with suppress(FileNotFoundError):  # it has become a blob
                part.rename(part.with_name(f"{digest}.headrace.incomplete"))

    def part_bytes(self, file: HubFile) -> int:
        """Return the length of that part."""
        part = self.part(file)
        return part.stat().st_size if part.is_file() else 0

    def has(self, file: HubFile) -> bool:
        """Return whether the whole file is there. One of another size than the hub says is not."""
        blob = self.blob(file)
        return blob.is_file() and blob.stat().st_size == file.size_bytes

    def here(self, file: HubFile) -> Path:
        """Return the file, or the part of it that was fetched."""
        return self.blob(file) if self.has(file) else self.part(file)

    def snapshot(self, commit: str) -> Path:
        """Return the directory of a commit's files."""
        return self._cache / self._folder / "snapshots" / commit

    def is_writable(self, commit: str) -> bool:
        """Return whether files can be added to a commit that is here."""
        return all(os.access(each, os.W_OK) for each in (self.snapshot(commit), self._cache / self._folder))

    def commit_of(self, revision: str) -> str:
        """Return the commit that a branch or tag had when it was fetched; empty if it never was."""
        try:
            commit = self._ref(revision).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return ""
        return commit if is_commit(commit) else ""

    def unknown(self, commit: str, names: Iterable[str]) -> list[str]:
        """Return the names of the files of a commit that are not here, although the repository may have them."""
        absent = self._cache / self._folder / ".no_exist" / commit
        return [name for name in names if not ((self.snapshot(commit) / name).is_file() or (absent / name).is_file())]

    def note_absent(self, commit: str, names: Iterable[str]) -> None:
        """Note that the repository has no files of these names at a commit, which never changes."""
        for name in names:
            absent = self._cache / self._folder / ".no_exist" / commit / name
            absent.parent.mkdir(parents=True, exist_ok=True)
            absent.touch()

    def set_commit(self, revision: str, commit: str) -> None:
        """Note the commit that a branch or tag has now. The file is replaced atomically."""
        if revision == commit or self.commit_of(revision) == commit:
            return
        ref = self._ref(revision)
        ref.parent.mkdir(parents=True, exist_ok=True)
        fresh = ref.with_name(f".{ref.name}.headrace")
        fresh.write_text(commit, encoding="ascii")
        fresh.replace(ref)

    def _ref(self, revision: str) -> Path:
        return self._cache / self._folder / "refs" / revision

    def lock_file(self) -> Path:
        """Return the lock of those that fetch, after making the directories."""
        try:
            (self._cache / self._folder / "blobs").mkdir(parents=True, exist_ok=True)
            locks = self._cache / ".locks" / self._folder
            locks.mkdir(parents=True, exist_ok=True)
            (lock := locks / "headrace.lock").touch()
        except OSError as wrong:
            raise ModelError(f"{self._cache}: {wrong.strerror}; HF_HOME names another directory") from None
        return lock

    def take_in(self, commit: str, files: Iterable[HubFile]) -> None:
        """Make blobs of files of a commit that are no links, as some tools keep them where there can be none.

        One with another content than the hub announces is no such file.
        """
        for file in files:
            path = self.snapshot(commit) / file.name
            if self.has(file) or path.is_symlink() or not path.is_file() or path.stat().st_size != file.size_bytes:
                continue
            with path.open("rb") as content:
                digest = hashlib.file_digest(content, file.new_hash).hexdigest()
            if digest == file.digest:
                with suppress(OSError):  # the file system has no hard links: then it is fetched
                    self.blob(file).hardlink_to(path)

    def accept(self, model: HubModel, file: HubFile, digest: str) -> bool:
        """Give a fetched file its name, if it has the size and digest that the hub has announced; else remove it.

        Return False if an earlier fetch has begun the removed file: a power cut may have torn that part. Raises
        ModelError if this fetch has.
        """
        part = self.part(file)
        if digest == file.digest and part.stat().st_size == file.size_bytes:
            part.replace(self.blob(file))
            return True
        part.unlink()
        if file.digest not in self._taken_over:
            raise ModelError(f"{model}: {file.name} does not have the digest that the hub announced; it is removed")
        self._taken_over.remove(file.digest)
        return False

    def link(self, commit: str, files: Iterable[HubFile]) -> Path:
        """Link the files into the snapshot of a commit, and return its directory. Parts of them that were left go."""
        for file in files:
            link, blob = self.snapshot(commit) / file.name, self.blob(file)
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_file() or not link.samefile(blob):
                link.unlink(missing_ok=True)
                link.symlink_to(os.path.relpath(blob, link.parent))
            for _, left in self._left(file):
                left.unlink(missing_ok=True)
        return self.snapshot(commit)

    def head_bytes(self, file: HubFile) -> int:
        """Return the length of a safetensors file's head, whose first eight bytes are there; 8 if it is too long."""
        with self.here(file).open("rb") as part:
            length = 8 + int.from_bytes(part.read(8), "little")
        return length if length <= min(file.size_bytes, HEAD_LIMIT_BYTES) else min(8, file.size_bytes)

    def preview(self, directory: Path, small: Iterable[HubFile], heavy: Iterable[HubFile]) -> None:
        """Fill a directory with the small files, and with files of the weights' sizes that have only their heads."""
        for file in small:
            link = directory / file.name
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(self.blob(file))
        for file in heavy:
            with self.here(file).open("rb") as source, (directory / file.name).open("wb") as sparse:
                sparse.write(source.read(self.head_bytes(file)))
                sparse.truncate(file.size_bytes)

    def check_room(self, model: HubModel, files: Iterable[HubFile]) -> None:
        """Raise ModelError if the disk has no room for what is missing of these files."""
        missing = [file for file in files if not self.has(file)]
        needed = sum(file.size_bytes - self.part_bytes(file) for file in missing)
        free = shutil.disk_usage(self._cache).free
        if needed > free:
            raise ModelError(
                f"{model}: no space left: {format_size(needed)} are to be fetched, and the disk of {self._cache} has"
                f" {format_size(free)} free; HF_HOME names another directory"
            )


@contextmanager
def disk_errors(model: HubModel) -> Iterator[None]:
    """Translate what the disk refuses into a ModelError."""
    try:
        yield
    except OSError as wrong:
        full = wrong.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "no space left" if full else f"{wrong.filename or 'the disk'}: {wrong.strerror or wrong}"
        raise ModelError(f"{model}: {what} in {constants.HF_HUB_CACHE}; HF_HOME names another directory") from None


def _is_abandoned(part: re.Match[str], written_at_s: float) -> bool:
    """Return whether the process that a part's name names writes it no more."""
    if part["host"] is None:
        return True
    if part["host"] == socket.gethostname():
        if int(part["pid"]) == os.getpid() and part["process"] != _PROCESS:
            return True
        try:
            os.kill(int(part["pid"]), 0)
        except ProcessLookupError:
            return True
        except (PermissionError, OverflowError):
            pass
    return time.time() - written_at_s > ABANDONED_S


def format_size(size_bytes: int) -> str:
    """Return a size as people read it."""
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"
