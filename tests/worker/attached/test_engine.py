"""services/worker/attached/engine.py: a worker of a server that answers as a test wants."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from aiohttp import web

from services.worker.config import AttachedConfig, WorkerConfig
from shared.messages.generate import Accepted
from shared.messages.kv_events import BlockStored, EventBatch
from tests.tiny_model import write_tiny_model
from tests.worker.attached.peer import Peer, answering
from tests.worker.shell import LIMIT_S, WORKER, request, running_worker


@pytest.mark.parametrize("events", ["", "tcp://127.0.0.1:9"])
async def test_routers_hear_of_a_source_of_events_only_if_the_server_has_one(tmp_path: Path, events: str) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    async with answering(Peer(model)) as peer:
        attached = AttachedConfig(url=peer.url, events=events)
        async with running_worker(WorkerConfig(model=str(model), engine="attached", attached=attached)) as shell:
            await shell.peer.until(lambda: bool(shell.directory.cards) and WORKER in shell.directory.instances)
            assert (shell.directory.instances[WORKER].events is not None) == bool(events)


async def test_an_answer_that_has_ended_frees_its_connection_even_if_the_server_keeps_it_open(tmp_path: Path) -> None:
    model, closed = write_tiny_model(tmp_path / "tiny"), asyncio.Event()
    peer = Peer(model)

    async def stays_open(asked: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(asked)
        await answer.write(f"data: {peer.lines[0]}\n\n".encode())
        try:
            while True:
                await answer.write(b": still here\n\n")
                await asyncio.sleep(0)
        finally:
            closed.set()

    attached = AttachedConfig(url=peer.url, limit_s=2.0)
    async with (
        answering(peer),
        running_worker(
            WorkerConfig(model=str(model), model_name="model", engine="attached", attached=attached)
        ) as shell,
    ):
        await shell.peer.until(lambda: bool(shell.directory.cards))
        peer.said["/v1/completions"] = stays_open
        assert isinstance(await shell.peer.generate(request("r", [5, 6], max_tokens=2)), Accepted)
        assert await shell.peer.ended("r") == "length"
        assert shell.peer.tokens("r") == [5, 6]
        await asyncio.wait_for(closed.wait(), LIMIT_S)


async def test_events_of_blocks_of_another_size_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, context = write_tiny_model(tmp_path / "tiny"), zmq.asyncio.Context()
    publisher = context.socket(zmq.XPUB)
    publisher.bind(f"ipc://{tmp_path}/e")
    of_16, of_32 = (BlockStored([size], None, [3] * size, size, medium="GPU") for size in (16, 32))
    try:
        async with answering(Peer(model)) as peer:
            attached = AttachedConfig(url=peer.url, events=f"ipc://{tmp_path}/e")
            async with running_worker(WorkerConfig(model=str(model), engine="attached", attached=attached)) as shell:
                assert await asyncio.wait_for(publisher.recv(), LIMIT_S) == b"\x01"
                for number, event in enumerate((of_16, of_16, of_32)):
                    payload = msgspec.msgpack.encode(EventBatch(0.0, [event]))
                    await publisher.send_multipart([b"", number.to_bytes(8, "big"), payload])
                await shell.peer.until(lambda: shell.peer.stored == 1)
    finally:
        context.destroy(linger=0)
    assert caplog.text.count("blocks of 16 tokens, and the server has 32: they are left out") == 1
