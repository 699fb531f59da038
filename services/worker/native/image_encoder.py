"""ImageEncoder: gives a step the embeddings of its images' tokens, from the encoder cache or from the vision tower."""

from __future__ import annotations

import time
from collections.abc import Sequence
from math import ceil, prod
from typing import Protocol

import numpy as np

from services.worker.contracts.runner import EmbeddingLookups, Work
from services.worker.native.config import ModelConfig
from services.worker.native.linear import Array
from services.worker.native.weights import tensor_shapes
from services.worker.scheduler.encoder_cache import EncoderCache
from shared.messages.generate import Image

Placed = tuple[int, Array]
"""A step's first row of a stretch of an image's tokens, and the embeddings of that row and those after it."""


class EncodesPixels(Protocol):
    """A vision tower and projector, on whatever device."""

    def encode(self, pixels: bytes) -> Array:
        """Return the embeddings (tokens, width of the decoder) of an image, float32 in host memory. Its pixels are RGB
        bytes, row by row."""
        ...


class ImageEncoder:
    """The images of one runner."""

    def __init__(self, tower: EncodesPixels, cache: EncoderCache[Array], store: EmbeddingLookups | None = None) -> None:
        self._tower = tower
        self._cache = cache
        self.store = store
        """Where embeddings are shared with other engines. None if they are not."""
        self._came: set[bytes] = set()
        """Keys of images in the cache that came from the store and were in no step yet."""

    def place(self, works: Sequence[Work]) -> list[Placed]:
        """Return the embeddings of all images' tokens that a step computes."""
        if not any(work.images for work in works):
            return []
        stretches: list[tuple[int, Image, slice]] = []
        row = 0
        for work in works:
            for image in work.images:
                first, last = max(image.start, work.start), min(image.start + image.tokens, work.end)
                if first < last:
                    within = slice(first - image.start, last - image.start)
                    stretches.append((row + first - work.start, image, within))
            row += work.end - work.start
        # What is there is taken out before what is missing displaces it.
        looked_up = {image.key: self._cache.find(image.key) for _, image, _ in stretches}
        found = {key: embeddings for key, embeddings in looked_up.items() if embeddings is not None}
        for _, image, within in stretches:
            if within.start == 0 and image.key in found:
                self._cache.hits += image.key not in self._came
                self._came.discard(image.key)
        for _, image, _ in stretches:
            if image.key not in found:
                found[image.key] = embeddings = self._encode(image.key, image.pixels)
                self._cache.add(image.key, embeddings, embeddings.nbytes)
        return [(row, found[image.key][within]) for row, image, within in stretches]

    def take(self, key: bytes, stored: bytes, width: int) -> bool:
        """Put an image's embeddings from the store into the cache, each of `width` numbers. Return False if they were
        damaged there."""
        embeddings = np.frombuffer(stored, np.float32).reshape(-1, width)
        if not np.isfinite(embeddings).all():
            return False
        if key not in self._cache:
            self._cache.add(key, embeddings, embeddings.nbytes)
            self._cache.fetched += 1
            self._came = {each for each in (*self._came, key) if each in self._cache}
        return True

    def encode_image(self, key: bytes, pixels: bytes) -> None:
        """Encode an image for the store alone."""
        self._encode(key, pixels)

    def _encode(self, key: bytes, pixels: bytes) -> Array:
        """Return the embeddings of an image, which are stored as well."""
        began_s = time.monotonic()
        embeddings = self._tower.encode(pixels)
        took_s = time.monotonic() - began_s
        self._cache.count_encoded(took_s)
        if self.store is not None:
            self.store.keep(key, embeddings.tobytes())
        return embeddings


def image_cost(config: ModelConfig) -> int:
    """Return how many of the decoder's tokens take as much arithmetic as an image, by the sizes of their weights."""
    assert config.vision is not None
    elements = {"model.layers.": 0, "vision_tower.encoder.": 0, "multi_modal_projector.": 0}
    for name, shape in tensor_shapes(config).items():
        for part in elements:
            elements[part] += prod(shape) * name.startswith(part)
    decoder, tower, projector = elements.values()
    vision = config.vision
    return ceil(((vision.patches + vision.has_class) * tower + vision.input.tokens * projector) / decoder)
