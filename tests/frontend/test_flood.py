"""A frontend process at ten times the load that can be served: what it cannot take it refuses early, and it lives."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import aiohttp

from shared.bus.nats_bus import connect
from shared.config import NatsConfig
from shared.discovery.file import FileDiscovery
from shared.messages.cards import INSTANCE
from shared.messages.generate import Generate
from tests.frontend.peers import DEADLINE_S, MODEL, ScriptedRouter, ScriptedWorker, card_entry, instance_entry
from tests.frontend.test_main import healthy, process

PLACES = 4
PATIENT = "select_timeout_s = 60\noffer_timeout_s = 60\n"
"""A flooded event loop may hear late of a router or a worker."""
SERVED_IN_S = 0.5
FLOOD_S = 4.0
TIMES = 10


async def test_live_and_health_answer_while_ten_times_the_load_is_refused(
    directory: Path, tmp_path: Path, nats_url: str
) -> None:
    bus = await connect(NatsConfig(url=nats_url), "peers")
    router, worker = ScriptedRouter(bus, "r1", ["w1"]), ScriptedWorker(bus, "w1")
    worker.output = None
    await router.start()
    await worker.start()
    discovery = FileDiscovery(tmp_path / "discovery")
    entries = instance_entry("router", "r1") | instance_entry("worker", "w1") | card_entry("w1", directory)
    registration = await discovery.register(lambda _epoch: entries)
    timeout = aiohttp.ClientTimeout(6 * DEADLINE_S)
    async with (
        asyncio.timeout(6 * DEADLINE_S),
        process(tmp_path, nats_url, f"[limits]\nrequests = {PLACES}\n{PATIENT}") as (_, url),
        aiohttp.ClientSession(url, timeout=timeout) as http,
    ):
        await healthy(http)
        listed: Mapping[str, bytes] = {}
        while not (frontends := [key for key in listed if "/frontend/" in key]):
            listed = await discovery.list("/headrace/test/")
            await asyncio.sleep(0.05)  # a frontend listens before it is registered
        book = INSTANCE.decode(listed[frontends[0]], {"Content-Type": "application/json"})
        assert book.api == url
        assert book.http not in ("", url)
        ended = asyncio.Event()
        statuses: Counter[int] = Counter()
        checked: Counter[tuple[str, int]] = Counter()

        async def serve() -> None:
            for number in range(10_000):
                await worker.generates.at_least(number + 1)
                serving.create_task(_answer_in_time(worker, worker.generates.all[number]))

        async def check(address: str) -> None:
            limit = aiohttp.ClientTimeout(DEADLINE_S)
            while not ended.is_set():
                async with http.get(address, timeout=limit) as response:
                    checked[address, response.status] += 1
                await asyncio.sleep(0.05)  # a balancer's checks are at intervals too

        async def ask() -> None:
            async with http.post("/v1/completions", json={"model": MODEL, "prompt": "x"}) as response:
                statuses[response.status] += 1
                if response.status != 200:
                    assert int(response.headers["Retry-After"]) >= 1
                    assert json.loads(await response.read())["error"]["code"] == "overloaded"

        async with asyncio.TaskGroup() as serving:
            server = serving.create_task(serve())
            async with asyncio.TaskGroup() as checking:
                for address in (f"{url}/live", f"{book.http}/live", f"{url}/health", f"{book.http}/health"):
                    checking.create_task(check(address))
                async with asyncio.TaskGroup() as flood:
                    rate = TIMES * PLACES / SERVED_IN_S
                    for _ in range(int(FLOOD_S * rate)):  # open-loop: they come whether or not others are answered
                        flood.create_task(ask())
                        await asyncio.sleep(1 / rate)
                ended.set()
            server.cancel()
        assert set(statuses) == {200, 429}
        assert statuses[429] > statuses[200] >= PLACES
        assert {status for _, status in checked} == {200}
        assert len(checked) == 4
    await registration.close()
    await discovery.close()
    await bus.drain()


async def _answer_in_time(worker: ScriptedWorker, generate: Generate) -> None:
    await asyncio.sleep(SERVED_IN_S)  # the service time that makes the load too much
    await worker.send(generate, 0, [5, 2], "stop")
