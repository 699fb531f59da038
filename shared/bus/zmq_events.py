"""KV events over ZMQ, in the format of vLLM.

    PUB     [topic][sequence, u64 big-endian][payload]
    replay  a DEALER asks the source's ROUTER    ["", first sequence, u64 big-endian]
            one answer for each batch            ["", topic, sequence, payload]
            the end                              ["", "", ff ff ff ff ff ff ff ff, ""]

With CURVE keys the port is libzmq's (curve.py), and the replay's ROUTER asks for the key too.

The limits: batches are dropped if more are unsent than event_port.py allows, or RECEIVE_LIMIT_BATCHES are unread; the
receiver sees a gap in the sequences. The replay buffer is limited in number and in bytes. No socket accepts a frame
that is larger than what it expects: a replay request has 8 bytes, a batch at most BATCH_LIMIT_BYTES.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import zmq

from shared.bus import curve
from shared.bus.curve import CurveKeys, CurvePort
from shared.bus.event_port import SEND_LIMIT_BATCHES, EventPort
from shared.bus.replay_buffer import RING_BYTES, ReplayBuffer, ReplayedBatches
from shared.bus.zmq_reader import ZmqReader, receive_batch
from shared.errors import ConfigError, HeadraceError, ProtocolError, RequestTimeout
from shared.messages.cards import EventSource
from shared.rate_limited_log import RateLimitedLog
from shared.socket_path import reachable

RECEIVE_LIMIT_BATCHES = 20_000
QUESTION_LIMIT_BYTES = 1024
"""The maximum size of a frame that a replay ROUTER accepts."""
BATCH_LIMIT_BYTES = RING_BYTES
"""The maximum size of a batch. A larger one could not be replayed, so it is not sent, and subscribers see a gap."""
REPLAYS_WAITING_LIMIT = 8
"""The maximum number of replays in progress. A further request is ignored, and times out at its sender."""
REPLAY_LIMIT_S = 30.0
"""The maximum duration of a replay in seconds; a subscriber that has not received it by then gets no more."""
REPLAY_SHARE = 64
"""The number of batches sent for one replay before the event loop gets a turn."""
END = b"\xff" * 8
_IPC, _REPLAY = "ipc://", ".replay"
"""The scheme of Unix sockets, and the end of the path of a replay socket."""
_log = logging.getLogger(__name__)


class ZmqEventPublisher:
    """An EventPort and its replay ROUTER, each on a free port."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        advertise: str,
        topic: str,
        ring: ReplayBuffer,
        malformed: RateLimitedLog,
        directory: str = "",
        keys: CurveKeys | None = None,
    ) -> None:
        """With `keys` what is published at a port, and replays of it, are encrypted."""
        self._topic = topic.encode()
        self._ring = ring
        address = _address(host)
        path = f"{directory}/events-{os.urandom(8).hex()}" if directory else ""
        self._opened = ExitStack()
        self._replay = context.socket(zmq.ROUTER)
        self._opened.callback(self._replay.close, linger=0)
        try:
            bound = reachable(f"{path}{_REPLAY}", self._opened).removesuffix(_REPLAY) if path else ""
            self._port: CurvePort | EventPort
            if keys is None:
                self._port = EventPort(address, self._topic, path=bound)
            else:
                self._port = CurvePort(context, address, keys)
                curve.serve(self._replay, keys)
            self._opened.callback(self._port.close)
            if bound:
                self._opened.callback(Path(f"{bound}{_REPLAY}").unlink, missing_ok=True)  # libzmq does not delete it
            self._replay.sndhwm = SEND_LIMIT_BATCHES
            self._replay.maxmsgsize = QUESTION_LIMIT_BYTES
            self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending fails if the receiver is full or gone
            self._replay.ipv6 = ":" in address
            self._replay.bind(f"{_IPC}{bound}{_REPLAY}" if directory else f"tcp://{_bracketed(address)}:*")
        except (OSError, zmq.ZMQError) as wrong:
            self._opened.close()
            raise ConfigError(f"KV events cannot listen on {directory or host}: {wrong}") from None
        if directory:
            self.source = EventSource(f"{_IPC}{path}", f"{_IPC}{path}{_REPLAY}", topic)
        else:
            self.source = EventSource(
                publish=f"tcp://{_bracketed(advertise)}:{self._port.port}",
                replay=f"tcp://{_bracketed(advertise)}:{_bound_port(self._replay)}",
                topic=topic,
                curve_key=keys.public.decode() if keys is not None else "",
            )
        self._answers: deque[_Answer] = deque()
        self._resume: asyncio.Handle | None = None
        self._malformed = malformed
        self._reader = ZmqReader(self._replay, self._asked)

    def publish(self, sequence: int, payload: bytes) -> None:
        if len(payload) > BATCH_LIMIT_BYTES:
            _log.error(
                "a batch of KV events was not sent: it has %d bytes; the limit is %d", len(payload), BATCH_LIMIT_BYTES
            )
            return
        self._ring.append(sequence, payload)
        self._port.publish(self._topic, sequence.to_bytes(8, "big"), payload)

    def close(self) -> None:
        if self._replay.closed:
            return
        if self._resume is not None:
            self._resume.cancel()
        self._reader.close()
        self._opened.close()

    def _asked(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            self._malformed.warn("malformed request for a replay of KV events", _sizes(frames))
        elif len(self._answers) < REPLAYS_WAITING_LIMIT:
            batches = self._ring.since(int.from_bytes(frames[2], "big"))
            self._answers.append(_Answer(frames[0], deque(batches), asyncio.get_running_loop().time() + REPLAY_LIMIT_S))
            self._answer()

    def _answer(self) -> None:
        """Send what the receivers of replays accept now, a few batches per turn; full ones are tried again later."""
        loop = asyncio.get_running_loop()
        if self._resume is not None:
            self._resume.cancel()
            self._resume = None
        taking = False
        for _ in range(len(self._answers)):
            answer = self._answers.popleft()
            said = self._send(answer)
            if said != "done" and loop.time() < answer.deadline:
                self._answers.append(answer)
                taking = taking or said == "taking"
        if self._answers:
            self._resume = loop.call_soon(self._answer) if taking else loop.call_later(0.01, self._answer)
        loop.call_soon(self._reader.read)

    def _send(self, answer: _Answer) -> Literal["done", "taking", "full"]:
        """Send a share of a replay. `done`: all is sent, or the receiver is gone; `full`: it accepts no more now."""
        try:
            for _ in range(REPLAY_SHARE):
                if not answer.batches:
                    self._reply(answer.asker, b"", END, b"")
                    return "done"
                sequence, payload = answer.batches[0]
                self._reply(answer.asker, self._topic, sequence.to_bytes(8, "big"), payload)
                answer.batches.popleft()
        except zmq.Again:
            return "full"
        except zmq.ZMQError as wrong:
            if wrong.errno != zmq.EHOSTUNREACH:
                raise
            return "done"
        return "taking"

    def _reply(self, asker: bytes, *frames: bytes) -> None:
        self._replay.send_multipart((asker, b"", *frames), zmq.DONTWAIT)


@dataclass
class _Answer:
    """A replay in progress to one receiver."""

    asker: bytes
    batches: deque[tuple[int, bytes]]
    deadline: float


class ZmqEventSubscription:
    """A SUB socket, and a DEALER while a replay is in progress."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], source: EventSource, receive: Callable[[int, bytes], None]
    ) -> None:
        self._context = context
        self._source = source
        self._receive = receive
        self._malformed = RateLimitedLog()
        self._opened = ExitStack()
        binds = source.binds == "subscriber"
        socket = _receiver(context, zmq.SUB, source.publish, self._opened, key=source.curve_key, binds=binds)
        socket.subscribe(source.topic.encode())
        self._reader = ZmqReader(socket, self._take, receive_batch)
        self._closed = False
        self._replays: set[_Replay] = set()

    @property
    def malformed(self) -> int:
        """The number of messages so far that were not three frames of topic, sequence and payload."""
        return self._malformed.count

    async def replay(self, first: int, *, timeout_s: float) -> list[tuple[int, bytes]]:
        """Return the batches from `first` on. Raise RequestTimeout, or ProtocolError if the source's address is
        invalid."""
        if not self._source.replay or self._closed:
            raise RequestTimeout(f"{self._source.publish} has no replay")
        replay = _Replay(self._context, self._source, first, self._malformed)
        self._replays.add(replay)
        try:
            async with asyncio.timeout(timeout_s):
                return await replay.batches
        except TimeoutError:
            raise RequestTimeout(f"no replay from {self._source.replay} in {timeout_s:g} s") from None
        finally:
            self._replays.discard(replay)
            replay.close()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._reader.close()
        self._opened.close()
        for replay in self._replays:
            replay.fail(RequestTimeout(f"{self._source.publish} was closed"))

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            self._malformed.warn(f"malformed KV event from {self._source.publish}", _sizes(frames))
        else:
            self._receive(int.from_bytes(frames[1], "big"), frames[2])


class _Replay:
    """One replay request to a source's ROUTER."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], source: EventSource, first: int, malformed: RateLimitedLog
    ) -> None:
        self.batches: asyncio.Future[list[tuple[int, bytes]]] = asyncio.get_running_loop().create_future()
        self._replayed = ReplayedBatches(first)
        self._endpoint = source.replay
        self._malformed = malformed
        self._opened = ExitStack()
        socket = _receiver(context, zmq.DEALER, source.replay, self._opened, key=source.curve_key)
        socket.send_multipart((b"", first.to_bytes(8, "big")), zmq.DONTWAIT)
        self._reader = ZmqReader(socket, self._take)

    def fail(self, wrong: HeadraceError) -> None:
        if not self.batches.done():
            self.batches.set_exception(wrong)

    def close(self) -> None:
        self._reader.close()
        self._opened.close()

    def _take(self, frames: list[bytes]) -> None:
        if self.batches.done():
            return
        # SGLang answers without the topic.
        if len(frames) not in (3, 4) or frames[0] or len(frames[-2]) != 8:
            self._malformed.warn(f"malformed replay from {self._endpoint}", _sizes(frames))
        elif frames[-2] == END:
            self.batches.set_result(self._replayed.batches)
        else:
            try:
                self._replayed.append(int.from_bytes(frames[-2], "big"), frames[-1])
            except ProtocolError as wrong:
                self.fail(wrong)


class ZmqEventBus:
    """Opens publishers and subscriptions on one ZMQ context; a context manager that ends it.

    Publishers listen on `host`, and publish the address `advertise` (`host` if not given); with `encrypted` they have a
    CURVE key. With `directory` they listen at Unix sockets in it instead, without one.
    """

    def __init__(
        self, host: str = "127.0.0.1", advertise: str = "", directory: str = "", *, encrypted: bool = False
    ) -> None:
        """Raise ConfigError if it cannot encrypt."""
        self._host = host
        self._keys = curve.new_keys() if encrypted and not directory else None
        self._directory = directory
        self._advertise = advertise or host
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._malformed = RateLimitedLog()

    @property
    def malformed(self) -> int:
        """The number of unreadable replay requests so far."""
        return self._malformed.count

    def __enter__(self) -> ZmqEventBus:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open_publisher(self, *, topic: str = "", ring_batches: int = 10_000) -> ZmqEventPublisher:
        """Open a publisher, in a running event loop. Raise ConfigError if it cannot listen."""
        ring = ReplayBuffer(ring_batches)
        return ZmqEventPublisher(
            self._context, self._host, self._advertise, topic, ring, self._malformed, self._directory, self._keys
        )

    def subscribe(self, source: EventSource, receive: Callable[[int, bytes], None]) -> ZmqEventSubscription:
        """Subscribe, in a running event loop. Raise ProtocolError if an endpoint of `source` is invalid."""
        return ZmqEventSubscription(self._context, source, receive)

    def close(self) -> None:
        """Close everything that is still open."""
        self._context.destroy(linger=0)


def _sizes(frames: list[bytes]) -> str:
    return f"{len(frames)} frames of {[len(frame) for frame in frames]} bytes"


def _address(host: str) -> str:
    return "127.0.0.1" if host == "localhost" else host  # ZMQ binds to addresses and interfaces, not to host names


def _receiver(
    context: zmq.Context[zmq.Socket[bytes]],
    kind: int,
    endpoint: str,
    opened: ExitStack,
    *,
    key: str,
    binds: bool = False,
) -> zmq.Socket[bytes]:
    """Return a socket for batches from `endpoint`, which is valid until `opened` is closed. With a CURVE `key` it talks
    only to the publisher that has it. Raise ProtocolError if endpoint or key is invalid."""
    socket = context.socket(kind)
    opened.callback(socket.close, linger=0)
    try:
        socket.rcvhwm = RECEIVE_LIMIT_BATCHES
        socket.maxmsgsize = BATCH_LIMIT_BYTES
        socket.ipv6 = "[" in endpoint
        if key:
            curve.join(socket, key)
        if binds:
            socket.bind(endpoint)
        elif endpoint.startswith(_IPC):  # the path may be too long for the kernel
            socket.connect(f"{_IPC}{reachable(endpoint.removeprefix(_IPC), opened)}")
        else:
            socket.connect(endpoint)
    except (zmq.ZMQError, OSError, ValueError, ConfigError) as wrong:
        opened.close()
        raise ProtocolError(f"KV events of {endpoint}: {wrong}") from None
    return socket


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _bound_port(socket: zmq.Socket[bytes]) -> str:
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return bound.rstrip(b"\0").decode().rpartition(":")[2]
