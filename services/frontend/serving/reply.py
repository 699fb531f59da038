"""What an operation hands to a door: an answer, whole or in chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from msgspec import Struct

from services.frontend.protocol.errors import Failure


class Chunk(Struct, frozen=True):
    """One JSON object of a streamed answer."""

    payload: bytes
    more: bool = False
    """Another one follows at once; after the last one, the door's own end of the answer."""
    last: bool = False


class Reply(Protocol):
    """An answer on its way."""

    @property
    def streamed(self) -> bool:
        """Whether the client wants chunks."""
        ...

    @property
    def typed_events(self) -> bool:
        """Chunks are events, each with its name in its first field, `type`; none is needed to say that it was the last
        one. Else over HTTP [DONE] is."""
        ...

    async def full_body(self) -> bytes:
        """The answer as one JSON object. Raises what ended the request."""
        ...

    def keepalive_chunk(self) -> bytes:
        """A chunk that adds nothing to the answer; it may come at any time before the last one."""
        ...

    def error_chunk(self, wrong: Failure) -> bytes:
        """The last chunk, in place of the rest, of an answer that has begun and failed."""
        ...

    def chunks(self, send: Callable[[bytes], bool] | None = None) -> AsyncIterator[Chunk]:
        """The answer in pieces; the first comes with the first text, so that errors before it stay errors.

        Once that is out, pieces go to `send`, where there is one; only what it does not take comes here.
        """
        ...


class JsonReply:
    """An answer that is there already, in one piece."""

    streamed = typed_events = False

    def __init__(self, payload: bytes) -> None:
        self._payload = payload

    async def full_body(self) -> bytes:
        """As in Reply."""
        return self._payload

    def keepalive_chunk(self) -> bytes:
        """As in Reply."""
        return b""

    def error_chunk(self, wrong: Failure) -> bytes:
        """As in Reply."""
        return wrong.payload

    async def chunks(self, send: Callable[[bytes], bool] | None = None) -> AsyncIterator[Chunk]:  # noqa: ARG002
        """As in Reply."""
        yield Chunk(self._payload, last=True)
