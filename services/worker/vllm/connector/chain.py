"""TokenChain: a request's tokens as a chain of full blocks with content keys. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from shared.blocks import Content
from shared.hashing import ContentKey, content_keys, pack_tokens, root_key


class TokenChain:
    """The full blocks of one request, which become more as it grows. Keys are computed once, when they are asked for:
    some 1 µs for a block of 16 tokens."""

    def __init__(self, tokens: Sequence[int], block_size: int, model: str, lora: str = "", salt: str = "") -> None:
        """`tokens` grows at its end, and never changes elsewhere."""
        self._tokens = tokens
        self._block_size = block_size
        self._lora = lora
        self._salt = salt
        self._root = root_key(model, lora, salt)
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
        return Content(key, parent, self._packed(index, index + 1), self._lora, self._salt)

    def _extend(self, blocks: int) -> None:
        """Compute the keys of the first `blocks` blocks that are not known."""
        known = len(self._keys)
        if blocks > known:
            parent = self._keys[-1] if known else self._root
            self._keys += content_keys(parent, self._packed(known, blocks), self._block_size)

    def _packed(self, first: int, end: int) -> bytes:
        """Return the packed tokens of the blocks from `first` to before `end`."""
        size = self._block_size
        tokens = self._tokens[first * size : end * size]
        assert len(tokens) == (end - first) * size, f"block {first + len(tokens) // size} is not full"
        return pack_tokens(tokens)
