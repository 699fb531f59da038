"""PreparedImages: images that were prepared lately, so that each turn of a chat decodes its new ones alone. Pure.

    find ──▶ becomes the most recently used one
    add  ──▶ the least recently used ones go until the rest fits; one that is larger than the limit is not kept

An image is found by its salt, by what was sent and by what its model wants: no request learns, by how soon its answer
comes, whether another one with another salt had the image.
"""

from __future__ import annotations

from collections import OrderedDict

from services.frontend.images.decoding import Prepare, Prepared

ImageName = tuple[str, Prepare]
"""The salt; the question without its source, which has the image's key."""


def name_of(asked: Prepare, salt: str) -> ImageName:
    """Return the name under which the answer to a question is kept for requests with this salt."""
    return salt, asked.without_source()


class PreparedImages:
    """The images of one frontend."""

    def __init__(self, limit_bytes: int) -> None:
        """`limit_bytes` bounds the pixels of all together. 0 keeps none."""
        self._limit_bytes = limit_bytes
        self._images: OrderedDict[ImageName, Prepared] = OrderedDict()
        """Least recently used first."""
        self.size_bytes = 0
        self.hits = 0
        """Images that were found, since the start."""

    def __len__(self) -> int:
        return len(self._images)

    def find(self, name: ImageName) -> Prepared | None:
        """Return an image, which becomes the most recently used one. None if it is not there."""
        found = self._images.get(name)
        if found is not None:
            self._images.move_to_end(name)
            self.hits += 1
        return found

    def add(self, name: ImageName, image: Prepared) -> None:
        """Keep an image."""
        if len(image.pixels) > self._limit_bytes:
            return
        former = self._images.pop(name, None)  # two requests may have asked at the same time
        self.size_bytes += len(image.pixels) - (0 if former is None else len(former.pixels))
        self._images[name] = image
        while self.size_bytes > self._limit_bytes:
            _, gone = self._images.popitem(last=False)
            self.size_bytes -= len(gone.pixels)

    def validate(self) -> None:
        """Assert the invariants."""
        assert self.size_bytes == sum(len(image.pixels) for image in self._images.values()) <= self._limit_bytes
