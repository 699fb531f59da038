"""Images for tests, and what is wrong with some."""

from __future__ import annotations

import base64
import io
import struct
import zlib

from PIL import Image


def picture(kind: str = "PNG", size: tuple[int, int] = (8, 6), colour: int = 0) -> bytes:
    """Return an image file of one colour."""
    out = io.BytesIO()
    Image.new("RGB", size, (colour, 128, 255 - colour)).save(out, kind)
    return out.getvalue()


def animated_webp() -> bytes:
    out = io.BytesIO()
    pictures = [Image.new("RGB", (4, 4), colour) for colour in ("red", "green", "blue")]
    pictures[0].save(out, "WEBP", save_all=True, append_images=pictures[1:])
    return out.getvalue()


def animated_png(*, hides: bool) -> bytes:
    """Return an animated PNG of a red and a green picture. With `hides` programs that know no animations show a blue
    one."""
    out = io.BytesIO()
    still, *frames = [Image.new("RGB", (8, 6), colour) for colour in ("blue", "red", "green")]
    first, rest = (still, frames) if hides else (frames[0], frames[1:])
    first.save(out, "PNG", save_all=True, append_images=rest, default_image=hides)
    return out.getvalue()


def gif_of(frames: int) -> bytes:
    """Return a GIF with this many frames."""
    file = picture("GIF")
    begins = 13 + 3 * 2 ** ((file[10] & 7) + 1)  # after the table of colours
    return file[:begins] + file[begins:-1] * frames + b";"


def png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_of_size(width: int, height: int) -> bytes:
    """Return a PNG that says it has this size, and has some rows of it: a bomb has all, in as few bytes."""
    head = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    rows = zlib.compress(bytes(1 + (width + 7) // 8) * min(height, 100))
    return b"\x89PNG\r\n\x1a\n" + head + png_chunk(b"IDAT", rows) + png_chunk(b"IEND", b"")


def png_of_row(width: int, bits: int, colours: int, row: bytes, before: bytes = b"", after: bytes = b"") -> bytes:
    """Return a PNG of one row, with chunks before and after its pixels. `colours` is its colour type: 0 is grey, 2 is
    RGB, 3 has a palette."""
    head = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, 1, bits, colours, 0, 0, 0))
    pixels = png_chunk(b"IDAT", zlib.compress(b"\0" + row))
    return b"\x89PNG\r\n\x1a\n" + head + before + pixels + after + png_chunk(b"IEND", b"")


def png_clear(*levels: int) -> bytes:
    """Return the tRNS chunk that makes a level of grey transparent, or a colour of three levels."""
    return png_chunk(b"tRNS", struct.pack(f">{len(levels)}H", *levels))


def data_uri(file: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><rect width="9" height="9"/></svg>'
