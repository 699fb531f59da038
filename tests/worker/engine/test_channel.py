from __future__ import annotations

import asyncio
import os
import socket
from contextlib import closing

import pytest

from services.worker.contracts.messages import (
    CancelAttempt,
    EngineCommand,
    Failed,
    Loading,
    Shutdown,
    TakeEngineSnapshot,
)
from services.worker.engine.channel import ChannelClosed, EngineEnd, ShellEnd


async def pair() -> tuple[ShellEnd, EngineEnd]:
    ours, theirs = socket.socketpair()
    return await ShellEnd.open(ours), EngineEnd(theirs)


async def test_commands_and_reports_cross_in_order() -> None:
    shell, engine = await pair()
    with closing(engine), closing(shell):
        commands: list[EngineCommand] = [CancelAttempt("r" * size, size) for size in (1, 70_000, 3)]
        for command in commands:
            shell.send(command)
        heard: list[EngineCommand] = []
        while len(heard) < len(commands):
            heard += await asyncio.to_thread(engine.receive, None)
        assert heard == commands
        for report in (Loading("weights", 0.5), Failed("x" * 100_000)):
            await asyncio.to_thread(engine.send, report)
            assert await shell.receive() == report


async def test_an_engine_that_does_not_wait_hears_nothing_when_nothing_came() -> None:
    shell, engine = await pair()
    with closing(engine), closing(shell):
        assert engine.receive(0.0) == []


async def test_an_engine_waits_no_longer_than_its_limit() -> None:
    shell, engine = await pair()
    with closing(engine), closing(shell):
        assert engine.receive(0.001) == []


async def test_an_engine_that_waits_is_woken_by_what_it_watches() -> None:
    shell, engine = await pair()
    with closing(engine), closing(shell):
        woken = os.eventfd(0)
        engine.watch(woken)
        waiting = asyncio.ensure_future(asyncio.to_thread(engine.receive, None))
        os.eventfd_write(woken, 1)
        assert await asyncio.wait_for(waiting, 30) == []
        os.close(woken)


async def test_each_end_sees_that_the_other_has_gone() -> None:
    shell, engine = await pair()
    shell.close()
    await asyncio.sleep(0)
    with pytest.raises(ChannelClosed):
        await asyncio.to_thread(engine.receive, None)
    engine.close()
    shell, engine = await pair()
    engine.close()
    with pytest.raises(ChannelClosed):
        await shell.receive()
    shell.send(Shutdown())
    shell.close()


async def test_a_shell_whose_engine_does_not_read_is_full() -> None:
    ours, theirs = socket.socketpair()
    shell = await ShellEnd.open(ours, unread_bytes=1 << 16)
    with closing(theirs), closing(shell):
        assert not shell.full
        for _ in range(200):
            shell.send(CancelAttempt("r" * 10_000, 1))
        assert shell.full


async def test_what_an_engine_said_last_is_heard_after_its_end() -> None:
    shell, engine = await pair()
    with closing(shell):
        for number in range(3):
            engine.send(Failed(str(number)))
        engine.close()
        assert [await shell.receive() for _ in range(3)] == [Failed(str(number)) for number in range(3)]
        with pytest.raises(ChannelClosed):
            await shell.receive()


async def test_an_engine_reports_no_faster_than_the_shell_reads() -> None:
    shell, engine = await pair()
    with closing(engine), closing(shell):
        reports = [Failed(str(number) + "x" * 50_000) for number in range(50)]

        def tell() -> None:
            for report in reports:
                engine.send(report)

        telling = asyncio.ensure_future(asyncio.to_thread(tell))
        assert [await shell.receive() for _ in reports] == reports
        await telling
        shell.send(TakeEngineSnapshot(1))
        assert await asyncio.to_thread(engine.receive, None) == [TakeEngineSnapshot(1)]
