"""ImageEncoder: gives a step the embeddings of its images' tokens, from the encoder cache or from the vision tower."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod

import numpy as np

from services.worker.contracts.runner import EmbeddingStore, Work
from services.worker.native.config import ModelConfig
from services.worker.native.linear import Array
from services.worker.native.vision_tower import VisionTower
from services.worker.native.weights import tensor_shapes
from services.worker.scheduler.encoder_cache import EncoderCache
from shared.messages.generate import Image

Placed = tuple[int, Array]
"""A step's first row of a stretch of an image's tokens, and the embeddings of that row and those after it."""


class ImageEncoder:
    """The images of one runner."""

    def __init__(self, tower: VisionTower, cache: EncoderCache[Array], store: EmbeddingStore | None = None) -> None:
        self._tower = tower
        self._cache = cache
        self.store = store
        """Where embeddings are shared with other engines. None if they are not."""

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
        self._cache.hits += sum(within.start == 0 and image.key in found for _, image, within in stretches)
        for _, image, _ in stretches:
            if image.key not in found:
                found[image.key] = embeddings = self._encode(image)
                self._cache.add(image.key, embeddings, embeddings.nbytes)
        if self.store is not None:
            self.store.store_owed()
        return [(row, found[image.key][within]) for row, image, within in stretches]

    def _encode(self, image: Image) -> Array:
        """Return the embeddings of an image, from the store or computed."""
        if self.store is None:
            self._cache.encoded += 1
            return self._tower.encode(image.pixels)
        stored, fetched = self.store.fetch_or_encode(image.key, lambda: self._tower.encode(image.pixels).tobytes())
        embeddings = np.frombuffer(stored, np.float32).reshape(image.tokens, -1)
        if fetched and not np.isfinite(embeddings).all():  # they were damaged there
            fetched, embeddings = False, self._tower.encode(image.pixels)
        self._cache.fetched += fetched
        self._cache.encoded += not fetched
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
