"""TokenChain: a request's tokens and images as a chain of full blocks with content keys. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shared.blocks import Content
from shared.hashing import NO_EXTRAS, ContentKey, content_keys, image_extras, pack_tokens, root_key

Placed = tuple[bytes, int, int]
"""An image in a prompt: its key, the index of its first token, and the number of its tokens."""


class TokenChain:
    """The full blocks of one request, which become more as it grows. Keys are computed once, when they are asked for:
    some 1 µs for a block of 16 tokens."""

    def __init__(
        self,
        tokens: Sequence[int],
        block_size: int,
        model: str,
        lora: str = "",
        salt: str = "",
        images: Iterable[Placed] = (),
    ) -> None:
        """`tokens` grows at its end, and never changes elsewhere. `images` are in the order of the prompt."""
        self._tokens = tokens
        self._block_size = block_size
        self._lora = lora
        self._salt = salt
        self._root = root_key(model, lora, salt)
        self._extras = image_extras(images, block_size)
        """Block → what its key covers next to its tokens."""
        self._keys: list[ContentKey] = []

    def keys(self, blocks: int) -> list[ContentKey]:
        """Return the keys of the first `blocks` blocks, which must be full."""
        self._extend(blocks)
        return self._keys[:blocks]

    def key(self, index: int) -> ContentKey:
        """Return the key of block `index`, which must be full."""
        self._extend(index + 1)
        return self._keys[index]

    def content(self, index: int) -> Content:
        """Return block `index`, which must be full."""
        key, parent = self.key(index), self._keys[index - 1] if index else None
        extra = self._extras.get(index, b"")
        return Content(key, parent, self._packed(index, index + 1), self._lora, self._salt, extra)

    def _extend(self, blocks: int) -> None:
        """Compute the keys of the first `blocks` blocks that are not known."""
        known = len(self._keys)
        if blocks > known:
            parent = self._keys[-1] if known else self._root
            extras = {number - known: extra for number, extra in self._extras.items()} if self._extras else NO_EXTRAS
            self._keys += content_keys(parent, self._packed(known, blocks), self._block_size, extras)

    def _packed(self, first: int, end: int) -> bytes:
        """Return the packed tokens of the blocks from `first` to before `end`."""
        size = self._block_size
        tokens = self._tokens[first * size : end * size]
        assert len(tokens) == (end - first) * size, f"block {first + len(tokens) // size} is not full"
        return pack_tokens(tokens)
