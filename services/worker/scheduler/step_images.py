"""StepImages: which image a step may encode, and which ones sequences wait for. Pure.

    prompt   | text | image A          | text | image B          | text |
    step 1   ├──────┴── encodes A ─────┴──────┤ B is not there: the chunk ends before it
    step 2                                    ├─ encodes B …

    not cached ── fit ──▶ looked up in the store ── found ──▶ cached
                               │ chunks end before it, others go on
                               └── not found ──▶ absent: a step encodes it

Streams wait while an image's embeddings are computed. So a step computes those of one image at most, whichever
sequences need it. They count as a number of the step's tokens, by the arithmetic that they take. An image whose
embeddings are in the encoder cache costs nothing. With a store that other engines share, an image is looked up there
first, and no other sequence waits meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.worker.scheduler.encoder_cache import EncoderCache
from shared.messages.generate import Image

MOST_LOOKUPS = 8
"""The most images that are looked up at once; those beyond it wait for a later step."""
MOST_ABSENT = 256
"""The most images of which is known that the store lacks them. Those beyond it are looked up again."""


class StepImages:
    """The images of one engine's steps."""

    def __init__(self, cache: EncoderCache[Any] | None = None, image_cost: int = 0, *, looks_up: bool = False) -> None:
        """`image_cost` is the number of tokens that take as long as one image. Without a cache there are no images.
        `looks_up` says whether there is a store."""
        self.cache: EncoderCache[Any] = EncoderCache(0) if cache is None else cache
        self._image_cost = image_cost
        self._looks_up = looks_up
        self._encodes = b""
        """The key of the image that the step under way encodes. Empty if it encodes none."""
        self._asked: dict[bytes, None] = {}
        """Keys that are looked up, at most MOST_LOOKUPS."""
        self._untold: list[bytes] = []
        """Keys among them that `take_lookups` has not returned yet."""
        self._absent: dict[bytes, None] = {}
        """Keys that are to be encoded here, the newest last, at most MOST_ABSENT."""
        self.changes = 0
        """How many look-ups have ended."""

    def begin(self) -> None:
        """Begin a step."""
        self._encodes = b""

    @property
    def tokens(self) -> int:
        """How many tokens of the step its image counts as."""
        return self._image_cost if self._encodes else 0

    def fit(self, images: Sequence[Image], start: int, end: int) -> int:
        """Take up a chunk of a sequence with these images, from `start` on. Return where it ends: at `end`, or before
        the first token of an image that is looked up, or would be the second one to be encoded. All images from `start`
        on are looked up."""
        fits = end
        for image in images:
            if image.start + image.tokens <= start or image.key == self._encodes or image.key in self.cache:
                continue
            if self._looks_up and image.key not in self._absent:
                self.look_up(image.key)
            elif image.start >= fits:
                continue
            elif not self._encodes:
                self._encodes = image.key
                self._absent.pop(image.key, None)
                continue
            fits = min(fits, max(start, image.start))
        return fits

    def look_up(self, key: bytes) -> bool:
        """Have an image looked up, if there is room for it. Return whether it is looked up now."""
        if key not in self._asked and len(self._asked) < MOST_LOOKUPS:
            self._asked[key] = None
            self._untold.append(key)
        return key in self._asked

    def take_lookups(self) -> list[bytes]:
        """Return the keys to look up that were not returned yet."""
        untold, self._untold = self._untold, []
        return untold

    def looked_up(self, key: bytes) -> None:
        """A look-up has ended. If the embeddings were found, they are in the cache now."""
        self._asked.pop(key, None)
        self.changes += 1
        if key not in self.cache:
            self.encode_here(key)

    def encode_here(self, key: bytes) -> None:
        """Have an image encoded here, whether or not the store has it."""
        self._absent.pop(key, None)
        self._absent[key] = None
        if len(self._absent) > MOST_ABSENT:
            del self._absent[next(iter(self._absent))]

    def distrust(self, images: Sequence[Image]) -> None:
        """Forget the embeddings of these images: their numbers may be wrong, here and in the store."""
        for image in images:
            self.cache.remove(image.key)
            self.encode_here(image.key)

    def validate(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        assert len(self._asked) <= MOST_LOOKUPS
        assert len(self._absent) <= MOST_ABSENT
        assert set(self._untold) <= self._asked.keys()
        assert self._looks_up or not self._asked
