"""EventReader: reads the KV events that vLLM publishes on a local endpoint, in order and without a gap.

PUB  [topic][sequence u64 big-endian][msgpack batch]     ──▶ batches in order
a gap ──▶ DEALER asks for the batches again: ["", first u64] ──▶ ["", topic, sequence, batch] …, ["", "", -1, ""]
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from shared.errors import HeadraceError
from shared.messages import EventBatch, KvEvent

REPLAY_LIMIT_S = 10.0
"""Seconds that a replay may take."""
UNREAD_LIMIT = 100_000
"""Number of batches that ZeroMQ keeps for this reader; more are lost, and asked for again."""
_END = (-1).to_bytes(8, "big", signed=True)
_BATCH = msgspec.msgpack.Decoder(EventBatch)


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
        self.apply(_BATCH.decode(payload).events)

    async def _replay(self, until: int) -> None:
        """Apply the batches before `until` that were missed. Raise EventsLost."""
        with self._context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(self.replay_endpoint)
            try:
                async with asyncio.timeout(REPLAY_LIMIT_S):
                    await socket.send_multipart([b"", self._next.to_bytes(8, "big")])
                    while self._next < until:
                        _, _, number, payload = await socket.recv_multipart()
                        if number == _END:
                            break
                        if int.from_bytes(number, "big") == self._next:
                            self._take(payload)
            except TimeoutError:
                pass
        if self._next < until:
            raise EventsLost(f"vLLM's KV events {self._next} to {until - 1} were lost")
