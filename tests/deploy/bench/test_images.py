"""deploy/local/bench/images.py: the images of a load."""

from __future__ import annotations

import base64
import io

import pytest
from PIL import Image

from deploy.local.bench.images import MOST_PIXELS, noise_uri, parse_size
from shared.errors import ConfigError


def test_a_name_is_always_the_same_picture_and_another_name_another_one() -> None:
    uri = noise_uri("0 rate 1 5 0", (40, 30))
    assert noise_uri("0 rate 1 5 0", (40, 30)) == uri
    assert noise_uri("0 rate 1 5 1", (40, 30)) != uri
    head, _, data = uri.partition(",")
    assert head == "data:image/jpeg;base64"
    with Image.open(io.BytesIO(base64.b64decode(data, validate=True))) as picture:
        assert (picture.format, picture.size, picture.mode) == ("JPEG", (40, 30), "RGB")
        assert len(picture.getcolors(40 * 30) or ()) > 600, "it is noise"


def test_a_size_has_a_width_and_a_height() -> None:
    assert parse_size("336x224") == (336, 224)
    for text in ("", "336", "0x5", "5x0", f"{MOST_PIXELS + 1}x1", "1x1x1", "-1x4", "a x b"):
        with pytest.raises(ConfigError, match=r"^--image-size .*: not WIDTHxHEIGHT, each 1 to 8192 pixels"):
            parse_size(text)
