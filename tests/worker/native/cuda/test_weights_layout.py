"""Matrices that engines share lie at the same places for all of them, and nowhere two of them overlap."""

from __future__ import annotations

from math import prod

import pytest

from services.worker.native.cuda.weights_layout import ALIGNMENT_BYTES, WeightsLayout

SHAPES = {"q": (8, 24), "k": (4, 24), "v": (4, 24), "norm": (24,), "down": (24, 17)}


def test_each_matrix_begins_aligned_and_after_the_one_before() -> None:
    layout = WeightsLayout(SHAPES, "bfloat16", 2)
    joined, down = (16, 24), SHAPES["down"]
    first, second = layout.take(joined, 2), layout.take(down, 2)
    assert first == 0
    assert second % ALIGNMENT_BYTES == 0
    assert 2 * prod(joined) <= second
    assert second + 2 * prod(down) <= layout.size_bytes


def test_a_second_engine_finds_the_same_places() -> None:
    one, other = WeightsLayout(SHAPES, "bfloat16", 2), WeightsLayout(dict(reversed(SHAPES.items())), "bfloat16", 2)
    assert (one.digest, one.size_bytes) == (other.digest, other.size_bytes)
    places = [one.take((16, 24), 2), one.take((24, 17), 2)]
    one.begin()
    assert [one.take((16, 24), 2), one.take((24, 17), 2)] == places
    assert [other.take((16, 24), 2), other.take((24, 17), 2)] == places


@pytest.mark.parametrize(
    ("shapes", "element_type", "element_bytes"),
    [(SHAPES | {"up": (24, 8)}, "bfloat16", 2), (SHAPES, "float16", 2), (SHAPES, "float32", 4)],
)
def test_another_model_or_type_has_another_digest(
    shapes: dict[str, tuple[int, ...]], element_type: str, element_bytes: int
) -> None:
    assert WeightsLayout(shapes, element_type, element_bytes).digest != WeightsLayout(SHAPES, "bfloat16", 2).digest


def test_norms_and_biases_take_no_room() -> None:
    without = {name: shape for name, shape in SHAPES.items() if len(shape) == 2}
    assert WeightsLayout(without, "bfloat16", 2).size_bytes == WeightsLayout(SHAPES, "bfloat16", 2).size_bytes
