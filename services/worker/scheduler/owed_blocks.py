"""OwedBlocks: blocks on their way to the kvbm, of the native engine and of vLLM. Pure."""

from __future__ import annotations

from collections import Counter

from shared.hashing import ContentKey


class OwedBlocks(Counter[ContentKey]):
    """Key → how often the block waits to be offered, was offered, or is copied."""

    def settle(self, key: ContentKey) -> None:
        """The block is once less on its way; a key that is not owed is ignored."""
        if key in self:
            self[key] -= 1
            if not self[key]:
                del self[key]
