"""The router as a process, over the real NATS and ZMQ."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from shared import subjects
from shared.config import NatsConfig, environment
from shared.errors import Unavailable
from shared.file_discovery import FileDiscovery
from shared.messages import SELECT, SELECT_REPLY, Selected
from shared.nats_bus import NatsBus, connect
from shared.zmq_events import ZmqEvents
from tests.router.fleet import LIMIT_S, MODEL, NAMESPACE, ScriptedWorker, select, tokens_of


@asynccontextmanager
async def router_process(nats_url: str, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Started when entered; ended, if the test did not, when left."""
    flags = [
        *("--namespace", NAMESPACE),
        *("--nats-url", nats_url),
        *("--discovery-backend", "file"),
        *("--discovery-path", str(folder)),
        *("--index-speculation-s", "0"),
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.router", *flags, env=environment(), stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def overlap_once_it_is(bus: NatsBus, prompt: list[int], blocks: int) -> Selected:
    """Asks until the router knows so many leading blocks of the prompt."""
    async with asyncio.timeout(LIMIT_S):
        for number in range(10_000):
            try:
                question = SELECT.encode(select([*prompt, 1], f"r{number}"))
                answer = await bus.request(subjects.select(NAMESPACE, MODEL), question, timeout_s=1.0)
                reply = SELECT_REPLY.decode(answer.payload)
                if isinstance(reply, Selected) and reply.overlap.device == blocks:
                    return reply
            except Unavailable:
                pass
            await asyncio.sleep(0.02)
    raise AssertionError("the router does not answer")


async def test_a_router_started_late_and_started_again_knows_what_is_cached(nats_url: str, tmp_path: Path) -> None:
    bus = await connect(NatsConfig(url=nats_url), "test")
    discovery = FileDiscovery(tmp_path)
    with ZmqEvents("127.0.0.1") as events:
        worker = ScriptedWorker("a1", bus, events, discovery)
        await worker.start()
        prompt = tokens_of("x", 30)
        await worker.stores(prompt[: 4 * 20])
        async with router_process(nats_url, tmp_path) as first:
            await overlap_once_it_is(bus, prompt, 20)  # by snapshot
            await worker.stores(prompt)
            await worker.reports()
            await overlap_once_it_is(bus, prompt, 30)  # by events
            first.send_signal(signal.SIGTERM)
            _, said = await first.communicate()
            assert first.returncode == 0, said.decode()
        async with router_process(nats_url, tmp_path):
            assert (await overlap_once_it_is(bus, prompt, 30)).instance == "a1"
        await worker.stop()
    await discovery.close()
    await bus.drain()


async def test_a_policy_that_is_none_ends_the_process_with_the_reason(nats_url: str, tmp_path: Path) -> None:
    flags = ["--nats-url", nats_url, "--discovery-backend", "file", "--discovery-path", str(tmp_path)]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.router", *flags, "--policy", "best"), stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    assert process.returncode == 2
    assert b"policy best" in said
