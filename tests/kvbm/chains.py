"""Chains of blocks to store and fetch."""

from __future__ import annotations

from shared.blocks import Content
from shared.hashing import ContentKey, content_key, pack_tokens, root_key

ROOT = root_key("model")


def chain(*tokens: int) -> list[Content]:
    """Blocks of one token that follow one another."""
    contents: list[Content] = []
    parent: ContentKey | None = None
    for token in tokens:
        packed = pack_tokens([token])
        key = content_key(parent or ROOT, packed)
        contents.append(Content(key=key, parent=parent, tokens=packed))
        parent = key
    return contents


def keys(contents: list[Content]) -> list[ContentKey]:
    """Their keys, in order."""
    return [content.key for content in contents]
