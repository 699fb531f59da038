"""The planes of KV events in a simulated world. Over NATS they are the product's own code on the twin of the bus; only
the stream of JetStream has a twin here.

    zmq          MemoryEventBus: no loss of NATS touches it
    nats         NatsEventBus: what is published while NATS is away is lost, and replayed by its source
    jetstream    the same, and replayed from the KeptEvents of the server, also if the source is frozen or dead
"""

from __future__ import annotations

import asyncio
from functools import partial

from shared import subjects
from shared.bus.contract import Message
from shared.bus.delivery import Delivery, next_turn
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.bus.memory_events import MemoryEventBus, MemoryEventPublisher
from shared.bus.nats_events import NatsEventBus, NatsEventPublisher, ReadStream, split_message
from shared.bus.replay_buffer import ReplayBuffer

SERVER = "nats"
"""The endpoint of the server, for the weather."""


class KeptEvents:
    """The stream of a NATS server: the last batches of each source."""

    def __init__(self, namespace: str, delivery: Delivery, limit_batches: int) -> None:
        self._prefix = subjects.events(namespace, "")
        self._delivery = delivery
        self._limit_batches = limit_batches
        self._kept: dict[str, ReplayBuffer] = {}

    def published(self, message: Message) -> None:
        """Keep a message if it is a batch."""
        source = message.subject.removeprefix(self._prefix)
        if source == message.subject or "." in source:
            return
        self._kept.setdefault(source, ReplayBuffer(self._limit_batches)).append(*split_message(message.payload))

    def restart(self) -> None:
        """The server restarts, and what was in its memory is lost."""
        self._kept.clear()

    async def read(self, reader: MemoryBus, _stream: str, subject: str, first: int) -> list[tuple[int, bytes]]:
        """A ReadStream of the process with this bus, which waits for ever if the question or the answer is lost."""
        reader._check(b"")
        answer: asyncio.Future[list[tuple[int, bytes]]] = asyncio.get_running_loop().create_future()

        def arrived(batches: list[tuple[int, bytes]]) -> None:
            if reader.connected and not answer.done():
                answer.set_result(batches)

        def asked() -> None:
            kept = self._kept.get(subject.removeprefix(self._prefix))
            batches = [] if kept is None else kept.since(first)
            self._delivery(SERVER, reader.name, "replay", partial(arrived, batches))

        self._delivery(reader.name, SERVER, "replay", partial(next_turn, asked))
        return await answer


class MutableBus(MemoryBus):
    """A bus that loses KV events while it is muted."""

    muted = False

    def publish_now(self, subject: str, payload: bytes) -> None:
        if not self.muted:
            super().publish_now(subject, payload)


class ShortMemory(MemoryEventBus):
    """Whose publishers keep fewer batches for replay than services ask for."""

    def __init__(self, broker: MemoryBroker, name: str, ring_batches: int) -> None:
        super().__init__(broker.events, name)
        self._ring_batches = ring_batches

    def open_publisher(self, *, topic: str = "", ring_batches: int = 10_000) -> MemoryEventPublisher:
        return super().open_publisher(topic=topic, ring_batches=min(ring_batches, self._ring_batches))


class ShortMemoryOverNats(NatsEventBus):
    """The same over NATS."""

    def __init__(
        self, bus: MemoryBus, namespace: str, name: str, ring_batches: int, *, stream: str, read_stream: ReadStream
    ) -> None:
        super().__init__(bus, namespace, name, stream=stream, read_stream=read_stream)
        self._ring_batches = ring_batches

    def open_publisher(self, *, topic: str = "", ring_batches: int = 10_000) -> NatsEventPublisher:
        return super().open_publisher(topic=topic, ring_batches=min(ring_batches, self._ring_batches))
