"""Sends frontends of other machines the model's files that they read: tokenizer, templates and settings."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from shared.bus.contract import Message
from shared.messages.cards import ModelCard
from shared.messages.model_files import MODEL_FILE_PART, PART_BYTES, READ_MODEL_FILE, ModelFilePart, ReadModelFile
from shared.model_file import FILES
from shared.regular_file import open_regular_file


class SentFiles:
    """Answers for one worker."""

    def __init__(
        self, card: Callable[[], ModelCard | None], answer: Callable[[Message, bytes], Awaitable[bool]]
    ) -> None:
        """`card` returns the worker's card, None if it has none; `answer` sends a payload as the answer to a
        message."""
        self._card = card
        self._answer = answer

    async def receive(self, message: Message) -> None:
        """Answer with a part of a file. Raise ProtocolError for a message that is no question, or has no reply
        subject."""
        ask = READ_MODEL_FILE.decode(message.payload, message.headers)
        card = self._card()
        part = ModelFilePart(failed="the worker serves no model now")
        if card is not None and card.path:
            part = await asyncio.to_thread(read_part, Path(card.path), ask)
        await self._answer(message, MODEL_FILE_PART.encode(part, message.headers))


def read_part(directory: Path, ask: ReadModelFile) -> ModelFilePart:
    """Return a part of at most PART_BYTES of a file of `directory`. Nothing but FILES is read. Blocks."""
    if ask.name not in FILES:
        return ModelFilePart(failed="no file that frontends read")
    try:
        with open_regular_file(directory / ask.name) as file:
            about = os.fstat(file.fileno())
            if about.st_size > FILES[ask.name]:
                return ModelFilePart(failed=f"{about.st_size} bytes; at most {FILES[ask.name]} are read")
            file.seek(min(ask.offset, about.st_size))
            return ModelFilePart(file.read(PART_BYTES), about.st_size, about.st_mtime_ns)
    except (FileNotFoundError, NotADirectoryError):
        return ModelFilePart()
    except OSError as wrong:
        return ModelFilePart(failed=wrong.strerror or str(wrong))
