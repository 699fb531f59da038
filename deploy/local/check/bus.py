"""Measures the servers of NATS: messages to itself and back, the largest payload, the rights of the user, the clock."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from contextlib import suppress
from datetime import datetime
from statistics import median, quantiles

from deploy.local.check.measurements import BusMeasured, ClockSample, Unmeasured, clock_bounds, first_of
from shared import subjects
from shared.bus.contract import Message
from shared.bus.nats_access import refusal_text
from shared.bus.nats_connection import (
    FAILURES,
    DirectClient,
    abort,
    dial,
    sync,
)
from shared.bus.nats_servers import server_urls, without_password
from shared.config import NatsConfig
from shared.errors import BusDown
from shared.file_reads import FileReads

LIMIT_S = 5.0
ANSWER_LIMIT_S = 1.0
ECHO_LIMIT_S = 3.0
"""Limit of the time for the largest message, in seconds."""
TRIPS, SMALL_BYTES = 40, 256
CLOCK_ASKED = 5
HEADERS = {"Headrace-Check": "x" * 256}
"""The headers of the largest message: ours have some, and the server's limit counts them."""
TIME_SUBJECT = "$SYS.REQ.USER.INFO"
"""The subject where the server says who a user is, and what time it is."""


def measure(config: NatsConfig, namespace: str) -> BusMeasured | Unmeasured:
    """Return what was measured of the first server that answers, within LIMIT_S, and what is wrong with the others."""
    logging.getLogger("nats").setLevel(logging.CRITICAL)
    return first_of([asyncio.run(_measure(config, url, namespace)) for url in server_urls(config.url)])


async def _measure(config: NatsConfig, url: str, namespace: str) -> BusMeasured | Unmeasured:
    client, said = DirectClient(), list[Exception]()
    shown = without_password(url)
    try:
        async with asyncio.timeout(LIMIT_S):
            await dial(client, config, url, "headrace check", said.append, FileReads())
            return await _Probe(client, config, namespace, said).run(shown)
    except (*FAILURES, BusDown) as wrong:
        for each in (*said, wrong):
            if refused := refusal_text(each, config, url):
                return Unmeasured(refused, wanted=True)
        why = str(next(iter(said), wrong)) or "it did not answer in time"
        advice = "start NATS, or give its address: --nats, nats.url of every service"
        return Unmeasured(f"no NATS server answers at {shown}: {why}", wanted=True, advice=advice)
    finally:
        abort(client)
        with suppress(*FAILURES):
            async with asyncio.timeout(ANSWER_LIMIT_S):
                await client.close()


class _Probe:
    """The questions to one server. `said` gets the errors that it sends meanwhile."""

    def __init__(self, client: DirectClient, config: NatsConfig, namespace: str, said: list[Exception]) -> None:
        self._client, self._config, self._said = client, config, said
        token = secrets.token_hex(8)
        self._subject = f"{subjects.ROOT}.{namespace}.check.{token}"
        self._inbox = f"{config.inbox}.{token}"
        self._came: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    async def run(self, shown: str) -> BusMeasured:
        about = self._client._server_info
        for subject in (self._subject, self._inbox):
            await self._client.subscribe_direct(subject, self._take)
        await sync(self._client)
        trips, echoed, echo_s, samples = list[float](), 0, 0.0, list[ClockSample]()
        with suppress(TimeoutError):
            trips = [await self._trip(bytes(SMALL_BYTES), ANSWER_LIMIT_S) for _ in range(TRIPS)]
            size = max(0, min(self._config.payload_limit_bytes, self._client.max_payload - 2 * len(str(HEADERS))))
            echo_s = await self._trip(bytes(size), ECHO_LIMIT_S, HEADERS)
            echoed = size
        refused = next((str(each) for each in self._said if "permissions violation" in str(each).lower()), "")
        if not trips and not refused:
            raise TimeoutError(f"a message to itself did not come back within {ANSWER_LIMIT_S:g} s")
        with suppress(TimeoutError, ValueError, KeyError, TypeError):  # a server or user without it has no clock
            samples = [await self._time() for _ in range(CLOCK_ASKED)]
        return BusMeasured(
            address=shown,
            version=str(about.get("version", "")),
            round_trip_s=median(trips) if trips else 0.0,
            slow_trip_s=quantiles(trips, n=10)[-1] if trips else 0.0,
            max_payload_bytes=self._client.max_payload,
            payload_limit_bytes=self._config.payload_limit_bytes,
            echoed_bytes=echoed,
            echo_s=echo_s,
            jetstream=bool(about.get("jetstream")),
            refused=refused,
            clock=clock_bounds(samples),
        )

    def _take(self, message: Message) -> None:
        if not self._came.done():
            self._came.set_result(message)

    async def _trip(self, payload: bytes, limit_s: float, headers: dict[str, str] | None = None) -> float:
        """Return the seconds that a message to itself takes. Raise TimeoutError, also once the server has objected."""
        self._came = asyncio.get_running_loop().create_future()
        began = time.perf_counter()
        if headers is None:
            self._client.send(self._subject, payload, "")
        else:
            await self._client.publish(self._subject, payload, headers=headers)
        await self._answer(limit_s)
        return time.perf_counter() - began

    async def _answer(self, limit_s: float) -> Message:
        async with asyncio.timeout(limit_s):
            return await self._came

    async def _time(self) -> ClockSample:
        self._came = asyncio.get_running_loop().create_future()
        asked_s = time.time()
        self._client.send(TIME_SUBJECT, b"", self._inbox)
        answer = await self._answer(ANSWER_LIMIT_S)
        answered_s = time.time()
        theirs = datetime.fromisoformat(json.loads(answer.payload)["server"]["time"][:26].rstrip("Z") + "+00:00")
        return ClockSample(asked_s, answered_s, theirs.timestamp(), 1e-6)
