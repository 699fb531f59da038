"""What a frontend asks the program that decodes images, and the program's limits. Pure.

Apart from the program, so that no frontend loads its library's decoders.
"""

from __future__ import annotations

import hashlib
import math

import msgspec
import PIL
from msgspec import Struct
from msgspec.structs import replace

from shared.messages.cards import ImageInput

CPU_LIMIT_S = 10.0
"""Seconds of processor time that one image may take."""
MEMORY_LIMIT_BYTES = 1 << 30
"""Bytes of address space; Python and the library take 100 MB of it."""


class PictureShape(Struct, frozen=True):
    """How an image is prepared from which a picture is made: turned upright, and resized."""

    width: int
    """The width in pixels. Together with `height` it only says how many pixels an image has that keeps its shape."""
    height: int
    multiple: int
    """The width and height are multiples of it."""
    most_side: int
    """Most pixels of a side."""
    keeps_shape: bool = False
    """Whether the image keeps its shape, as far as `multiple` allows."""
    is_mask: bool = False
    """True if it becomes a mask: white where the file is transparent, or as the file if it has no transparency."""

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of an image that has these before."""
        if not self.keeps_shape:
            return self.width, self.height
        scale = math.sqrt(self.width * self.height / (width * height))
        most = min(self.width * self.height, self.most_side * self.multiple) // self.multiple  # also of narrow images
        most = most // self.multiple * self.multiple
        across, down = (
            min(most, max(self.multiple, int(side * scale) // self.multiple * self.multiple))
            for side in (width, height)
        )
        return across, down


class Prepare(Struct, frozen=True):
    """Decode an image and prepare it."""

    source: bytes
    key: bytes
    """Its key, by `key_of`. Empty if a picture is made from it."""
    stated: str
    """The media type that its sender states. Empty if there is none."""
    wanted: ImageInput | None
    """How a model that sees takes it. None if a picture is made from it."""
    pixels_limit: int
    """The largest number of pixels, decoded or resized."""
    prepared_limit: int
    """The largest number of bytes of the pixels that a model sees."""
    shape: PictureShape | None = None
    """How a picture is made from it."""
    size_only: bool = False
    """Whether the size that a model sees is asked for alone, for which the header is read and nothing is decoded."""

    def without_source(self) -> Prepare:
        """Return what is asked, of an empty source."""
        return replace(self, source=b"")


class Prepared(Struct, frozen=True):
    """The image as its model takes it, or why there is none."""

    key: bytes = b""
    """The image's key, which `Image.key` of `shared.messages.generate` explains."""
    pixels: bytes = b""
    """Its prepared pixels, in the form of `Image.pixels`; or a PNG file, as `Picture.images` and `Picture.mask`. Empty
    if its size was asked for alone."""
    width: int = 0
    """The width of what is prepared, in pixels."""
    height: int = 0
    shape: tuple[int, int] = (0, 0)
    """The width and height that the source had, upright."""
    wrong: str = ""
    """What is wrong with the image: the rest of a sentence. Empty if nothing is."""


def key_of(source: bytes, wanted: ImageInput) -> bytes:
    """Return the key of an image that a model sees: of its file and of all that has prepared it."""
    size = f"{wanted.width} {wanted.height} {wanted.resize} {wanted.filter}"
    if wanted.unit:
        size = f"{wanted.unit} {wanted.least_pixels} {wanted.most_pixels} {wanted.filter}"
    digest = hashlib.sha256(f"headrace 2, Pillow {PIL.__version__}, {size}\n".encode())
    digest.update(source)
    return digest.digest()


PREPARE = msgspec.msgpack.Decoder(Prepare)
PREPARED = msgspec.msgpack.Decoder(Prepared)
