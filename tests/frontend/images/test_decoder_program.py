"""Images are prepared as transformers does, and whatever is wrong with one is one line."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import random
import struct
from typing import Any

import pytest
from msgspec.structs import replace
from PIL import ExifTags, Image, ImageOps

from services.frontend.images.decoder_program import prepare
from services.frontend.images.decoding import PictureShape, Prepare, key_of
from shared.messages.cards import ImageInput
from tests.frontend.images.golden import FOLDER, SHAPES, SIZED
from tests.frontend.images.samples import (
    SVG,
    animated_png,
    animated_webp,
    gif_of,
    picture,
    png_chunk,
    png_clear,
    png_of_row,
    png_of_size,
)

WANTED = ImageInput(token_id=1, tokens=4, width=4, height=4, resize=4, filter="BICUBIC")
UNITS = ImageInput(1, 0, 0, 0, 0, "BICUBIC", unit=8, least_pixels=256, most_pixels=1 << 14)
"""Images that keep their shape."""
GOLDEN: dict[str, str] = json.loads((FOLDER / "pixels.json").read_text())


def asked(source: bytes, stated: str = "", wanted: ImageInput = WANTED, pixels: int = 1 << 25) -> Prepare:
    return Prepare(source, key_of(source, wanted), stated, wanted, pixels, 1 << 25)


@pytest.mark.parametrize("case", GOLDEN)
def test_pixels_are_those_of_transformers_byte_for_byte(case: str) -> None:
    name, shape = case.split()
    fields = {"width": 0, "height": 0, "resize": 0, **(SHAPES | SIZED)[shape]}
    file, wanted = (FOLDER / name).read_bytes(), ImageInput(token_id=1, tokens=1, **fields)
    found = prepare(asked(file, "", wanted))
    assert not found.wrong
    assert len(found.pixels) == 3 * found.width * found.height
    assert shape in SIZED or (found.width, found.height) == (wanted.width, wanted.height)
    assert hashlib.sha256(found.pixels).hexdigest() == GOLDEN[case]
    sized = prepare(replace(asked(file, "", wanted), size_only=True))
    assert sized == replace(found, pixels=b"")


def test_the_size_of_a_file_whose_picture_is_damaged_is_in_its_header() -> None:
    cut = replace(asked(picture("PNG", (90, 60))[:60], "image/png", UNITS), size_only=True)
    found = prepare(cut)
    assert (found.width, found.height, found.pixels, found.wrong) == (88, 64, b"", "")
    assert "cannot be decoded" in prepare(replace(cut, size_only=False)).wrong


def test_a_picture_that_would_be_too_large_for_a_message_is_not_decoded() -> None:
    file = picture("PNG", (90, 60))
    fits = replace(asked(file[:60], "", UNITS), prepared_limit=3 * 88 * 64, size_only=True)
    assert not prepare(fits).wrong
    wrong = "has 90 by 60 pixels; prepared, it has 88 by 64, and 16896 bytes, more than nats.payload_limit_bytes, 16895"
    assert prepare(replace(fits, prepared_limit=3 * 88 * 64 - 1)).wrong == f"{wrong}: send a smaller one"


@pytest.mark.parametrize("filter_", ["BICUBIC", "BILINEAR", "LANCZOS"])
def test_a_picture_of_any_shape_is_cut_as_if_all_of_it_had_been_resized(filter_: str) -> None:
    """Only the columns that are kept are resized, where that leaves the bytes as they are."""
    noise = Image.frombytes("RGB", (600, 400), random.Random(filter_).randbytes(720_000))
    shapes = [
        (600, 400),
        (510, 340),
        (500, 400),
        (400, 300),
        (600, 200),
        (600, 338),
        (401, 267),
        (300, 400),
        (150, 400),
        (9, 400),
    ]
    in_part = 0
    for (width, height), cut, more in itertools.product(shapes, (28, 42), (0, 2, 5)):
        picture, file = noise.crop((0, 0, width, height)), io.BytesIO()
        picture.save(file, "PNG")
        shorter = cut + more
        longer = int(shorter * max(width, height) / min(width, height))
        size = (shorter, longer) if width <= height else (longer, shorter)
        left, top = (size[0] - cut) // 2, (size[1] - cut) // 2
        whole = picture.resize(size, Image.Resampling[filter_]).crop((left, top, left + cut, top + cut))
        wanted = ImageInput(token_id=1, tokens=1, width=cut, height=cut, resize=shorter, filter=filter_)
        assert prepare(asked(file.getvalue(), "", wanted)).pixels == whole.tobytes(), (width, height, cut, more)
        in_part += left > 0 and width > height and left * width % size[0] == 0 == (left + cut) * width % size[0]
    assert in_part >= 6


@pytest.mark.parametrize(
    ("filter_", "width", "height", "cut"),
    [("NEAREST", 1274, 26, 3), ("NEAREST", 608, 8, 28), ("BOX", 1122, 34, 28), ("BOX", 153, 17, 14)],
)
def test_with_a_filter_of_steps_all_columns_are_resized(filter_: str, width: int, height: int, cut: int) -> None:
    """Of these pictures, a part alone would become other pixels: places are rounded to the other side of a step."""
    noise, file = random.Random(1).randbytes(3 * width * height), io.BytesIO()
    picture = Image.frombytes("RGB", (width, height), noise)
    picture.save(file, "PNG")
    longer = int(cut * width / height)
    left = (longer - cut) // 2
    whole = picture.resize((longer, cut), Image.Resampling[filter_]).crop((left, 0, left + cut, cut))
    wanted = ImageInput(token_id=1, tokens=1, width=cut, height=cut, resize=cut, filter=filter_)
    assert prepare(asked(file.getvalue(), "", wanted)).pixels == whole.tobytes()


def png(image: Image.Image, **more: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", **more)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(10))
def test_a_picture_is_turned_upright_and_its_size_with_it(orientation: int, kind: str) -> None:
    stated, file = Image.Exif(), io.BytesIO()
    stated[ExifTags.Base.Orientation] = orientation
    Image.frombytes("RGB", (72, 40), random.Random(1).randbytes(72 * 40 * 3)).save(file, kind, exif=stated)
    upright = ImageOps.exif_transpose(Image.open(file))
    found = prepare(asked(file.getvalue(), "", UNITS))
    assert (found.width, found.height) == upright.size == ((40, 72) if orientation in (5, 6, 7, 8) else (72, 40))
    assert found.pixels == upright.tobytes()
    assert prepare(replace(asked(file.getvalue(), "", UNITS), size_only=True)) == replace(found, pixels=b"")


@pytest.mark.parametrize("exif", [b"Exif\0\0", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff", b"\xff" * 40])
def test_a_picture_with_broken_exif_is_as_it_is(exif: bytes) -> None:
    file = png(Image.new("RGB", (16, 16), "red"), exif=exif)
    assert prepare(asked(file, "", UNITS)).pixels == bytes((255, 0, 0)) * 256
    assert made_from(file, PictureShape(8, 8, 8, 100)).getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "RGB", "P", "L"])
def test_what_is_hidden_from_people_is_hidden_from_models(mode: str) -> None:
    """What is drawn where a picture is transparent could tell a model what people do not see."""
    if "A" in mode:
        hidden = png(Image.new(mode, (16, 16), (0,) * len(mode)))
    else:
        hidden = png(Image.new(mode, (16, 16)), transparency=(0, 0, 0) if mode == "RGB" else 0)
    assert set(prepare(asked(hidden, "", UNITS)).pixels) == {255}
    assert set(made_from(hidden, PictureShape(8, 8, 8, 100)).tobytes()) == {255}


def test_a_grey_picture_of_16_bits_keeps_its_shades() -> None:
    shades = [0, 255, 256, 32_768, 65_535]
    deep = Image.frombytes("I;16", (5, 1), b"".join(shade.to_bytes(2, "little") for shade in shades))
    wanted = ImageInput(token_id=1, tokens=1, width=5, height=1, resize=0, filter="BICUBIC")
    for file in (png(deep), png(deep, transparency=65_534)):
        assert prepare(asked(file, "", wanted)).pixels[::3] == bytes((0, 0, 1, 128, 255))
    mask = made_from(png(deep), PictureShape(5, 1, 1, 100, is_mask=True))
    assert mask.tobytes() == bytes((0, 0, 1, 128, 255))


PALETTE = png_chunk(b"PLTE", bytes((10, 10, 10, 20, 20, 20)))


@pytest.mark.parametrize(
    ("bits", "colours", "row", "before", "shown"),
    [
        (1, 0, b"\x40", png_clear(0), (255, 255)),
        (1, 0, b"\x40", png_clear(1), (0, 255)),
        (1, 0, b"\x40", png_clear(2), (255, 255)),  # the lowest bits alone count
        (2, 0, b"\x60", png_clear(1), (255, 170)),
        (2, 0, b"\x60", png_clear(2), (85, 255)),
        (2, 0, b"\x60", png_clear(6), (85, 255)),
        (4, 0, b"\x1e", png_clear(1), (255, 238)),
        (4, 0, b"\x1e", png_clear(14), (17, 255)),
        (8, 0, b"\x07\x09", png_clear(7), (255, 9)),
        (8, 0, b"\x07\x09", png_clear(0x107), (255, 9)),
        (16, 0, struct.pack(">2H", 300, 301), png_clear(300), (255, 1)),
        (16, 0, struct.pack(">2H", 32_768, 128), png_clear(128), (128, 255)),
        (16, 0, struct.pack(">2H", 0, 65_535), png_clear(0), (255, 255)),
        (8, 2, b"\x07\x07\x07\x09\x09\x09", png_clear(0x107, 7, 7), (255, 9)),
        (1, 3, b"\x40", PALETTE + png_chunk(b"tRNS", b"\0"), (255, 20)),
        (8, 0, b"\x07\x09", png_clear(7) + png_clear(9), (255, 9)),
        (1, 3, b"\x40", PALETTE + png_chunk(b"tRNS", b"\xff\0") + png_chunk(b"tRNS", b"\0"), (10, 255)),
        (8, 0, b"\x07\x09", png_chunk(b"tEXt", b"tRNS\0tRNS"), (7, 9)),
    ],
)
def test_what_a_png_of_any_depth_hides_is_hidden_and_nothing_else(
    bits: int, colours: int, row: bytes, before: bytes, shown: tuple[int, int]
) -> None:
    wanted = ImageInput(token_id=1, tokens=1, width=2, height=1, resize=0, filter="BICUBIC")
    expected = bytes(level for level in shown for _ in range(3))
    for after in (b"", png_clear(9, 9, 9) if colours != 3 else png_chunk(b"tRNS", b"\xff\xff")):
        file = png_of_row(2, bits, colours, row, before, after)
        assert prepare(asked(file, "", wanted)).pixels == expected
        assert made_from(file, PictureShape(2, 1, 1, 100)).tobytes() == expected


def test_a_mask_of_16_bits_is_white_where_its_level_is_transparent() -> None:
    file = png_of_row(2, 16, 0, struct.pack(">2H", 300, 301), png_clear(300))
    assert made_from(file, PictureShape(2, 1, 1, 100, is_mask=True)).tobytes() == b"\xff\0"


def test_a_transparent_colour_of_16_bits_is_refused_and_an_opaque_picture_is_not() -> None:
    row = struct.pack(">6H", *(0x1234, 0x1234, 0x1234), *(0x1235, 0x1235, 0x1235))
    file = png_of_row(2, 16, 2, row, png_clear(0x1234, 0x1234, 0x1234))
    why = "is a PNG of 16 bits with a transparent colour (tRNS); send 8 bits, or an alpha channel"
    assert prepare(asked(file)).wrong == why
    assert prepare(Prepare(file, b"key", "", None, 99, 0, PictureShape(8, 8, 8, 100))).wrong == why
    wanted = ImageInput(token_id=1, tokens=1, width=2, height=1, resize=0, filter="BICUBIC")
    assert prepare(asked(png_of_row(2, 16, 2, row), "", wanted)).pixels == b"\x12" * 6


def made_from(source: bytes, shape: PictureShape, pixels: int = 1 << 25) -> Image.Image:
    """The image from which a picture is made."""
    found = prepare(Prepare(source, b"key", "", None, pixels, 0, shape))
    assert found.key == b"key"
    assert not found.wrong, found.wrong
    image = Image.open(io.BytesIO(found.pixels), formats=["PNG"])
    assert image.size == (found.width, found.height)
    return image


def test_an_image_that_a_picture_is_made_from_is_upright_and_has_the_wanted_size() -> None:
    shape = PictureShape(64, 32, 8, 16_383)
    assert made_from(picture("JPEG", (30, 40)), shape).size == (64, 32)
    kept = replace(shape, keeps_shape=True)
    file = (FOLDER / "turned.jpg").read_bytes()
    assert Image.open(io.BytesIO(file)).size == (41, 23)
    turned = made_from(file, kept)
    assert (turned.size, turned.mode) == ((32, 56), "RGB")


@pytest.mark.parametrize("size", [(8, 6), (3000, 2000), (1, 5000), (5000, 1), (100, 100)])
def test_an_image_that_keeps_its_shape_has_no_more_pixels_than_wanted(size: tuple[int, int]) -> None:
    width, height = made_from(picture("PNG", size), PictureShape(64, 32, 8, 128, keeps_shape=True)).size
    assert width * height <= 64 * 32
    assert width % 8 == height % 8 == 0
    assert max(width, height) <= 128
    assert (width > height, width < height) in ((size[0] > size[1], size[0] < size[1]), (False, False))


def test_a_mask_is_white_where_the_file_is_transparent_or_as_the_file() -> None:
    shape = PictureShape(2, 1, 1, 100, is_mask=True)
    clear = Image.new("RGBA", (2, 1), (9, 9, 9, 255))
    clear.putpixel((1, 0), (9, 9, 9, 0))
    grey = Image.new("L", (2, 1), 0)
    grey.putpixel((1, 0), 255)
    for image in (clear, grey):
        file = io.BytesIO()
        image.save(file, "PNG")
        mask = made_from(file.getvalue(), shape)
        assert (mask.mode, list(mask.tobytes())) == ("L", [0, 255])


def test_bombs_are_refused_before_a_picture_is_made_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # as in the program
    shape = PictureShape(64, 32, 8, 16_383)
    for file, why in (
        (png_of_size(60_000, 60_000), "more than the limit of 33554432"),
        (animated_webp(), "is an animated WebP"),
        (SVG, "is of another format"),
        (picture("PNG")[:-30], "cannot be decoded"),
    ):
        assert why in prepare(Prepare(file, b"key", "", None, 1 << 25, 0, shape)).wrong


def test_the_key_is_of_the_file_and_of_what_prepares_it() -> None:
    file = picture()
    keys = [
        prepare(asked(file)).key,
        prepare(asked(file + b"\0")).key,
        *(
            prepare(asked(file, "", replace(WANTED, **more))).key
            for more in ({"width": 5}, {"height": 5}, {"resize": 5}, {"filter": "BILINEAR"})
        ),
    ]
    sized: tuple[dict[str, Any], ...] = (
        {},
        {"unit": 4},
        {"least_pixels": 64},
        {"most_pixels": 1 << 13},
        {"filter": "BILINEAR"},
    )
    keys += [prepare(asked(file, "", replace(UNITS, **more))).key for more in sized]
    assert len({*keys}) == len(keys)
    assert all(len(key) == 32 for key in keys)
    assert prepare(asked(file, "image/png", replace(WANTED, tokens=9, token_id=7))).key == keys[0]


def test_of_a_gif_of_ten_thousand_frames_the_first_is_decoded_and_no_other() -> None:
    file = gif_of(10_000)
    first = prepare(asked(file, "image/gif"))
    assert first.pixels == prepare(asked(gif_of(1))).pixels
    cut = prepare(asked(file[: len(file) // 2], "image/gif"))
    assert cut.pixels == first.pixels


@pytest.mark.filterwarnings("ignore:Invalid APNG")
def test_of_an_animated_png_the_first_picture_is_decoded_if_people_see_it() -> None:
    still = io.BytesIO()
    Image.new("RGB", (8, 6), "red").save(still, "PNG")
    assert prepare(asked(animated_png(hides=False))).pixels == prepare(asked(still.getvalue())).pixels
    hidden = animated_png(hides=True)
    control = hidden[33:53]  # its acTL; browsers pass over a second one, with which Pillow takes it for a still one
    for file in (hidden, hidden[:33] + control + hidden[33:]):
        for size_only in (False, True):
            found = prepare(replace(asked(file, "image/png"), size_only=size_only))
            assert "is an animated PNG whose still picture is no frame of it" in found.wrong


@pytest.mark.parametrize("size_only", [False, True])
def test_the_exif_block_of_a_file_is_parsed_once(size_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    load = Image.Exif.load

    def counted(exif: Image.Exif, data: bytes) -> None:
        parsed.append(data)
        load(exif, data)

    monkeypatch.setattr(Image.Exif, "load", counted)
    exif, out = Image.Exif(), io.BytesIO()
    exif[ExifTags.Base.Orientation] = 6
    Image.new("RGB", (8, 6)).save(out, "PNG", exif=exif)  # of a JPEG, Pillow itself parses it first
    parsed.clear()
    assert not prepare(replace(asked(out.getvalue()), size_only=size_only)).wrong
    assert len(parsed) == 1


@pytest.mark.parametrize(
    ("file", "stated", "why"),
    [
        (png_of_size(60_000, 60_000), "image/png", "has 60000 by 60000 pixels, more than the limit of 33554432"),
        (picture("PNG")[:-30], "image/png", "cannot be decoded: "),
        (picture("JPEG", (64, 64))[:-40], "image/jpeg", "cannot be decoded: "),
        (picture("PNG")[:20], "image/png", "cannot be decoded: "),
        (png_of_size(0, 5), "image/png", "cannot be decoded: its header is damaged"),
        (picture("PNG"), "image/jpeg", "is stated to be image/jpeg, but its first bytes are those of PNG"),
        (picture("GIF") + b"PK\x03\x04", "image/png", "first bytes are those of GIF"),
        (b"GIF89a/*" + picture("JPEG"), "image/gif", "cannot be decoded: "),
        (SVG, "image/svg+xml", "is stated to be 'image/svg+xml'; PNG, JPEG, WebP and GIF are served"),
        (SVG, "image/png", "is of another format by its first bytes; PNG, JPEG, WebP and GIF are served"),
        (picture("TIFF"), "image/tiff", "is stated to be 'image/tiff'"),
        (picture("TIFF"), "", "is of another format by its first bytes"),
        (picture("BMP"), "", "is of another format by its first bytes"),
        (animated_webp(), "image/webp", "is an animated WebP; only still ones are served"),
        (picture("PNG", (1, 30_000)), "image/png", "more than 33554432 pixels (images.pixels) with a shorter side of"),
        (b"", "", "is of another format"),
        (picture("PNG", (2010, 10)), "", "has 2010 by 10 pixels; one side may be at most 200 times as long"),
        (picture("PNG", (1, 190)), "", "pixels, a shape in which it would have"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(
    file: bytes, stated: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # as in the program
    wanted = replace(WANTED, resize=2000) if "shorter side" in why else WANTED
    wanted = replace(UNITS, most_pixels=256) if "side may be" in why or "a shape" in why else wanted
    found = prepare(asked(file, stated, wanted))
    assert why in found.wrong
    assert len(found.wrong) < 300
    assert "\n" not in found.wrong
    assert (found.key, found.pixels) == (b"", b"")
