"""Tests of which image a step may encode."""

from __future__ import annotations

from services.worker.scheduler.encoder_cache import EncoderCache
from services.worker.scheduler.step_images import MOST_ABSENT, MOST_LOOKUPS, StepImages
from shared.messages.generate import Image

A, B, C = (Image(key * 32, start, 4, b"") for key, start in ((b"a", 2), (b"b", 8), (b"c", 12)))


def test_a_step_encodes_one_image_and_a_chunk_ends_before_the_second() -> None:
    step = StepImages(EncoderCache(100), image_cost=7)
    step.begin()
    assert (step.fit((A, B), 0, 2), step.tokens) == (2, 0), "the chunk ends before the first image"
    assert (step.fit((A, B), 0, 20), step.tokens) == (8, 7)
    assert step.fit((A,), 3, 20) == 20, "the same image, for another sequence"
    assert step.fit((B,), 9, 20) == 9, "a chunk within an image that is not there is put off"
    step.begin()
    assert (step.fit((A, B), 8, 20), step.tokens) == (20, 7)


def test_images_that_are_there_cost_nothing() -> None:
    cache: EncoderCache[str] = EncoderCache(100)
    step = StepImages(cache, image_cost=7)
    cache.add(A.key, "a", 1)
    cache.add(C.key, "c", 1)
    step.begin()
    assert (step.fit((A,), 0, 20), step.tokens) == (20, 0)
    assert (step.fit((A, B, C), 0, 20), step.tokens) == (20, 7)


def test_with_a_store_each_image_is_looked_up_first_and_only_then_encoded() -> None:
    step = StepImages(EncoderCache(100), image_cost=7, looks_up=True)
    step.begin()
    assert (step.fit((A, B, C), 0, 4), step.tokens) == (2, 0), "the chunk ends before the first image"
    assert step.take_lookups() == [A.key, B.key, C.key], "all are looked up, also those after the chunk"
    assert step.fit((A, B, C), 0, 20) == 2
    assert step.take_lookups() == [], "they are looked up once"
    step.looked_up(B.key)
    step.begin()
    assert (step.fit((A, B), 0, 20), step.tokens) == (2, 0), "the first one is not known yet"
    step.looked_up(A.key)
    assert (step.fit((A, B), 0, 20), step.tokens) == (8, 7)
    step.cache.add(A.key, "a", 1)
    step.begin()
    assert (step.fit((A, B), 8, 20), step.tokens) == (20, 7)
    assert step.changes == 2
    step.validate()


def test_an_image_that_was_found_but_is_evicted_again_is_looked_up_again() -> None:
    step = StepImages(EncoderCache(100), image_cost=7, looks_up=True)
    step.fit((A,), 0, 20)
    step.take_lookups()
    step.cache.add(A.key, "a", 1)
    step.looked_up(A.key)
    step.cache.remove(A.key)
    assert (step.fit((A,), 0, 20), step.tokens) == (2, 0)
    assert step.take_lookups() == [A.key]


def test_no_more_images_are_looked_up_at_once_than_the_limit_and_the_rest_when_one_has_ended() -> None:
    step = StepImages(EncoderCache(100), image_cost=7, looks_up=True)
    images = [Image(bytes([number]) * 32, 4 * number, 4, b"") for number in range(MOST_LOOKUPS + 2)]
    assert step.fit(images, 0, 400) == 0
    assert step.take_lookups() == [image.key for image in images[:MOST_LOOKUPS]]
    step.looked_up(images[3].key)
    step.fit(images, 0, 400)
    assert step.take_lookups() == [images[MOST_LOOKUPS].key]
    step.validate()


def test_embeddings_that_may_be_wrong_are_encoded_here_and_not_looked_up() -> None:
    step = StepImages(EncoderCache(100), image_cost=7, looks_up=True)
    step.cache.add(A.key, "a", 1)
    step.distrust((A,))
    assert (step.fit((A,), 0, 20), step.tokens, step.take_lookups()) == (20, 7, [])


def test_of_many_images_that_the_store_lacks_the_oldest_are_forgotten() -> None:
    step = StepImages(EncoderCache(100), image_cost=7, looks_up=True)
    for number in range(MOST_ABSENT + 1):
        step.encode_here(number.to_bytes(32, "big"))
    step.validate()
    assert step.fit((Image(bytes(32), 0, 4, b""),), 0, 20) == 0
    assert step.take_lookups() == [bytes(32)]
