"""Prepared images: which are kept, and who finds them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.frontend.images.decoding import Prepare, Prepared, key_of
from services.frontend.images.prepared_images import PreparedImages, name_of
from shared.messages.cards import ImageInput

WANTED = ImageInput(token_id=319, tokens=20, width=6, height=5, resize=6, filter="BICUBIC")


def asked(source: bytes = b"file", *, stated: str = "", wanted: ImageInput = WANTED) -> Prepare:
    return Prepare(source, key_of(source, wanted), stated, wanted, 1 << 20, 1 << 20)


def test_an_image_has_a_name_of_its_own_by_salt_and_by_all_that_is_asked() -> None:
    questions = [
        asked(),
        asked(b"other"),
        asked(stated="image/png"),
        asked(wanted=ImageInput(token_id=319, tokens=20, width=6, height=5, resize=7, filter="BICUBIC")),
    ]
    names = [name_of(question, salt) for question in questions for salt in ("", "mine")]
    assert len({*names}) == len(names)
    assert name_of(asked(), "mine") in names
    assert not any(question.source in repr(name).encode() for question in questions[:1] for name in names)


def test_the_least_recently_used_image_goes_and_one_that_is_too_large_is_not_kept() -> None:
    images, (one, two, three, large) = PreparedImages(100), (name_of(asked(bytes([n])), "") for n in range(4))
    for name in (one, two):
        images.add(name, Prepared(b"key", bytes(50)))
    assert images.find(one) is not None
    images.add(large, Prepared(b"key", bytes(101)))
    images.add(three, Prepared(b"key", bytes(50)))
    assert [images.find(name) is not None for name in (one, two, three, large)] == [True, False, True, False]
    assert (len(images), images.size_bytes, images.hits) == (2, 100, 3)
    images.validate()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 60))), st.integers(0, 120))
def test_whatever_comes_the_limit_holds(steps: list[tuple[bool, int, int]], limit: int) -> None:
    images = PreparedImages(limit)
    for adds, number, size in steps:
        name = name_of(asked(bytes([number])), "")
        if adds:
            images.add(name, Prepared(b"key", bytes(size)))
        else:
            images.find(name)
        images.validate()
