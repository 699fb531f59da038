"""EventReader: reads the KV events that vLLM publishes on a local endpoint, in order and without a gap.

PUB  [topic][sequence u64 big-endian][msgpack batch]     ──▶ batches in order
a gap ──▶ DEALER asks for the batches again: ["", first u64] ──▶ ["", topic, sequence, batch] …, ["", "", -1, ""]

Servers before vLLM 0.26 leave the topic out of what they send again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import zmq
import zmq.asyncio

from services.worker.vllm.event_batch import decode_events
from shared.errors import HeadraceError
from shared.messages.kv_events import KvEvent

REPLAY_LIMIT_S = 10.0
"""Seconds that a replay may take."""
UNREAD_LIMIT = 100_000
"""Number of batches that ZeroMQ keeps for this reader; more are lost, and asked for again."""
BATCH_LIMIT_BYTES = 64 << 20
"""Largest message of a replay that is read; ZeroMQ cuts the connection to a server that sends a larger one."""
REPLAY_LIMIT_BYTES = 512 << 20
"""Most bytes of a replay that are read."""


def endpoints(directory: Path, rank: int = 0) -> tuple[str, str]:
    """Return where a rank publishes its events, and where it replays them. vLLM is given those of rank 0, and makes
    the others of them: it adds this suffix to endpoints that have "inproc" in them, and takes no other local ones."""
    suffix = f"_dp{rank}" if rank else ""
    return f"ipc://{directory}/inproc-events{suffix}", f"ipc://{directory}/inproc-replay{suffix}"


class EventsLost(HeadraceError):
    """Batches of events were lost, and vLLM does not have them any more."""


class EventReader:
    """Reads the events of one rank, from the batch with sequence 0 on."""

    def __init__(self, directory: Path, rank: int = 0) -> None:
        """`directory` is where the sockets lie."""
        self.endpoint, self.replay_endpoint = endpoints(directory, rank)
        self.apply: Callable[[list[KvEvent]], None]
        """Gets the events of each batch; set before `run`."""
        self._next = 0
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set_hwm(UNREAD_LIMIT)
        self._socket.subscribe(b"")
        self._socket.connect(self.endpoint)

    async def run(self) -> None:
        """Read until cancelled. Raise EventsLost, and msgspec.MsgspecError for a batch that cannot be read."""
        while True:
            _, number, payload = await self._socket.recv_multipart()
            sequence = int.from_bytes(number, "big")
            if sequence > self._next:
                await self._replay(sequence)
            if sequence == self._next:
                self._take(payload)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _take(self, payload: bytes) -> None:
        self._next += 1
        self.apply(decode_events(payload))

    async def _replay(self, until: int) -> None:
        """Apply the batches before `until` that were missed. Raise EventsLost."""
        for number, payload in await replay(self._context, self.replay_endpoint, self._next, until):
            if number == self._next:
                self._take(payload)
        if self._next < until:
            raise EventsLost(f"vLLM's KV events {self._next} to {until - 1} were lost")


async def replay(
    context: zmq.asyncio.Context, endpoint: str, first: int, until: int | None = None
) -> list[tuple[int, bytes]]:
    """Return number and payload of the batches that vLLM still has, from `first` on and before `until`, or to the last
    one; those that come within REPLAY_LIMIT_S, at most UNREAD_LIMIT and REPLAY_LIMIT_BYTES. Raise ValueError for a
    message of another form."""
    size_bytes = 0
    batches: list[tuple[int, bytes]] = []
    with context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.maxmsgsize = BATCH_LIMIT_BYTES
        socket.connect(endpoint)
        with suppress(TimeoutError):
            async with asyncio.timeout(REPLAY_LIMIT_S):
                await socket.send_multipart([b"", first.to_bytes(8, "big")])
                while len(batches) < UNREAD_LIMIT and size_bytes < REPLAY_LIMIT_BYTES:
                    *_, sequence, payload = await socket.recv_multipart()
                    number = int.from_bytes(sequence, "big")
                    if not payload or (until is not None and number >= until):  # the end has no payload
                        break
                    batches.append((number, payload))
                    size_bytes += len(payload)
    return batches
