"""The images of a load: noise that follows from a name, as data URIs. Pure."""

from __future__ import annotations

import base64
import io
import re
from random import Random

from shared.errors import ConfigError

MOST_IMAGES = 64
"""The most images of a request."""
MOST_PIXELS = 8192
"""The most pixels of a side."""
QUALITY = 75
"""The quality of the JPEG files. One of 336 by 336 pixels has some 80 kB."""
_SIZE = re.compile(r"(\d{1,5})x(\d{1,5})")


def parse_size(text: str) -> tuple[int, int]:
    """Return the width and the height in WIDTHxHEIGHT, in pixels. Raise ConfigError."""
    found = _SIZE.fullmatch(text)
    width, height = (int(found[1]), int(found[2])) if found else (0, 0)
    if not (1 <= width <= MOST_PIXELS and 1 <= height <= MOST_PIXELS):
        raise ConfigError(f"--image-size {text}: not WIDTHxHEIGHT, each 1 to {MOST_PIXELS} pixels, such as 336x336")
    return width, height


def noise_uri(name: str, size: tuple[int, int]) -> str:
    """Return a JPEG file of noise as a data URI: of one name and size always the same picture."""
    from PIL import Image  # here, because other loads need none

    width, height = size
    draw = Random(f"image {name}")  # noqa: S311 - a load, no secret
    file = io.BytesIO()
    Image.frombytes("RGB", size, draw.randbytes(3 * width * height)).save(file, "JPEG", quality=QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
