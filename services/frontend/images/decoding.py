"""What a frontend asks the program that decodes images, and the program's limits. Pure.

Apart from the program, so that no frontend loads its library's decoders.
"""

from __future__ import annotations

import hashlib

import msgspec
import PIL
from msgspec import Struct
from msgspec.structs import replace

from shared.messages.cards import ImageInput

CPU_LIMIT_S = 10.0
"""Seconds of processor time that one image may take."""
MEMORY_LIMIT_BYTES = 1 << 30
"""Bytes of address space; Python and the library take 100 MB of it."""


class Prepare(Struct, frozen=True):
    """Decode an image and prepare it."""

    source: bytes
    key: bytes
    """Its key, by `key_of`."""
    stated: str
    """The media type that its sender states. Empty if there is none."""
    wanted: ImageInput
    pixels_limit: int
    """The largest number of pixels, decoded or resized."""

    def without_source(self) -> Prepare:
        """Return what is asked, of an empty source."""
        return replace(self, source=b"")


class Prepared(Struct, frozen=True):
    """The image as its model takes it, or why there is none."""

    key: bytes = b""
    """The image's key, which `Image.key` of `shared.messages.generate` explains."""
    pixels: bytes = b""
    """Its prepared pixels, in the form of `Image.pixels`."""
    wrong: str = ""
    """What is wrong with the image: the rest of a sentence. Empty if nothing is."""


def key_of(source: bytes, wanted: ImageInput) -> bytes:
    """Return the key of an image: of its file and of all that has prepared it."""
    how = f"headrace 1, Pillow {PIL.__version__}, {wanted.width} {wanted.height} {wanted.resize} {wanted.filter}\n"
    digest = hashlib.sha256(how.encode())
    digest.update(source)
    return digest.digest()


PREPARE = msgspec.msgpack.Decoder(Prepare)
PREPARED = msgspec.msgpack.Decoder(Prepared)
