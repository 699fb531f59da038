"""services/worker/requests/image_orders.py: what is wrong with an order is said by its field; tests/worker/
test_with_images.py has the rest."""

from __future__ import annotations

import pytest

from services.worker.contracts.messages import Ready
from services.worker.requests.image_orders import _fault
from shared.messages.cards import ImageInput, KvLayout
from shared.messages.encode import Encode

TAKES = ImageInput(319, 0, 0, 0, 0, "BICUBIC", unit=8, least_pixels=64, most_pixels=1024)
FACTS = Ready(64, 320, (), 4, 0, KvLayout("float32", 1, 1, 4, 4), images=TAKES)


@pytest.mark.parametrize(
    ("width", "height", "size_bytes", "fault"),
    [
        (16, 24, 3 * 16 * 24, ""),
        (16, 24, 3 * 16 * 16, "pixels: 768 bytes, not 1152"),
        (0, 0, 0, "width, height: 0, 0; no prepared image has this size"),
        (16, 20, 960, "width, height: 16, 20; no prepared image has this size"),
        (64, 64, 12288, "width, height: 64, 64; no prepared image has this size"),
        (-8, -8, 192, "width, height: -8, -8; no prepared image has this size"),
    ],
)
def test_an_image_of_a_model_whose_images_differ_has_a_size_that_the_model_takes(
    width: int, height: int, size_bytes: int, fault: str
) -> None:
    assert _fault(Encode("m", bytes(32), bytes(size_bytes), 1.0, width, height), "m", FACTS) == fault
