"""services/worker/attached/local_engine.py: an engine in the worker's own process starts, is lost, leaves nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeVar

import pytest
from aiohttp import web

from services.worker.attached.local_engine import MOST_COMMANDS, MOST_REPORTS, LocalChannel, LocalEngine
from services.worker.config import AttachedConfig, EngineConfig, WorkerConfig
from services.worker.contracts.messages import CancelAttempt, Failed, Loading, Ready, Stepped, Submit
from services.worker.engine.channel import ChannelClosed
from services.worker.engine.supervisor import EngineSupervisor
from shared.hashing import pack_tokens, unpack_tokens
from shared.messages.generate import Accepted, Sampling
from tests.tiny_model import write_tiny_model
from tests.worker.attached.peer import Peer, answering
from tests.worker.shell import LIMIT_S, request, running_worker

T = TypeVar("T")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
async def peer(model: Path) -> AsyncIterator[Peer]:
    async with answering(Peer(model)) as one:
        yield one


def config(peer: Peer, model: Path, **more: object) -> WorkerConfig:
    attached = AttachedConfig(url=peer.url, look_s=0.1)
    return WorkerConfig(model=str(model), model_name="model", engine="attached", attached=attached, **more)  # type: ignore[arg-type]


async def until(engine: LocalEngine, kind: type[T]) -> T:
    """Return the next report of a kind."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            report = await engine.receive()
            if isinstance(report, kind):
                return report


async def never(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


def held() -> tuple[int, int]:
    """Return the number of tasks and of descriptors."""
    return len(asyncio.all_tasks()), len(list(Path("/proc/self/fd").iterdir()))


async def test_it_serves_until_its_end_and_leaves_no_task_and_no_descriptor(peer: Peer, model: Path) -> None:
    before = held()
    for number in range(5):
        engine = await LocalEngine.start(config(peer, model), "tiny", "w1")
        await until(engine, Ready)
        engine.submit(Submit("r", 1, "f", pack_tokens([1, 2, 3]), 3, Sampling(max_tokens=2), 9.0, number=number + 1))
        tokens: list[int] = []
        while not tokens:
            parts = (await until(engine, Stepped)).parts.get("f", [])
            tokens = [token for part in parts for token in unpack_tokens(part.tokens)]
        assert tokens == [5, 6]
        assert await engine.end(LIMIT_S, lambda _: None) == 0
        with pytest.raises(ChannelClosed, match="the engine has ended"):
            await engine.receive()
        engine.send(CancelAttempt("r", 1))  # nothing is left that could read it
    async with asyncio.timeout(LIMIT_S):
        while held() != before:  # noqa: ASYNC110 - the server closes its ends a moment later
            await asyncio.sleep(0.01)


async def test_a_killed_engine_is_gone_and_one_that_is_not_ready_can_be_ended(peer: Peer, model: Path) -> None:
    engine = await LocalEngine.start(config(peer, model), "tiny", "w1")
    await until(engine, Ready)
    engine.kill()
    with pytest.raises(ChannelClosed, match="the engine has ended"):
        await until(engine, Failed)
    peer.said["/v1/models"] = never
    for _ in range(2):
        starting = await LocalEngine.start(config(peer, model), "tiny", "w1")
        await asyncio.sleep(0)
        assert await starting.end(0.0, lambda _: None) == 1
        with pytest.raises(ChannelClosed):
            await starting.receive()


async def test_why_it_cannot_serve_is_reported_and_what_is_not_foreseen_is_named(peer: Peer, model: Path) -> None:
    engine = await LocalEngine.start(config(peer, model.with_name("none")), "tiny", "w1")
    assert (await until(engine, Failed)).model
    broken = EngineConfig(instance="w1", model_name="tiny", worker=None, parent_pid=1)  # type: ignore[arg-type]
    engine = LocalEngine(broken)
    with pytest.raises(ChannelClosed, match=r"^the engine failed: AttributeError: 'NoneType' object has no attribute"):
        await until(engine, Failed)
    assert await engine.end(LIMIT_S, lambda _: None) == 1


async def test_commands_and_reports_that_nothing_reads_are_bounded() -> None:
    channel = LocalChannel()
    for number in range(MOST_COMMANDS):
        assert not channel.full
        channel.order(CancelAttempt("r", number))
    assert channel.full
    assert len(channel.receive()) == MOST_COMMANDS
    assert channel.receive() == []
    for _ in range(MOST_REPORTS):
        channel.send(Loading("x", 0.0))
    with pytest.raises(ChannelClosed, match=f"the shell has {MOST_REPORTS} reports unread"):
        channel.send(Loading("x", 0.0))
    channel.close("over")
    channel.close("again")
    for _ in range(MOST_REPORTS):
        assert await channel.report() == Loading("x", 0.0)
    with pytest.raises(ChannelClosed, match=r"^over$"):
        await channel.report()


async def test_a_worker_outlives_a_server_that_goes_and_an_engine_that_is_stuck(model: Path) -> None:
    peer = Peer(model)
    async with running_worker(config(peer, model, stall_s=2.0)) as shell:
        engine: EngineSupervisor = shell.worker.engine
        async with answering(peer):
            await shell.peer.until(lambda: bool(shell.directory.cards))
            assert engine.pid == os.getpid()
            peer.said["/v1/completions"] = never
            assert isinstance(await shell.peer.generate(request("stuck", [5, 6])), Accepted)
            assert await shell.peer.ended("stuck") == "error"
            assert "reported nothing for 1 s" in shell.peer.parts("stuck")[-1].error
            del peer.said["/v1/completions"]
            await shell.peer.until(lambda: engine.facts is not None and bool(shell.directory.cards))
            epoch = engine.epoch
        await shell.peer.until(lambda: not shell.directory.cards)
        async with answering(peer):
            await shell.peer.until(lambda: bool(shell.directory.cards))
            assert engine.epoch > epoch
            assert isinstance(await shell.peer.generate(request("after", [5, 6], max_tokens=2)), Accepted)
            assert await shell.peer.ended("after") == "length"
            assert shell.peer.tokens("after") == [5, 6]
