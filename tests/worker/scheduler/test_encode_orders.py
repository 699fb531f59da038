"""Images that an engine encodes for others: in their order, one at a time, and only what the store lacks."""

from __future__ import annotations

from services.worker.contracts.messages import EncodeImage, ImageEncoded
from services.worker.scheduler.encode_orders import AHEAD, LATE, EncodeOrders
from services.worker.scheduler.step_images import StepImages


def order(ticket: int, name: bytes = b"", time_left_s: float = 10.0) -> EncodeImage:
    return EncodeImage(ticket, (name or bytes([ticket])) * 32, b"pixels", time_left_s)


def orders() -> tuple[StepImages, EncodeOrders]:
    images = StepImages(looks_up=True)
    return images, EncodeOrders(images)


def test_an_image_that_the_store_has_is_not_encoded_and_another_one_is() -> None:
    images, made = orders()
    there, new = order(1), order(2)
    made.add(there, 0.0)
    made.add(new, 0.0)
    assert images.take_lookups() == [there.key, new.key]
    assert (made.due(0.0), made.busy) == (None, False)
    made.looked_up(there.key, found=True)
    assert made.busy
    assert made.take_ended() == [ImageEncoded(1)]
    made.looked_up(new.key, found=False)
    assert made.busy
    assert made.due(0.0) == new
    made.encoded(new)
    assert made.take_ended() == [ImageEncoded(2)]
    assert not made.busy
    made.validate()


def test_the_first_ones_are_looked_up_and_the_next_as_soon_as_one_ends() -> None:
    images, made = orders()
    for ticket in range(1, 6):
        made.add(order(ticket), 0.0)
    assert images.take_lookups() == [order(ticket).key for ticket in range(1, 1 + AHEAD)]
    images.looked_up(order(2).key)
    made.looked_up(order(2).key, found=False)
    assert made.due(0.0) is None, "the first one is not looked up yet"
    images.looked_up(order(1).key)
    made.looked_up(order(1).key, found=True)
    assert made.due(0.0) == order(2)
    assert images.take_lookups() == [order(3).key]
    made.validate()


def test_two_orders_for_one_image_have_it_encoded_once() -> None:
    _, made = orders()
    made.add(order(1, b"a"), 0.0)
    made.add(order(2, b"a"), 0.0)
    made.looked_up(b"a" * 32, found=False)
    due = made.due(0.0)
    assert due is not None
    made.encoded(due)
    assert made.take_ended() == [ImageEncoded(1), ImageEncoded(2)]
    assert made.due(0.0) is None


def test_an_order_that_is_late_ends_and_is_not_encoded() -> None:
    _, made = orders()
    made.add(order(1, time_left_s=1.0), 0.0)
    made.looked_up(order(1).key, found=False)
    assert made.due(1.0) is None
    assert made.take_ended() == [ImageEncoded(1, LATE)]
    made.validate()
