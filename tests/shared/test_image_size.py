"""shared/image_size.py: sizes are those of transformers, and each token is a square of the prepared image."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.image_size import count_tokens, prepared_size, resized_size
from shared.messages.cards import ImageInput
from tests.frontend.images.golden import FOLDER, SIZED

GOLDEN: dict[str, dict[str, list[int]]] = json.loads((FOLDER / "sizes.json").read_text())
FIXED = ImageInput(token_id=1, tokens=20, width=6, height=5, resize=7, filter="BICUBIC")


def in_units(unit: int, least: int, most: int) -> ImageInput:
    return ImageInput(1, 0, 0, 0, 0, "BICUBIC", unit, least, most)


@pytest.mark.parametrize("name", GOLDEN)
def test_sizes_in_units_are_those_of_transformers(name: str) -> None:
    shape = SIZED[name]
    wanted = in_units(shape["unit"], shape["least_pixels"], shape["most_pixels"])
    refused = 0
    for picture, expected in GOLDEN[name].items():
        width, height = map(int, picture.split())
        if expected[0] * expected[1] > wanted.most_pixels:
            refused += 1
            with pytest.raises(ValueError, match=f"has {width} by {height} pixels, a shape in which it would have"):
                prepared_size(wanted, width, height)
            continue
        assert [*prepared_size(wanted, width, height)] == [*resized_size(wanted, width, height)] == expected
        assert count_tokens(wanted, *expected) == expected[0] // wanted.unit * (expected[1] // wanted.unit) > 0
    assert bool(refused) == (name == "qwen"), "a real model has room for all shapes"


@given(
    st.integers(1, 64),
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.integers(1, 1 << 16),
    st.integers(0, 1 << 16),
)
def test_a_size_is_of_whole_units_within_the_bounds_or_refused(
    unit: int, width: int, height: int, least: int, more: int
) -> None:
    wanted = in_units(unit, least, max(least + more, unit * unit))
    try:
        size = prepared_size(wanted, width, height)
    except ValueError:
        return
    assert size[0] * size[1] <= wanted.most_pixels
    assert count_tokens(wanted, *size) * unit * unit == size[0] * size[1] > 0


def test_one_side_may_be_two_hundred_times_as_long_as_the_other() -> None:
    wanted = in_units(28, 3136, 12845056)
    assert prepared_size(wanted, 2000, 10) == (812, 28)
    with pytest.raises(ValueError, match="has 10 by 2001 pixels; one side may be at most 200 times as long"):
        prepared_size(wanted, 10, 2001)


def test_without_a_unit_all_images_have_one_size() -> None:
    assert resized_size(FIXED, 30, 10) == (21, 7)
    assert resized_size(FIXED, 10, 30) == (7, 21)
    assert prepared_size(FIXED, 10, 3000) == (6, 5)
    assert count_tokens(FIXED, 6, 5) == 20
    assert count_tokens(FIXED, 5, 6) == 0


def test_no_other_size_has_tokens() -> None:
    wanted = in_units(28, 3136, 12845056)
    for size in ((0, 28), (28, 27), (-28, -28), (29, 28)):
        assert count_tokens(wanted, *size) == 0
