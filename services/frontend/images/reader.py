"""Reads the images of requests: each is taken from the body or fetched, and decoded once, or refused by name.

data URI ─▶ base64 ───────────────────┐
                                      ├─▶ key ─▶ prepared lately? ── yes ─▶ key and pixels
URL ─▶ a turn to fetch ─▶ fetcher.py ─┘             │ no
                                                    └─▶ a turn of images/decoder_program.py ─▶ the same
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

import msgspec
from msgspec.structs import replace

from services.frontend.auth.turnstile import Turnstile
from services.frontend.child_processes import ChildProcesses
from services.frontend.config import ImagesConfig
from services.frontend.images.decoding import (
    CPU_LIMIT_S,
    MEMORY_LIMIT_BYTES,
    PREPARED,
    PictureShape,
    Prepare,
    Prepared,
    key_of,
)
from services.frontend.images.fetcher import FetchFailed, ImageFetcher
from services.frontend.images.prepared_images import PreparedImages, name_of
from services.frontend.protocol.errors import field_error
from services.frontend.protocol.parts import ImageSource
from shared.errors import InvalidRequest
from shared.messages.cards import ImageInput

FETCHES_LIMIT = 16
"""Images that are fetched, or wait to be decoded after that, at the same time; one API key may have half of them."""
_HEAD_CHARACTERS = 256
"""The longest beginning of a data URI, before its data."""
_DATA = "data:"
_WITHOUT_SPACE = str.maketrans("", "", " \t\r\n")


class ImageReader:
    """Reads the images of all requests."""

    def __init__(self, config: ImagesConfig, prepared_limit: int, fetcher: ImageFetcher | None = None) -> None:
        """Create it; `prepared_limit` is the largest number of bytes of the pixels that a model sees, `fetcher` is one
        that reaches other addresses, for tests."""
        self._config = config
        self.prepared_limit = prepared_limit
        """For reading only."""
        self._fetcher = fetcher or ImageFetcher(config.hosts, bytes_limit=config.bytes, time_limit_s=config.fetch_s)
        self._fetches = Turnstile(FETCHES_LIMIT, FETCHES_LIMIT // 2)
        self.prepared = PreparedImages(config.prepared_bytes)
        """For reading only."""
        self._processes = ChildProcesses("services.frontend.images.decoder_program", "decoded the image")

    def check(self, sources: Sequence[ImageSource]) -> None:
        """Check the images of a request as far as their URLs say what they are. Raise InvalidRequest."""
        if len(sources) > self._config.most:
            why = f"{len(sources)} images in one request, more than {self._config.most} (images.most)"
            raise field_error(sources[self._config.most].where, why)
        for number, source in enumerate(sources, 1):
            if source.url[: len(_DATA)].lower() == _DATA:
                _head(source, number)
                continue
            try:
                self._fetcher.check(source.url)
            except FetchFailed as wrong:
                raise _refusal(source, number, str(wrong)) from None

    async def read(
        self,
        sources: Sequence[ImageSource],
        wanted: ImageInput | PictureShape,
        *,
        key: str = "",
        salt: str = "",
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        size_only: bool = False,
    ) -> list[Prepared]:
        """Return the images of a request, prepared. `key` is the name of its API key, `salt` that of its cached blocks.
        `waiting` counts the request while it waits, and raises Overloaded at a limit. With `size_only` images may have
        no pixels. Raise InvalidRequest, also as soon as all pixels are too many for a message; Unavailable if an image
        cannot be decoded now."""
        urls = [source.url for source in sources]  # no keys of a dict: the hash of one with data takes a millisecond
        found: list[Prepared] = []
        with waiting():
            for at, source in enumerate(sources):
                first = urls.index(source.url)
                read = found[first] if first < at else await self._read(source, at + 1, wanted, key, salt, size_only)
                found.append(read)
                if isinstance(wanted, ImageInput):
                    self.check_payload(sum(3 * one.width * one.height for one in found))
        return found

    def check_payload(self, size_bytes: int) -> None:
        """Raise InvalidRequest if prepared images, and what goes with them, are too large for a message."""
        if size_bytes > (limit := self.prepared_limit):
            why = f"its images, prepared, and its tokens have {size_bytes} bytes, more than nats.payload_limit_bytes,"
            raise field_error(
                "messages", f"{why} {limit}; send fewer images, or smaller ones", "request_too_large", status=413
            )

    async def aclose(self) -> None:
        """End the processes and wait until they have ended."""
        await self._processes.aclose()

    async def _read(
        self, source: ImageSource, number: int, wanted: ImageInput | PictureShape, key: str, salt: str, size_only: bool
    ) -> Prepared:
        if source.url[: len(_DATA)].lower() == _DATA:
            body, stated = self._data(source, number)
            return await self._prepare(source, number, self._question(body, stated, wanted), key, salt, size_only)
        await self._fetches.enter(key)
        try:
            try:
                body, stated = await self._fetcher.fetch(source.url)
            except FetchFailed as wrong:
                raise _refusal(source, number, str(wrong)) from None
            return await self._prepare(source, number, self._question(body, stated, wanted), key, salt, size_only)
        finally:
            self._fetches.leave(key)

    def _data(self, source: ImageSource, number: int) -> tuple[bytes, str]:
        """Return the file in a data URI, and the media type that it states. Raise InvalidRequest."""
        stated, begin = _head(source, number)
        data = source.url[begin:]
        body = _from_base64(data)
        if body is None:
            first = "; leave out what is before its data" if data[: len(_DATA)].lower() == _DATA else ""
            raise _refusal(source, number, f"has data that is not base64{first}")
        if len(body) > self._config.bytes:
            why = f"has {len(body)} bytes, more than the limit of {self._config.bytes} (images.bytes)"
            raise _refusal(source, number, why)
        return body, stated

    def _question(self, data: bytes, stated: str, wanted: ImageInput | PictureShape) -> Prepare:
        seen, shape = (None, wanted) if isinstance(wanted, PictureShape) else (wanted, None)
        limits = self._config.pixels, self.prepared_limit
        return Prepare(data, b"" if seen is None else key_of(data, seen), stated, seen, *limits, shape)

    async def _prepare(
        self, source: ImageSource, number: int, asked: Prepare, key: str, salt: str, size_only: bool
    ) -> Prepared:
        name = name_of(asked, salt)
        if (found := self.prepared.find(name)) is not None:
            return found
        async with self._processes.turn(key) as ask:
            answer = await ask(msgspec.msgpack.encode(replace(asked, size_only=size_only)))
        if answer is None:
            limit = f"{CPU_LIMIT_S:g} s or {MEMORY_LIMIT_BYTES >> 20} MiB"
            raise _refusal(source, number, f"takes more than {limit} to decode")
        prepared = PREPARED.decode(answer)
        if prepared.wrong:
            raise _refusal(source, number, prepared.wrong)
        if asked.wanted is not None and not size_only:  # what pictures are made from does not come again in each turn
            self.prepared.add(name, prepared)
        return prepared


def _head(source: ImageSource, number: int) -> tuple[str, int]:
    """Return the media type of a data URI, and where its data begin. Raise InvalidRequest."""
    head, comma, _ = source.url[:_HEAD_CHARACTERS].partition(",")
    stated, *more = head[len(_DATA) :].lower().split(";")
    if not comma or "base64" not in more:
        raise _refusal(source, number, "has a data URI that does not begin as data:image/png;base64,")
    return stated.strip(), len(head) + 1


def _from_base64(text: str) -> bytes | None:
    """Return what a text in base64 says, which may have white space. None if it is not base64."""
    if not text.isascii():  # such a text would be searched slowly
        return None
    with suppress(msgspec.ValidationError):
        return msgspec.convert(text, bytes)  # five times as fast as binascii
    with suppress(msgspec.ValidationError):
        return msgspec.convert(text.translate(_WITHOUT_SPACE), bytes)
    return None


def _refusal(source: ImageSource, number: int, wrong: str) -> InvalidRequest:
    return field_error(source.where, f"{source.name or f'image {number}'} {wrong}")
