"""Tests of which image a step may encode."""

from __future__ import annotations

from services.worker.scheduler.encoder_cache import EncoderCache
from services.worker.scheduler.step_images import StepImages
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
