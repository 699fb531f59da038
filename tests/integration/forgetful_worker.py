"""The worker's own process, which leaves out a batch of its KV events: `python -m tests.integration.forgetful_worker`.

After SIGUSR1 the next batch in which blocks were removed is sent without its events. Its sequence is right: no router
sees a gap: only the digests can tell, for as long as the blocks do not come back.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections.abc import Callable

import msgspec

from services.router.index.kv_events import RemovedEvent, decode
from services.worker import rounds
from services.worker.__main__ import check_files, drain_limit_s, served_labels
from services.worker.config import WorkerConfig
from shared.bus.contract import EventBus, EventPublisher, EventSubscription
from shared.kv_events import encode_batch
from shared.messages.cards import EventSource
from shared.runtime.lifecycle import Service, run
from shared.runtime.runtime import Runtime


class _ForgetfulPublisher:
    """An EventPublisher."""

    def __init__(self, publisher: EventPublisher) -> None:
        self._publisher = publisher
        self._forgets = False
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._forget)

    @property
    def source(self) -> EventSource:
        return self._publisher.source

    def publish(self, sequence: int, payload: bytes) -> None:
        batch = decode(payload)
        if self._forgets and any(isinstance(event, RemovedEvent) for event in batch.events):
            self._forgets = False
            payload = encode_batch(batch.time_s, msgspec.msgpack.encode([]), batch.rank)
        self._publisher.publish(sequence, payload)

    def close(self) -> None:
        self._publisher.close()

    def _forget(self) -> None:
        self._forgets = True


class _ForgetfulEvents:
    """An EventBus."""

    def __init__(self, events: EventBus) -> None:
        self._events = events

    @property
    def malformed(self) -> int:
        return self._events.malformed

    def open_publisher(self, *, topic: str = "", ring_batches: int = 10_000) -> EventPublisher:
        return _ForgetfulPublisher(self._events.open_publisher(topic=topic, ring_batches=ring_batches))

    def subscribe(self, source: EventSource, receive: Callable[[int, bytes], None]) -> EventSubscription:
        return self._events.subscribe(source, receive)


async def serve(runtime: Runtime, config: WorkerConfig) -> None:
    """Until `runtime.stopping`."""
    await rounds.serve(dataclasses.replace(runtime, events=_ForgetfulEvents(runtime.events)), config)


if __name__ == "__main__":
    run(Service("worker", WorkerConfig, serve, drain_limit_s, check=check_files, labels=served_labels))
