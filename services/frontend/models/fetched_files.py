"""Makes the files of a model's tokenizer and templates readable here: a worker of another machine sends its own.

    the card's directory has the tokenizer of the card ──▶ that directory
    else                                                ──▶ a temporary one, with what the card's worker sends

The tokenizer and the template must have the digests of the card, which `load_model` checks. Nothing is kept: what is
loaded is in memory.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from shared import subjects
from shared.bus.contract import Bus
from shared.errors import HeadraceError, ModelError
from shared.messages.cards import ModelCard
from shared.messages.model_files import MODEL_FILE_PART, PART_BYTES, READ_MODEL_FILE, ModelFilePart, ReadModelFile
from shared.model_file import FILES, TOKENIZER, read_model_file

PART_LIMIT_S = 10.0
"""Limit in seconds of the answer with one part."""
LIMIT_S = 120.0
"""Limit in seconds for all files of a model."""


class ModelFiles:
    """Finds, or fetches, the files of model cards."""

    def __init__(self, bus: Bus, namespace: str) -> None:
        self._bus = bus
        self._namespace = namespace

    @asynccontextmanager
    async def directory_of(self, card: ModelCard) -> AsyncIterator[Path]:
        """Return a directory with the card's files, for as long as the context is open. Raise ModelError."""
        here = Path(card.path)
        why = await asyncio.to_thread(_fault, here, card.tokenizer_digest)
        if not why:
            yield here
            return
        async with AsyncExitStack() as opened:
            try:
                fetched = Path(opened.enter_context(TemporaryDirectory(prefix="headrace-model-")))
                async with asyncio.timeout(LIMIT_S):
                    for file in FILES:
                        await self._fetch(card.instance, file, fetched / file)
                if wrong := await asyncio.to_thread(_fault, fetched, card.tokenizer_digest):
                    raise ModelError(wrong.removeprefix(f"{fetched}/"))
            except TimeoutError:
                raise ModelError(f"{why}, and worker {card.instance} takes too long to send its files") from None
            except HeadraceError as refused:
                raise ModelError(f"{why}, and worker {card.instance} does not send its files: {refused}") from None
            except OSError as full:
                raise ModelError(f"{why}, and its files cannot be kept here: {full.strerror or full}") from None
            yield fetched

    async def _fetch(self, worker: str, name: str, to: Path) -> None:
        """Write a worker's file to `to`, unless the worker has none. Raise HeadraceError."""
        first = part = await self._ask(worker, ReadModelFile(name))
        if part.size < 0:
            return
        to.parent.mkdir(exist_ok=True)
        with to.open("wb") as file:
            file.write(part.data)
            while file.tell() < first.size:
                part = await self._ask(worker, ReadModelFile(name, file.tell()))
                if (part.size, part.changed_ns) != (first.size, first.changed_ns) or not part.data:
                    raise ModelError(f"{name} changed while it was read")
                file.write(part.data)

    async def _ask(self, worker: str, ask: ReadModelFile) -> ModelFilePart:
        subject = subjects.worker(self._namespace, worker, "files")
        answer = await self._bus.request(subject, READ_MODEL_FILE.encode(ask), timeout_s=PART_LIMIT_S)
        part = MODEL_FILE_PART.decode(answer.payload)
        if part.failed:
            raise ModelError(f"{ask.name}: {part.failed}")
        if len(part.data) > PART_BYTES or not -1 <= part.size <= FILES[ask.name]:
            raise ModelError(f"{ask.name}: a part of {len(part.data)} bytes of {part.size}")
        return part


def _fault(directory: Path, digest: str) -> str:
    """Return why the directory does not have the tokenizer with this digest. Empty if it has it. Blocks."""
    file = directory / TOKENIZER
    try:
        content = read_model_file(file, FILES[TOKENIZER])
    except ModelError as wrong:
        return str(wrong)
    found = hashlib.sha256(content).hexdigest()
    return "" if found == digest else f"{file}: SHA-256 {found[:16]}… is not the workers' {digest[:16]}…"
