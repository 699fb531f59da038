"""The tokens that stand for images in a prompt.

    "USER: <image>\\nWhat is it?"  ─▶  USER : ▢ What …  ─▶  USER : ▢▢▢…▢ What …
      as the template renders it      one token each        as many as the image has embeddings

The template writes the token's text, once for each image. So no text of a request may contain it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from services.frontend.models.model import Model
from services.frontend.models.preprocess import too_many_tokens
from shared.errors import InvalidRequest
from shared.hashing import pack_tokens, token_array
from shared.messages.cards import ImageInput


def check_texts(
    model: Model, images: ImageInput, messages: Sequence[Mapping[str, Any]], others: Mapping[str, object]
) -> None:
    """Raise InvalidRequest for a text of a request that contains the text of the token which stands for images.
    `others` are further values that the template gets, by their fields."""
    word = model.tokenizer.id_to_token(images.token_id)
    if not word:
        return
    written = msgspec.json.encode(word)[1:-1]
    named = {f"messages[{at}].content": message for at, message in enumerate(messages)}
    for field, value in (*named.items(), *others.items()):
        if written in msgspec.json.encode(value):
            why = f"the text {word!r} stands for an image in prompts of this model; write it otherwise"
            raise InvalidRequest(f"{field}: {why}", param=field)


def place_images(tokens: bytes, count: int, images: ImageInput, most: int) -> tuple[bytes, tuple[int, ...]]:
    """Return a prompt in which each of its `count` images has its tokens, and where each begins. Raise InvalidRequest
    if these are more than `most` tokens, or if the template did not place each image once."""
    ids = token_array(tokens)
    placed = ids.count(images.token_id)
    if placed != count:
        why = f"the chat template wrote {placed} places for the {count} images of the messages"
        fault = "a fault of the template, or of texts that together are that of the image's token"
        raise InvalidRequest(f"messages: {why}: {fault}", param="messages")
    if len(ids) + count * (images.tokens - 1) > most:
        raise too_many_tokens(most, "messages")
    pieces: list[bytes] = []
    starts: list[int] = []
    of_one = pack_tokens([images.token_id] * images.tokens)
    at = size = 0
    for _ in range(count):
        found = ids.index(images.token_id, at)
        starts.append(size + found - at)
        pieces += (tokens[4 * at : 4 * found], of_one)
        size = starts[-1] + images.tokens
        at = found + 1
    pieces.append(tokens[4 * at :])
    return b"".join(pieces), tuple(starts)
