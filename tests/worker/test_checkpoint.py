"""A worker that is put to sleep, frozen and restored: real processes, NATS and etcd. SIGSTOP and the files of the
protocol are the tool."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.worker.operations.checkpoint import CHECKPOINTED, READY, RESTORED
from shared import subjects
from shared.bus.nats_bus import NatsBus, connect
from shared.config import DiscoveryConfig, NatsConfig
from shared.discovery.etcd import EtcdDiscovery
from shared.messages.cards import INSTANCE, Instance
from shared.messages.codec import JSON_HEADER
from shared.messages.generate import Accepted
from shared.messages.people import OPERATE_WORKER, WORKER_OPERATED, OperateWorker
from tests.tiny_model import write_tiny_model
from tests.worker.shell import LIMIT_S, NAMESPACE, Peer, request

PROMPT = list(range(10, 50))


class Fleet:
    """A worker's process, and what it says to others."""

    def __init__(self, directory: Path, model: Path, nats: str, etcd: str) -> None:
        self.directory = directory
        self.flags = (
            *("--namespace", NAMESPACE, "--model", str(model), "--model-name", "model", "--threads", "1"),
            *("--cache", str(model.parent / "cache"), "--capacity-blocks", "64"),
            *("--nats-url", nats, "--discovery-endpoints", etcd, "--discovery-lease-ttl-s", "5"),
            *("--checkpoint-directory", str(directory)),
        )
        self._nats, self._etcd = nats, etcd
        self.bus: NatsBus
        self.discovery: EtcdDiscovery

    async def open(self) -> None:
        self.bus = await connect(NatsConfig(url=self._nats), "test")
        self.discovery = EtcdDiscovery(DiscoveryConfig(endpoints=(self._etcd,)))

    async def close(self) -> None:
        await self.discovery.close()
        await self.bus.drain()

    async def start(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(sys.executable, "-P", "-m", "services.worker", *self.flags)

    async def instances(self) -> dict[str, Instance]:
        keys = await self.discovery.list(subjects.namespace_prefix(NAMESPACE))
        found = [INSTANCE.decode(value, JSON_HEADER) for key, value in keys.items() if "/instances/" in key]
        served = {key.rsplit("/", 1)[1] for key in keys if "/models/" in key}
        return {each.instance: each for each in found if each.instance in served}

    async def serving(self, *, but: str = "") -> str:
        """Return the id of the one worker that serves, when it is another one than `but`."""
        while not (ids := [each for each in await self.instances() if each != but]):  # noqa: ASYNC110 - etcd is polled
            await asyncio.sleep(0.05)
        [found] = ids
        return found

    async def answer(self, worker: str) -> list[int]:
        peer = Peer(self.bus, worker=worker)
        await peer.open()
        assert await peer.generate(request(f"r-{worker}", PROMPT, max_tokens=12)) == Accepted(f"r-{worker}", 1)
        assert await peer.ended(f"r-{worker}") == "length"
        return peer.tokens(f"r-{worker}")

    async def sleep(self, worker: str) -> Path:
        """Put it to sleep; return the directory of this sleep when it says that it may be frozen."""
        subject = subjects.worker(NAMESPACE, worker, "operate")
        reply = await self.bus.request(subject, OPERATE_WORKER.encode(OperateWorker("sleep")), timeout_s=LIMIT_S)
        operated = WORKER_OPERATED.decode(reply.payload, reply.headers)
        assert (operated.failed, operated.state) == ("", "asleep")
        await until((self.directory / worker / READY).exists)
        return self.directory / worker


async def until(met: Callable[[], object]) -> None:
    while not met():  # noqa: ASYNC110 - other processes are looked at
        await asyncio.sleep(0.02)


@pytest.fixture
async def fleet(tmp_path: Path, nats_url: str, etcd_endpoint: str) -> AsyncIterator[Fleet]:
    opened = Fleet(tmp_path / "checkpoints", write_tiny_model(tmp_path / "model"), nats_url, etcd_endpoint)
    await opened.open()
    try:
        async with asyncio.timeout(LIMIT_S):
            yield opened
    finally:
        await opened.close()


@asynccontextmanager
async def running(fleet: Fleet) -> AsyncIterator[asyncio.subprocess.Process]:
    """A worker, which drains at the end, so that no key is left for the next test."""
    process = await fleet.start()
    try:
        yield process
        if process.returncode is None:
            process.terminate()
            await process.wait()
    finally:
        if process.returncode is None:
            for pid in tree(process.pid):
                os.kill(pid, signal.SIGKILL)
            await process.wait()


def tree(pid: int) -> list[int]:
    """The process and those below it."""
    children = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [pid, *(below for child in children for below in tree(child))]


def connections(pid: int) -> list[str]:
    """The TCP and UDP sockets of a process, and its named Unix ones, or those that have a peer with a name."""
    links = [str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir() if each.exists()]
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    found = []
    for table, column in (("tcp", 9), ("tcp6", 9), ("udp", 9), ("udp6", 9), ("unix", 6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[column] in inodes and (table != "unix" or len(words) > 7):
                found.append(line)
    return found


async def test_a_sleeping_worker_has_no_connection_is_frozen_and_goes_on_as_another_instance(fleet: Fleet) -> None:
    async with running(fleet) as process:
        first = await fleet.serving()
        before = await fleet.answer(first)
        assert connections(process.pid)
        directory = await fleet.sleep(first)
        assert first not in await fleet.instances()
        shell, engine = tree(process.pid)
        assert connections(shell) + connections(engine) == []
        for pid in (shell, engine):
            os.kill(pid, signal.SIGSTOP)
        (directory / RESTORED).touch()
        await asyncio.sleep(0.5)
        assert await fleet.instances() == {}
        for pid in (shell, engine):
            os.kill(pid, signal.SIGCONT)
        second = await fleet.serving()
        assert second != first
        assert tree(process.pid) == [shell, engine]  # the engine that stood by serves
        assert await fleet.answer(second) == before
        assert not (directory / READY).exists()

        again = await fleet.sleep(second)  # what the first sleep has left is not an answer to this one
        await asyncio.sleep(0.5)
        assert await fleet.instances() == {}
        assert (again / READY).exists()
        process.terminate()
        assert await process.wait() == 0
        assert not (again / READY).exists()


async def test_a_worker_of_which_an_image_was_made_ends_and_a_new_start_serves(fleet: Fleet) -> None:
    async with running(fleet) as process:
        first = await fleet.serving()
        before = await fleet.answer(first)
        directory = await fleet.sleep(first)
        pids = tree(process.pid)
        (directory / CHECKPOINTED).touch()
        assert await process.wait() == 0
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    (directory / RESTORED).touch()
    async with running(fleet):
        second = await fleet.serving(but=first)
        assert await fleet.answer(second) == before


async def test_an_engine_that_ends_while_the_worker_sleeps_is_started_again_and_none_is_missed(fleet: Fleet) -> None:
    async with running(fleet) as process:
        first = await fleet.serving()
        directory = await fleet.sleep(first)
        _, engine = tree(process.pid)
        os.kill(engine, signal.SIGKILL)
        (directory / RESTORED).touch()
        (directory / CHECKPOINTED).touch()  # `restored` counts more
        second = await fleet.serving(but=first)
        await fleet.answer(second)
