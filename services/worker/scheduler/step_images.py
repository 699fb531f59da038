"""StepImages: which image a step may encode. Pure.

    prompt   | text | image A          | text | image B          | text |
    step 1   ├──────┴── encodes A ─────┴──────┤ B is not there: the chunk ends before it
    step 2                                    ├─ encodes B …

Streams wait while an image's embeddings are computed. So a step computes those of one image at most, whichever
sequences need it. They count as a number of the step's tokens, by the arithmetic that they take. An image whose
embeddings are in the encoder cache costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.worker.scheduler.encoder_cache import EncoderCache
from shared.messages.generate import Image


class StepImages:
    """The images of one engine's steps."""

    def __init__(self, cache: EncoderCache[Any] | None = None, image_cost: int = 0) -> None:
        """`image_cost` is the number of tokens that take as long as one image. Without a cache there are no images."""
        self.cache: EncoderCache[Any] = EncoderCache(0) if cache is None else cache
        self._image_cost = image_cost
        self._encodes = b""
        """The key of the image that the step under way encodes. Empty if it encodes none."""

    def begin(self) -> None:
        """Begin a step."""
        self._encodes = b""

    @property
    def tokens(self) -> int:
        """How many tokens of the step its image counts as."""
        return self._image_cost if self._encodes else 0

    def fit(self, images: Sequence[Image], start: int, end: int) -> int:
        """Take up a chunk of a sequence with these images, from `start` on. Return where it ends: at `end`, or before
        the first token for which a second image would have to be encoded."""
        for image in images:
            if image.start >= end:
                break
            if image.start + image.tokens <= start or image.key == self._encodes or image.key in self.cache:
                continue
            if self._encodes:
                return max(start, image.start)
            self._encodes = image.key
        return end
