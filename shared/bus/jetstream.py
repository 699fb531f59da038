"""The stream of JetStream that keeps the KV events of a namespace, for replays that need no source.

    sources ──publish──▶ headrace.NS.events.SOURCE ──▶ routers that listen
                                   └──▶ the stream, in the server's memory ──read by sequence──▶ routers with a gap

A stream that someone else has made is taken as it is, with the limits that it has. Ours has at most
`observe.events_stream_bytes` for all sources, KEPT_BATCHES of each, and nothing older than KEPT_S. It is in memory: a
restart of the server loses it, and then a source makes it again. Routers that miss something from before take
snapshots. A source that starts with another size gives ours that size; those that run leave it so.

The server numbers the messages of all sources in one row, and a replay needs those of one source from a sequence on. So
the reader steps back from that source's newest message, further each time, until it is early enough. From there on it
asks for pages of many messages; a server older than 2.11 answers with one.
"""

from __future__ import annotations

import asyncio
import json
import logging

from nats.js import JetStreamContext
from nats.js.api import RawStreamMsg, StorageType, StreamConfig, StreamInfo
from nats.js.errors import APIError, BadRequestError, NotFoundError, ServiceUnavailableError

from shared import subjects
from shared.bus.nats_bus import NatsBus
from shared.bus.nats_connection import FAILURES
from shared.bus.nats_events import split_message
from shared.bus.replay_buffer import ReplayedBatches
from shared.errors import ConfigError, ProtocolError, Unavailable
from shared.rate_limited_log import RateLimitedLog

KEPT_BATCHES = 10_000
"""The maximum number of batches of one source, as many as a source keeps that has a replay of its own."""
KEPT_S = 3600.0
STEP = 4
"""Each step back is 4 times as long as the one before."""
LOOK_S = 1.0
"""The time between two looks at the connection, in seconds; and that after which a stream is made again in vain."""
ASKED_S = 30.0
"""The time in seconds after which a source asks whether the stream is still there: a person may delete it."""
ANSWER_LIMIT_S = 5.0
PAGE_BATCHES, PAGE_BYTES = 1000, 8 << 20
"""The most that one question of a replay is answered with; a batch that is larger comes alone."""
MADE_BY = "KV events of Headrace"
"""The description of a stream of ours."""
_PAGE_ENDS, _NOT_FOUND = "204", "404"
_NO_JETSTREAM = (None, 10039, 10076)
"""The errors of a server, or of an account, without JetStream; None stands for no answer at all."""
_NAME_TAKEN = 10058
_SUBJECTS_TAKEN = 10065

_logger = logging.getLogger(__name__)


class EventStore:
    """The stream of one namespace, and every stream that a source names, over the connection of `bus`."""

    def __init__(self, bus: NatsBus, namespace: str, limit_bytes: int) -> None:
        self.name, self._subjects = subjects.event_stream(namespace)
        self._bus = bus
        self._limit_bytes = limit_bytes
        self._log = RateLimitedLog()

    async def keep(self) -> None:
        """Make the stream where it is missing, on each connection and again if it is deleted, until cancelled. Raise
        ConfigError if the first server cannot have it."""
        made, asked_s, now = 0, 0.0, asyncio.get_running_loop().time
        while True:
            connections = self._bus.connections
            if self._bus.connected and (connections != made or now() - asked_s >= ASKED_S):
                try:
                    await self.make(resize=not made)
                    made, asked_s = connections, now()
                except ConfigError as wrong:
                    if not made:
                        raise
                    self._log.error("stream", wrong)
                except Unavailable as wrong:
                    self._log.warn(f"stream {self.name}", wrong)
            await asyncio.sleep(LOOK_S)

    async def read(self, stream: str, subject: str, first: int) -> list[tuple[int, bytes]]:
        """Return the batches on `subject` from sequence `first` on, or none if the stream does not reach so far back.
        Raise Unavailable or ProtocolError."""
        replayed = ReplayedBatches(first)
        try:
            context = self._context()
            number = await _start(context, stream, subject, first)
            while number:
                number = await self._read_page(stream, subject, number, replayed)
        except NotFoundError:  # the stream has nothing of the source
            pass
        except FAILURES as wrong:
            raise Unavailable(f"stream {stream}: {wrong!r}") from wrong
        return replayed.batches

    async def _read_page(self, stream: str, subject: str, number: int, replayed: ReplayedBatches) -> int:
        """Read messages on `subject` from a number in the stream on. Return the number of the next page; 0 at the end.
        Raise Unavailable, or ProtocolError."""
        question = {"seq": number, "next_by_subj": subject, "batch": PAGE_BATCHES, "max_bytes": PAGE_BYTES}
        asked, next_number = f"$JS.API.DIRECT.GET.{stream}", 0
        answered = self._bus.stream(
            asked, json.dumps(question).encode(), idle_timeout_s=ANSWER_LIMIT_S, pending_limit=PAGE_BATCHES + 1
        )
        async with answered as answers:
            async for answer in answers:
                status, pending = answer.headers.get("Status", ""), answer.headers.get("Nats-Num-Pending", "")
                if status:
                    if status not in (_PAGE_ENDS, _NOT_FOUND):
                        raise Unavailable(f"{asked}: {status} {answer.headers.get('Description', '')}")
                    return next_number if pending not in ("", "0") else 0
                replayed.append(*_split(answer.payload))
                next_number = int(answer.headers.get("Nats-Sequence", "0")) + 1
                if not pending:  # a server that knows no pages
                    break
        return next_number

    async def make(self, *, resize: bool = True) -> None:
        """Make the stream if it is not there. With `resize`, give one of ours its size. Raise ConfigError, or
        Unavailable if it may work later."""
        context = self._context()
        try:
            try:
                found = await context.stream_info(self.name)
            except NotFoundError:
                found = await context.add_stream(self._settings())
            if resize:
                found = await self._resized(context, found)
        except ServiceUnavailableError as wrong:
            if wrong.err_code not in _NO_JETSTREAM:
                raise Unavailable(str(wrong)) from wrong
            raise ConfigError(
                "observe.events_plane: jetstream needs JetStream, which NATS does not offer to this user: start"
                " nats-server with `jetstream {}` in its settings, or choose nats"
            ) from None
        except BadRequestError as wrong:
            if wrong.err_code == _NAME_TAKEN:  # another process made it meanwhile
                raise Unavailable(str(wrong)) from wrong
            raise self._refused(wrong) from None
        except APIError as wrong:
            raise self._refused(wrong) from None
        except FAILURES as wrong:
            raise Unavailable(
                f"no answer of JetStream ({wrong!r}); may the user of NATS publish to $JS.API.STREAM.*.{self.name}?"
            ) from wrong
        if not found.config.allow_direct or self._subjects not in (found.config.subjects or ()):
            raise ConfigError(
                f"observe.events_plane: the stream {self.name} that NATS has needs allow_direct and the subject"
                f" {self._subjects}; change or delete it"
            )

    async def _resized(self, context: JetStreamContext, found: StreamInfo) -> StreamInfo:
        """Return the stream with the size that the settings say, if it is ours; else say that it keeps its own."""
        there = found.config.max_bytes
        if there == self._limit_bytes:
            return found
        if found.config.description == MADE_BY:
            resized = await context.update_stream(found.config.evolve(max_bytes=self._limit_bytes))
            _logger.info("the stream %s has %s bytes from now on, and had %s", self.name, self._limit_bytes, there)
            return resized
        _logger.warning(
            "observe.events_stream_bytes is %d, but the stream %s, which someone else has made, keeps its max_bytes %s",
            self._limit_bytes,
            self.name,
            there,
        )
        return found

    def _refused(self, wrong: APIError) -> ConfigError:
        if wrong.err_code == _SUBJECTS_TAKEN:
            return ConfigError(
                f"observe.events_plane: another stream of NATS has {self._subjects}, or some of it, so that it refuses"
                f" {self.name}; change or delete the other one"
            )
        return ConfigError(
            f"observe.events_stream_bytes: NATS refuses a stream of {self._limit_bytes} bytes in memory:"
            f" {wrong.description} (error {wrong.err_code})"
        )

    def _settings(self) -> StreamConfig:
        return StreamConfig(
            name=self.name,
            description=MADE_BY,
            subjects=[self._subjects],
            storage=StorageType.MEMORY,
            max_bytes=self._limit_bytes,
            max_msgs_per_subject=KEPT_BATCHES,
            max_age=KEPT_S,
            allow_direct=True,
        )

    def _context(self) -> JetStreamContext:
        return self._bus.jetstream(ANSWER_LIMIT_S)


async def _start(context: JetStreamContext, stream: str, subject: str, first: int) -> int:
    """Return the number in the stream of a message on `subject` that is not after the batch `first` of the source's
    present start. 0 if there is none, or no such batch. Raise NotFoundError if the stream has nothing of that
    source."""
    newest = await context.get_last_msg(stream, subject, direct=True)
    latest, end = _batch(newest)[0], newest.seq or 0
    back = latest - first + 1
    while back > 0:
        number = max(1, end - back)
        found = await context.get_msg(stream, seq=number, subject=subject, direct=True, next=True)
        if not first < _batch(found)[0] <= latest:  # later than `latest`: of an earlier start
            return found.seq or 0
        if number == 1:
            break
        back *= STEP
    return 0


def _batch(message: RawStreamMsg) -> tuple[int, bytes]:
    return _split(message.data or b"")


def _split(message: bytes) -> tuple[int, bytes]:
    if len(message) < 8:
        raise ProtocolError("a message in the stream without a sequence")
    return split_message(message)
