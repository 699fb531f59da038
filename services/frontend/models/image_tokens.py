"""The tokens that stand for images in a prompt.

    "USER: <image>\\nWhat is it?"  ─▶  USER : ▢ What …  ─▶  USER : ▢▢▢…▢ What …
      as the template renders it      one token each        as many as the image has embeddings

The template writes the token's text, once for each image. Where a text of a request contains it, as an answer may that
is sent back, the template gets MARK instead, and that becomes the tokens of the text, which no tokenizer reads as one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from services.frontend.models.encode_pool import KeyPool
from services.frontend.models.model import Model
from services.frontend.models.preprocess import encode, too_many_tokens
from shared.errors import InvalidRequest
from shared.hashing import pack_tokens, token_array

MARK = f"imagetext{os.urandom(8).hex()}"
"""What stands for the token's text in values of a template: letters and digits alone, which no template escapes."""
MOST_MARKS = 256
"""The most times that the texts of a request may contain the token's text: each is tokenised apart."""
T = TypeVar("T")


def mark_texts(word: str, value: T) -> T:
    """Return a template's value with MARK for each `word` in its texts; the same value if there is none."""
    packed, written = msgspec.json.encode(value), msgspec.json.encode(word)[1:-1]
    if not word or written not in packed:
        return value
    marked: T = msgspec.json.decode(packed.replace(written, MARK.encode()))
    return marked


async def encode_marked(
    model: Model, text: str, word: str, pool: KeyPool, *, special: bool, param: str, most: int
) -> bytes:
    """Return the packed tokens of a rendered text, in which MARK becomes the tokens of `word` as a text. The rest is as
    in `preprocess.encode`. Raise InvalidRequest."""
    pieces = text.split(MARK)
    if len(pieces) == 1:
        return await encode(model, text, pool, special=special, param=param, most=most)
    if len(pieces) > MOST_MARKS + 1:
        why = f"the texts contain {word!r}, which stands for an image, more than {MOST_MARKS} times"
        raise InvalidRequest(f"{param}: {why}", param=param)
    before, after = model.around if special else (b"", b"")
    packed, size = [before], len(before) + len(after)
    for number, piece in enumerate(pieces):
        own = word[1:] * (number > 0) + piece + word[:1] * (number < len(pieces) - 1)
        packed.append(await encode(model, own, pool, special=False, param=param, most=most))
        size += len(packed[-1])
        if size > 4 * most:
            raise too_many_tokens(most, param)
    return b"".join((*packed, after))


def place_images(tokens: bytes, counts: Sequence[int], token_id: int, most: int) -> tuple[bytes, tuple[int, ...]]:
    """Return a prompt in which each image has as many tokens as `counts` says, and where each begins. Raise
    InvalidRequest if these are more than `most` tokens, or if the template did not place each image once."""
    ids = token_array(tokens)
    placed = ids.count(token_id)
    if placed != len(counts):
        why = f"the chat template wrote {placed} places for the {len(counts)} images of the messages"
        fault = "a fault of the template, or of texts that together are that of the image's token"
        raise InvalidRequest(f"messages: {why}: {fault}", param="messages")
    if len(ids) + sum(counts) - len(counts) > most:
        raise too_many_tokens(most, "messages")
    pieces: list[bytes] = []
    starts: list[int] = []
    one = pack_tokens([token_id])
    at = size = 0
    for count in counts:
        found = ids.index(token_id, at)
        starts.append(size + found - at)
        pieces += (tokens[4 * at : 4 * found], one * count)
        size = starts[-1] + count
        at = found + 1
    pieces.append(tokens[4 * at :])
    return b"".join(pieces), tuple(starts)
