"""EncoderCache: the embeddings of images that were computed lately, by the image's key. Pure.

    find ──▶ becomes the most recently used one
    add  ──▶ the least recently used ones go until the rest fits; the newest stays, whatever the limit

An image of many requests, or of many turns of a chat, is computed once while its embeddings stay.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from services.worker.contracts.runner import EmbeddingLookups

E = TypeVar("E")


class EncoderCache(Generic[E]):
    """Embeddings of any type, each with its size. What a step has taken out stays alive while the step uses it."""

    def __init__(self, limit_bytes: int) -> None:
        """`limit_bytes` bounds all embeddings together, unless the newest alone take more."""
        self._limit_bytes = limit_bytes
        self._entries: OrderedDict[bytes, tuple[E, int]] = OrderedDict()
        """Least recently used first."""
        self.size_bytes = 0
        self.hits = 0
        """Images whose first token a step computed, and whose embeddings were there, since the start."""
        self.encoded = 0
        """Images that were computed, since the start."""
        self.fetched = 0
        """Images whose embeddings came from another engine, since the start."""
        self.image_s = 0.0
        """Seconds that it takes to encode an image, as measured lately. 0 if not measured yet."""

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: bytes) -> E | None:
        """Return an image's embeddings, which become the most recently used ones. None if they are not there."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def add(self, key: bytes, embeddings: E, size_bytes: int) -> None:
        """Keep the embeddings of an image that is not there."""
        assert key not in self._entries
        self._entries[key] = embeddings, size_bytes
        self.size_bytes += size_bytes
        while self.size_bytes > self._limit_bytes and len(self._entries) > 1:
            _, (_, freed_bytes) = self._entries.popitem(last=False)
            self.size_bytes -= freed_bytes

    def count_encoded(self, took_s: float) -> None:
        """Count an image that was encoded in `took_s` seconds."""
        self.encoded += 1
        self.image_s = (self.image_s + took_s) / 2 if self.image_s else took_s

    def remove(self, key: bytes) -> None:
        """Forget an image's embeddings, if they are there."""
        _, size_bytes = self._entries.pop(key, (None, 0))
        self.size_bytes -= size_bytes

    def clear(self) -> None:
        """Forget all embeddings."""
        self._entries.clear()
        self.size_bytes = 0


@runtime_checkable
class EncodesImages(Protocol):
    """A Runner that computes the embeddings of images, as far as its model takes images."""

    encoder_cache: EncoderCache[Any] | None
    """None if the model takes none."""

    def use_lookups(self, lookups: EmbeddingLookups) -> None:
        """Have these store what is encoded."""
        ...

    def take_embeddings(self, key: bytes, embeddings: bytes) -> bool:
        """Put an image's embeddings from the store into the cache. Return whether they are of use."""
        ...

    def encode_image(self, key: bytes, pixels: bytes) -> None:
        """Encode an image for the store alone. Nothing is done while the runner sleeps."""
        ...
