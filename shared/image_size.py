"""How large an image of a model is once it is prepared, and how many tokens stand for it. Pure.

    an ImageInput without a unit    one size and one number of tokens for all pictures
    with a unit                     a picture keeps its shape: each square of the unit in it is a token

The second one is `smart_resize` of transformers' processor for Qwen2-VL, whose numbers these are.
"""

from __future__ import annotations

import math

from shared.messages.cards import ImageInput

MOST_RATIO = 200
"""The most times that one side of a picture may be as long as the other one, for a model whose images have a unit."""


def resized_size(wanted: ImageInput, width: int, height: int) -> tuple[int, int]:
    """Return width and height of a picture after resizing, before it is cut. Raise ValueError, whose text is the rest
    of a sentence about the picture."""
    if wanted.unit:
        return _in_units(wanted, width, height)
    if not wanted.resize:
        return wanted.width, wanted.height
    longer = int(wanted.resize * max(width, height) / min(width, height))
    return (wanted.resize, longer) if width <= height else (longer, wanted.resize)


def prepared_size(wanted: ImageInput, width: int, height: int) -> tuple[int, int]:
    """Return width and height of a prepared picture. Raise ValueError as `resized_size`."""
    return _in_units(wanted, width, height) if wanted.unit else (wanted.width, wanted.height)


def count_tokens(wanted: ImageInput, width: int, height: int) -> int:
    """Return how many tokens stand for a prepared picture of this size. 0 if no prepared picture has this size."""
    if not wanted.unit:
        return wanted.tokens if (width, height) == (wanted.width, wanted.height) else 0
    columns, rest = divmod(width, wanted.unit)
    rows, other = divmod(height, wanted.unit)
    return 0 if rest or other or columns < 0 else max(0, columns * rows)


def _in_units(wanted: ImageInput, width: int, height: int) -> tuple[int, int]:
    """Return a size of whole units, with about the picture's shape and its pixels between the bounds."""
    unit = wanted.unit
    if max(width, height) > MOST_RATIO * min(width, height):
        raise ValueError(
            f"has {width} by {height} pixels; one side may be at most {MOST_RATIO} times as long as the other"
        )
    size = round(width / unit) * unit, round(height / unit) * unit
    pixels = size[0] * size[1]
    if pixels > wanted.most_pixels:
        factor = math.sqrt(width * height / wanted.most_pixels)
        size = max(unit, math.floor(width / factor / unit) * unit), max(unit, math.floor(height / factor / unit) * unit)
    elif pixels < wanted.least_pixels:
        factor = math.sqrt(wanted.least_pixels / (width * height))
        size = math.ceil(width * factor / unit) * unit, math.ceil(height * factor / unit) * unit
    if size[0] * size[1] > wanted.most_pixels:  # more than an engine has room for
        why = f"it would have {size[0]} by {size[1]}, more than the model's {wanted.most_pixels}"
        raise ValueError(f"has {width} by {height} pixels, a shape in which {why}")
    return size
