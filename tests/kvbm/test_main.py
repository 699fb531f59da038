"""kvbm as a process, over a real NATS: killed, started again, ended; an engine process that is stopped and killed."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from shared import subjects
from shared.bus.nats_bus import NatsBus, connect
from shared.config import NatsConfig, environment
from shared.discovery.file import FileDiscovery
from shared.errors import Unavailable
from shared.messages import kvbm as wire
from shared.messages.cards import INSTANCE, Instance
from shared.messages.codec import JSON_HEADER
from tests.kvbm.chains import chain
from tests.kvbm.processes import OWNER, ended, running
from tests.kvbm.store_rig import LAYOUT, LIMIT_S, NAMESPACE, Engine, kvbm_of

WORKER = "w1"


@asynccontextmanager
async def kvbm_process(
    nats_url: str, folder: Path, *more: str, discovery: Path | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a kvbm when entered; end it when left, if the test did not. Its pool and disk outlive it."""
    flags = [
        *("--namespace", NAMESPACE),
        *("--nats-url", nats_url),
        *("--discovery-backend", "file"),
        *("--discovery-path", str(discovery or folder / "discovery")),
        *("--discovery-lease-ttl-s", "2"),
        *("--pool-directory", str(folder / "pool"), "--pool-size-bytes", str(4 << 20)),
        *("--disk-directory", str(folder / "disk"), "--disk-limit-bytes", str(8 << 20)),
        *("--disk-min-free-bytes", "0", "--tiers-disk-sightings", "1"),
        *more,
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.kvbm", *flags, env=environment(), stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def there(folder: Path, other_than: str = "") -> Instance:
    """Wait for the address book of a kvbm, and return it."""
    discovery = FileDiscovery(folder / "discovery")
    try:
        async with asyncio.timeout(LIMIT_S):
            while True:
                entries = await discovery.list(subjects.instances_prefix(NAMESPACE))
                for value in entries.values():
                    instance = INSTANCE.decode(value, JSON_HEADER)
                    if instance.service == "kvbm" and instance.instance != other_than:
                        return instance
                await asyncio.sleep(0.02)
    finally:
        await discovery.close()


async def state_once(bus: NatsBus, kvbm: Instance, met: Callable[[wire.LayoutState], bool]) -> wire.LayoutState:
    """Wait until the one layout meets the condition, and return its state."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            answer = await bus.request(kvbm.subjects["stat"], b"", timeout_s=LIMIT_S)
            (layout,) = wire.KVBM_STATE.decode(answer.payload, answer.headers).layouts
            if met(layout):
                return layout
            await asyncio.sleep(0.02)


def all_on_disk(layout: wire.LayoutState) -> bool:
    return layout.disk is not None and layout.disk.blocks == 3


async def test_a_killed_kvbms_blocks_come_back_from_disk_and_its_slots_wait_for_a_stopped_engine(
    nats_url: str, tmp_path: Path
) -> None:
    bus = await connect(NatsConfig(url=nats_url), "test")
    contents = chain(1, 2, 3)
    engine = Engine(bus, tmp_path / "pool", "mine", WORKER, LAYOUT)
    async with kvbm_process(nats_url, tmp_path) as first:
        kvbm = await there(tmp_path)
        await engine.attach()
        with running(OWNER, tmp_path / "pool", "frozen") as (process, _):
            frozen = Engine(bus, tmp_path / "pool", "frozen", WORKER, LAYOUT)
            assert isinstance(await frozen.try_attach(), wire.Attached)
            await frozen.grant(chain(7))
            process.send_signal(signal.SIGSTOP)
            assert await engine.store(contents) == 3
            await state_once(bus, kvbm, all_on_disk)
            first.kill()
            await first.wait()
            async with kvbm_process(nats_url, tmp_path) as second:
                kvbm = await there(tmp_path, kvbm.instance)
                await engine.attach()
                assert await engine.store(chain(9)) == 0, "a stopped engine may still write anywhere"
                await state_once(bus, kvbm, lambda layout: layout.host.state == "quarantined")
                ended(process)
                await state_once(bus, kvbm, lambda layout: layout.host.state == "on" and all_on_disk(layout))
                assert await engine.load(contents) == (3, 3)
                assert await engine.load(contents) == (3, 0)
                second.send_signal(signal.SIGTERM)
                _, said = await second.communicate()
                assert second.returncode == 0, said.decode()
                assert (tmp_path / "pool" / "pool").exists()
    engine.die()
    await bus.drain()


async def test_a_pool_that_another_kvbm_has_ends_the_second_one_with_its_name(nats_url: str, tmp_path: Path) -> None:
    async with kvbm_process(nats_url, tmp_path) as first:
        await there(tmp_path)
        async with kvbm_process(nats_url, tmp_path) as second:
            _, said = await second.communicate()
        assert second.returncode == 2
        assert f"another kvbm runs here, process {first.pid}" in said.decode()


async def test_two_kvbms_find_each_other_and_one_serves_what_the_other_has(nats_url: str, tmp_path: Path) -> None:
    bus = await connect(NatsConfig(url=nats_url), "test")
    contents = chain(*range(1, 41))
    listen = ("--peers-listen", "127.0.0.1:0", "--peers-wait-s", "0.4")
    one, two = tmp_path / "one", tmp_path / "two"
    async with (
        kvbm_process(nats_url, one, *listen, discovery=tmp_path / "discovery"),
        kvbm_process(nats_url, two, *listen, discovery=tmp_path / "discovery") as reader,
    ):
        engines = [Engine(bus, folder / "pool", "mine", WORKER, LAYOUT) for folder in (one, two)]
        for engine, folder in zip(engines, (one, two), strict=True):
            async with asyncio.timeout(LIMIT_S):
                while not (folder / "pool" / "owners").exists() or not kvbm_of(folder / "pool"):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            await attached(engine)
        assert await engines[0].store(contents) == 40
        async with asyncio.timeout(LIMIT_S):
            while await engines[1].load(contents) != (40, 0):  # noqa: ASYNC110 - the address book takes a moment
                await asyncio.sleep(0.02)
        reader.send_signal(signal.SIGTERM)
        _, said = await reader.communicate()
        assert reader.returncode == 0, said.decode()
    for engine in engines:
        engine.die()
    await bus.drain()


async def attached(engine: Engine) -> None:
    """Attach, as soon as the kvbm subscribes."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                await engine.attach()
            except Unavailable:
                await asyncio.sleep(0.02)
            else:
                return
