"""Decodes and prepares images for a frontend: `python -m services.frontend.images.decoder_program`.

    format by the first bytes ─▶ width and height ─▶ decoded ─▶ as people see it ─▶ resized ─▶ cut ─▶ pixels
          └── other than stated      └── too many pixels

An image from which a picture is made becomes a PNG file: as people see it, RGB or a mask in grey, resized.

As people see it: turned upright by its EXIF orientation, on white where it is transparent, with 8 bits. The pixels that
a model sees are, byte for byte, those that transformers' processors on Pillow (CLIP's, SigLIP's, Qwen2-VL's) make of
that picture before they rescale and normalise.

Only the decoder of the format that the first bytes show is tried, and only the first picture of a file is decoded.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

import msgspec
from PIL import ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError

from services.frontend.child_program import run_program
from services.frontend.images.decoding import CPU_LIMIT_S, MEMORY_LIMIT_BYTES, PREPARE, PictureShape, Prepare, Prepared
from shared.image_size import prepared_size, resized_size
from shared.messages.cards import ImageInput

_STARTS = {b"\x89PNG\r\n\x1a\n": "PNG", b"\xff\xd8\xff": "JPEG", b"GIF87a": "GIF", b"GIF89a": "GIF"}
_STATED = {
    **{"image/png": "PNG", "image/jpeg": "JPEG", "image/jpg": "JPEG", "image/webp": "WEBP", "image/gif": "GIF"},
    **dict.fromkeys(("", "application/octet-stream", "binary/octet-stream"), ""),
}
"""Each media type that may be stated, and the format that it means. Empty if it says nothing."""
_SERVED = "PNG, JPEG, WebP and GIF are served"
_KEPT_BLOCKS = 3
"""Blocks of memory, of 16 MiB each, that the library keeps for the next image: those of one with 12 million pixels.
Taking their pages again would cost a tenth of its time."""
_SMOOTH = (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.LANCZOS, Image.Resampling.HAMMING)
"""Filters whose weights have no steps: the last bit of a place in the source, which is another one if a part of it is
resized, changes no pixel."""
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""How a picture is turned upright, by its EXIF orientation."""
_FIRST_ON_ITS_SIDE = 5
"""The EXIF orientation from which on a picture's width becomes its height."""
_FEW_LEVELS = {"1": (1, 255), "L;2": (3, 85), "L;4": (15, 17)}
"""How a PNG of fewer than 8 bits of grey has them, by Pillow's name: its lightest level, and the step of each among
the pixels of 8 bits."""
_Size = tuple[int, int]
"""Width and height."""


class _Refused(Exception):
    """The image is refused; the text says why, as `Prepared.wrong`."""


def prepare(asked: Prepare) -> Prepared:
    """Return the image as its model takes it, or why there is none."""
    try:
        kind = _format(asked.source, asked.stated)
        if asked.shape is not None:
            return _picture(asked, kind, asked.shape)
        assert asked.wanted is not None
        return _seen(asked, kind, asked.wanted)
    except _Refused as wrong:
        return Prepared(wrong=str(wrong))
    except MemoryError:
        return Prepared(wrong=f"takes more than {MEMORY_LIMIT_BYTES >> 20} MiB to decode")
    except UnidentifiedImageError:  # its text has an address in this process's memory
        return Prepared(wrong="cannot be decoded: its header is damaged")
    except Exception as wrong:  # noqa: BLE001  files may be anything, and so may what the library raises
        return Prepared(wrong=f"cannot be decoded: {' '.join(str(wrong).split())[:200] or type(wrong).__name__}")


def _format(source: bytes, stated: str) -> str:
    """Return the format that the first bytes of a file show, by Pillow's name. Raise _Refused."""
    is_webp = source[:4] == b"RIFF" and source[8:12] == b"WEBP"
    found = "WEBP" if is_webp else next((name for start, name in _STARTS.items() if source.startswith(start)), "")
    if stated not in _STATED:
        raise _Refused(f"is stated to be {stated[:64]!r}; {_SERVED}")
    if not found:
        raise _Refused(f"is of another format by its first bytes; {_SERVED}")
    if _STATED[stated] not in ("", found):
        raise _Refused(f"is stated to be {stated}, but its first bytes are those of {found}")
    return found


def _seen(asked: Prepare, kind: str, wanted: ImageInput) -> Prepared:
    """Return the image as a model sees it, in RGB. Raise _Refused, and whatever Pillow raises."""
    with _checked(asked.source, kind, asked.pixels_limit) as image:
        width, height = image.size
        orientation = _orientation(image)
        if orientation >= _FIRST_ON_ITS_SIDE:
            width, height = height, width
        size, kept = _sizes(width, height, wanted, asked)
        if asked.size_only:
            return Prepared(asked.key, b"", *kept)
        rgb = _on_white(_upright(image, asked.source, orientation))
        return Prepared(asked.key, _middle(rgb, size, kept, Image.Resampling[wanted.filter]).tobytes(), *kept)


def _sizes(width: int, height: int, wanted: ImageInput, asked: Prepare) -> tuple[_Size, _Size]:
    """Return the size of a picture once it is resized, and once it is cut. Raise _Refused."""
    limit, has = asked.pixels_limit, f"has {width} by {height} pixels"
    try:
        size, kept = resized_size(wanted, width, height), prepared_size(wanted, width, height)
    except ValueError as wrong:
        raise _Refused(str(wrong)) from None
    if size[0] * size[1] > limit:
        why = f"with a shorter side of {wanted.resize}" if wanted.resize else "once it is prepared"
        raise _Refused(f"{has}, and is so narrow that it would have more than {limit} pixels (images.pixels) {why}")
    if (taken := 3 * kept[0] * kept[1]) > asked.prepared_limit:
        why = f"{taken} bytes, more than nats.payload_limit_bytes, {asked.prepared_limit}"
        raise _Refused(f"{has}; prepared, it has {kept[0]} by {kept[1]}, and {why}: send a smaller one")
    return size, kept


def _middle(image: Image.Image, size: _Size, kept: _Size, how: Image.Resampling) -> Image.Image:
    """Return the middle of an image that is resized to `size`, which has about its shape."""
    left, right, width = 0, image.width, size[0]
    if image.width > image.height and how in _SMOOTH:  # of a tall one, Pillow may then begin with the other side
        left, right, width = _columns(image.width, size[0], kept[0])
    resized = image.resize((width, size[1]), how, (left, 0, right, image.height))
    left, top = (width - kept[0]) // 2, (size[1] - kept[1]) // 2
    return resized.crop((left, top, left + kept[0], top + kept[1]))


def _columns(length: int, size: int, kept: int) -> tuple[int, int, int]:
    """Return the first column of the source that is resized, the one after the last, and how many they become.

    They are those of what is kept, if it begins and ends between two columns of the source. Otherwise they are all:
    Pillow rounds other ends, and its weights would not be those of the whole.
    """
    first = (size - kept) // 2
    (begin, rest), (end, other) = divmod(first * length, size), divmod((first + kept) * length, size)
    return (0, length, size) if first < 0 or rest or other else (begin, end, kept)


def _picture(asked: Prepare, kind: str, shape: PictureShape) -> Prepared:
    """Return the image as a PNG file, from which a picture is made. Raise _Refused, and whatever Pillow raises."""
    with _checked(asked.source, kind, asked.pixels_limit) as image:
        upright = _upright(image, asked.source, _orientation(image))
        size = shape.size_of(*upright.size)
        if not shape.is_mask:
            resized = _on_white(upright).resize(size, Image.Resampling.LANCZOS)
        elif upright.has_transparency_data:
            resized = ImageOps.invert(upright.convert("RGBA").getchannel("A")).resize(size, Image.Resampling.NEAREST)
        else:
            resized = upright.convert("L").resize(size, Image.Resampling.NEAREST)
    file = io.BytesIO()
    resized.save(file, format="PNG", compress_level=1)  # more takes many times as long, and saves little
    return Prepared(asked.key, file.getvalue(), *size, upright.size)


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation that a file states before its pixels; 1, upright, if it states none, or nonsense."""
    exif = Image.Exif()
    try:
        exif.load(image.info.get("exif", b""))
        found = exif.get(ExifTags.Base.Orientation)
    except Exception:  # noqa: BLE001  the picture may be whole all the same
        return 1
    return found if found in _TURNS else 1


def _upright(image: ImageFile.ImageFile, source: bytes, orientation: int) -> Image.Image:
    """Return the picture of a file turned upright, with 8 bits. Raise _Refused, and whatever Pillow raises."""
    decoded = _decoded_png(image, source) if image.format == "PNG" else image
    return decoded.transpose(_TURNS[orientation]) if orientation in _TURNS else decoded


def _decoded_png(image: ImageFile.ImageFile, source: bytes) -> Image.Image:
    """Return the picture of a PNG file with 8 bits, transparent where programs show it so: Pillow takes the last tRNS
    chunk in place of the first one, and its level as if pixels had as many bits. Raise as `_upright`."""
    bits = str(image.tile[0].args)
    image.load()
    image.info.pop("transparency", None)
    stated = _transparency(source)
    levels = [int.from_bytes(stated[at : at + 2], "big") for at in range(0, len(stated), 2)]
    if image.mode == "I;16":  # converted as it is, all but its darkest parts would be white
        grey = image.point(lambda level: level / 256).convert("L")
        if not levels:
            return grey
        opaque = image.convert("I").point([255 * (level != levels[0]) for level in range(1 << 16)], "L")
        return Image.merge("LA", (grey, opaque))
    if stated and image.mode == "P":
        image.info["transparency"] = stated
    elif stated and bits == "RGB;16B":  # the lower bits, which decide, are lost
        raise _Refused("is a PNG of 16 bits with a transparent colour (tRNS); send 8 bits, or an alpha channel")
    elif stated and image.mode == "RGB":
        image.info["transparency"] = tuple(level & 255 for level in levels[:3])
    elif stated and image.mode in ("1", "L"):
        most, step = _FEW_LEVELS.get(bits, (255, 1))
        image.info["transparency"] = (levels[0] & most) * step
    return image


def _transparency(source: bytes) -> bytes:
    """Return what a PNG file's first tRNS chunk says. Empty if there is none before its pixels: it has no effect
    after them."""
    return next((source[place] for kind, place in _chunks(source) if kind == b"tRNS"), b"")


def _chunks(source: bytes) -> Iterator[tuple[bytes, slice]]:
    """Yield the name of each chunk of a PNG file before its pixels, and where its content is."""
    at = 8
    while (kind := source[at + 4 : at + 8]) not in (b"", b"IDAT"):
        end = at + 8 + int.from_bytes(source[at : at + 4], "big")
        yield kind, slice(at + 8, end)
        at = end + 4


def _hides_picture(source: bytes) -> bool:
    """Return whether a PNG file has an animation without the picture that a decoder of still ones sees."""
    kinds = {kind for kind, _ in _chunks(source)}
    return b"acTL" in kinds and b"fcTL" not in kinds


def _on_white(image: Image.Image) -> Image.Image:
    """Return a picture in RGB, white where it is transparent: what is hidden from people is hidden from a model."""
    if not image.has_transparency_data:
        return image if image.mode == "RGB" else image.convert("RGB")
    clear = image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(clear, mask=clear.getchannel("A"))
    return white


def _checked(source: bytes, kind: str, pixels_limit: int) -> ImageFile.ImageFile:
    """Return an image that is not decoded yet. Raise _Refused, and whatever Pillow raises."""
    image = Image.open(io.BytesIO(source), formats=[kind])
    width, height = image.size
    if width * height > pixels_limit:
        raise _Refused(f"has {width} by {height} pixels, more than the limit of {pixels_limit} (images.pixels)")
    if kind == "WEBP" and getattr(image, "is_animated", False):
        raise _Refused("is an animated WebP; only still ones are served")
    if kind == "PNG" and _hides_picture(source):
        raise _Refused("is an animated PNG whose still picture is no frame of it; send that frame, or a still PNG")
    return image


def main() -> None:
    """Prepare images from standard input until it ends."""
    Image.MAX_IMAGE_PIXELS = None  # the limit is that of the question
    Image.core.set_blocks_max(_KEPT_BLOCKS)  # type: ignore[attr-defined]  # what PILLOW_BLOCKS_MAX sets
    run_program(
        lambda question: msgspec.msgpack.encode(prepare(PREPARE.decode(question))),
        cpu_limit_s=CPU_LIMIT_S,
        memory_limit_bytes=MEMORY_LIMIT_BYTES,
    )


if __name__ == "__main__":
    main()
