"""Which files of a media directory go, and what their names say. Pure.

picture_0123…ef.png            a file; its owner is in the file of the same name that ends in .json
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from shared.messages.generate import Picture

NAME = re.compile(r"(?P<id>(picture|video)_[0-9a-f]{32})\.(?P<kind>png|jpeg|webp|mp4|json|lock|cancel)")
LOCK = ".lock"
UNFINISHED = ".unfinished_"
"""How the name of a file begins that is being written. It is left behind if its frontend ends meanwhile."""
MEDIA_PATH = "/v1/media"
"""The path of the API below which files are."""
CONTENT_TYPES = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp", "mp4": "video/mp4"}
PIXEL_BYTES = {"png": 1.0, "jpeg": 0.2, "webp": 0.1, "mp4": 0.01}
"""Bytes of a file for each pixel of each frame, by its kind: a low guess, for files that are not made yet."""
ID = re.compile(r"(picture|video)_[0-9a-f]{32}")


class KeptFile(Struct, frozen=True):
    """A file of the directory."""

    name: str
    size_bytes: int
    changed_s: float
    """When it was written, in seconds since 1970."""


def expired(files: Sequence[KeptFile], now_s: float, kept_s: float) -> Iterator[KeptFile]:
    """Yield the files that are older than they may be. Others than ours are never touched, nor those of a job whose
    lock has not expired, however long it waits."""
    old = [each for each in files if now_s - each.changed_s > kept_s and _is_ours(each.name)]
    locks = {each.name for each in files if each.name.endswith(LOCK)} - {each.name for each in old}
    return (each for each in old if each.name.partition(".")[0] + LOCK not in locks)


def _is_ours(name: str) -> bool:
    return NAME.fullmatch(name) is not None or name.startswith(UNFINISHED)


def guessed_bytes(picture: Picture) -> int:
    """Return how large the file of a picture or video will be, about. At least 1."""
    return 1 + int(PIXEL_BYTES[picture.format] * picture.width * picture.height * max(1, picture.frames))


def room_fault(files: Iterable[KeptFile], more_bytes: int, limit_bytes: int) -> str:
    """Return why no `more_bytes` can be kept. Empty if they can."""
    held = sum(each.size_bytes for each in files)
    if held + more_bytes <= limit_bytes:
        return ""
    return (
        f"media.directory is full: {held} of {limit_bytes} bytes (media.bytes) are taken; files go after media.kept_s"
    )
