"""FrameSender: publishes the step frames that are due, in one task, so that each frontend's frames come in order."""

from __future__ import annotations

import asyncio
import logging

from services.worker.metrics import WorkerMetrics
from services.worker.requests.frame_log import FrameLog
from shared import subjects
from shared.bus.contract import Bus
from shared.errors import BusDown, PayloadTooLarge

FAIR_SHARE = 64
"""Frames that are published before the event loop gets a turn, where NATS takes all: a whole ring took 40 ms."""

_log = logging.getLogger(__name__)


class FrameSender:
    """One worker's sender. A frame that NATS does not take now stays in the log, and is sent at a later `wake`."""

    def __init__(self, bus: Bus, namespace: str, log: FrameLog, metrics: WorkerMetrics) -> None:
        self._bus = bus
        self._namespace = namespace
        self._metrics = metrics
        self._due = asyncio.Event()
        self._share = 0
        self.log = log

    def append(self, frontend: str, parts: bytes) -> None:
        """Add one frame of encoded parts, which is sent as soon as the task gets its turn."""
        self.log.append(frontend, parts)
        self._due.set()

    def wake(self) -> None:
        """Try to send unsent frames again."""
        self._due.set()

    async def run(self) -> None:
        """Send frames until cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            await self.flush()

    async def flush(self) -> None:
        """Send all unsent frames, unless NATS is away. Not to be called while `run` runs."""
        for frontend in self.log.frontends:
            while (frame := self.log.next_unsent(frontend)) is not None:
                try:
                    await self._bus.publish(subjects.stream(self._namespace, frontend), frame)
                except BusDown:
                    return
                except PayloadTooLarge as wrong:
                    _log.error("a step frame for frontend %s is lost: %s", frontend, wrong)
                self.log.mark_sent(frontend, frame)
                self._metrics.count_frame()
                self._share = (self._share + 1) % FAIR_SHARE
                if not self._share:
                    await asyncio.sleep(0)
        self._metrics.count_lost_frames(self.log.lost)
