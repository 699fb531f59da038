"""The cache of Hugging Face's tools, in which models of a hub are kept.

    HF_HUB_CACHE/models--ORG--NAME/
      blobs/DIGEST                   a file, there only when its size and digest are right
      blobs/DIGEST.incomplete        a part of it; the next start continues there
      snapshots/COMMIT/FILE          a link to its blob; the model's directory
      refs/main                      the commit of a branch or tag, written when all files are there
    HF_HUB_CACHE/.locks/models--ORG--NAME/headrace.lock      held while files are fetched

The layout is that of https://huggingface.co/docs/hub/local-cache, so other tools find these files, and we find theirs.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import constants

from deploy.local.stack.hub_files import HubFile, HubModel, is_commit
from shared.errors import ModelError

HEAD_LIMIT_BYTES = 16 << 20
"""The largest head of a safetensors file that is fetched for the check. The worker refuses a larger one."""


class HubCache:
    """The part of the cache that belongs to one repository."""

    def __init__(self, model: HubModel) -> None:
        """Name the repository's directories. Nothing is made before `lock_file`."""
        self._cache = Path(constants.HF_HUB_CACHE).absolute()
        self._folder = "--".join(("models", *model.repository.split("/")))

    def blob(self, file: HubFile) -> Path:
        """Return the path of a file that is whole."""
        return self._cache / self._folder / "blobs" / file.digest

    def part(self, file: HubFile) -> Path:
        """Return the path of what was fetched of a file that is not whole yet."""
        return self.blob(file).with_suffix(".incomplete")

    def part_bytes(self, file: HubFile) -> int:
        """Return the length of that part."""
        part = self.part(file)
        return part.stat().st_size if part.is_file() else 0

    def has(self, file: HubFile) -> bool:
        """Return whether the whole file is there."""
        return self.blob(file).is_file()

    def here(self, file: HubFile) -> Path:
        """Return the file, or the part of it that was fetched."""
        return self.blob(file) if self.has(file) else self.part(file)

    def snapshot(self, commit: str) -> Path:
        """Return the directory of a commit's files."""
        return self._cache / self._folder / "snapshots" / commit

    def commit_of(self, revision: str) -> str:
        """Return the commit that a branch or tag had when it was fetched; empty if it never was."""
        try:
            commit = self._ref(revision).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return ""
        return commit if is_commit(commit) else ""

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
        except OSError as wrong:
            raise ModelError(f"{self._cache}: {wrong.strerror}; HF_HOME names another directory") from None
        return locks / "headrace.lock"

    def accept(self, model: HubModel, file: HubFile, digest: str) -> None:
        """Give a fetched file its name. Raises ModelError, and removes it, if the hub has announced another digest."""
        part = self.part(file)
        if digest != file.digest:
            part.unlink()
            raise ModelError(f"{model}: {file.name} does not have the digest that the hub announced; it is removed")
        part.replace(self.blob(file))

    def link(self, commit: str, files: Iterable[HubFile]) -> Path:
        """Link the files into the snapshot of a commit, and return its directory."""
        for file in files:
            link = self.snapshot(commit) / file.name
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.is_file():
                link.unlink(missing_ok=True)
                link.symlink_to(os.path.relpath(self.blob(file), link.parent))
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


def format_size(size_bytes: int) -> str:
    """Return a size as people read it."""
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"
