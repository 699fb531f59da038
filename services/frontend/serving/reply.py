"""The answer of an operation, as the HTTP and NATS APIs get it: one body, or chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Protocol

from msgspec import Struct

from services.frontend.protocol.errors import Failure


class Chunk(Struct, frozen=True):
    """One JSON object of a streamed answer."""

    payload: bytes
    more: bool = False
    """Whether more follows at once: another chunk, or after the last one the API's own end of the answer."""
    last: bool = False


class Reply(Protocol):
    """An answer that is being made."""

    @property
    def streamed(self) -> bool:
        """Whether the client wants chunks."""
        ...

    @property
    def typed_events(self) -> bool:
        """Whether chunks are events with a name in their first field, `type`. Such an answer needs no other sign of its
        end; others end with [DONE] over HTTP."""
        ...

    async def full_body(self) -> bytes:
        """Return the answer as one JSON object. Raises the error that ended the request."""
        ...

    def keepalive_chunk(self) -> bytes:
        """Return a chunk that adds nothing to the answer. It may be sent at any time before the last chunk."""
        ...

    def error_chunk(self, failure: Failure) -> bytes:
        """Return the last chunk of an answer that failed after it had begun."""
        ...

    def chunks(self, send: Callable[[bytes], bool] | None = None) -> AsyncIterator[Chunk]:
        """Yield the answer in chunks. The first comes with the first text, so that earlier errors are raised.

        Once it is out, chunks go to `send`, if there is one; only those that `send` does not take are yielded.
        """
        ...


class JsonReply:
    """An answer in one piece that is complete already."""

    streamed = typed_events = False

    def __init__(self, payload: bytes) -> None:
        self._payload = payload

    async def full_body(self) -> bytes:
        """Return the answer."""
        return self._payload

    def keepalive_chunk(self) -> bytes:
        """Return nothing, since the answer is not streamed."""
        return b""

    def error_chunk(self, failure: Failure) -> bytes:
        """Return the error's body."""
        return failure.payload

    async def chunks(self, send: Callable[[bytes], bool] | None = None) -> AsyncIterator[Chunk]:  # noqa: ARG002
        """Yield the answer as the only chunk."""
        yield Chunk(self._payload, last=True)
