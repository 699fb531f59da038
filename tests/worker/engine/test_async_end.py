"""services/worker/engine/async_end.py: commands, reports and ends over a real channel."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing

import pytest
import uvloop

from services.worker.contracts.messages import CancelAttempt, EngineOrder, Failed, Loading, Shutdown
from services.worker.engine.async_end import AsyncEnd
from services.worker.engine.channel import ChannelClosed, EngineEnd, ShellEnd
from tests.worker.shell import LIMIT_S


class Served:
    """An engine that keeps its orders, and reports that it is loading."""

    def __init__(self, engine: EngineEnd, connection: socket.socket) -> None:
        self.orders: list[EngineOrder] = []
        self.reports = 0
        self.engine = engine
        self.end = AsyncEnd(engine, connection, handle=self.orders.append, report=self.report)

    def report(self) -> None:
        self.reports += 1
        self.engine.send(Loading(f"report {self.reports}", 0.0))


async def channel() -> tuple[ShellEnd, EngineEnd, socket.socket]:
    ours, theirs = socket.socketpair()
    return await ShellEnd.open(ours), EngineEnd(theirs), theirs


async def test_it_reports_once_at_the_start_and_once_a_turn_and_ends_at_shutdown() -> None:
    shell, engine, connection = await channel()
    with closing(engine), closing(shell):
        served = Served(engine, connection)
        with served.end.receiving():
            assert await shell.receive() == Loading("report 1", 0.0)
            served.end.flush_soon()
            served.end.flush_soon()
            assert await shell.receive() == Loading("report 2", 0.0)
            shell.send(CancelAttempt("r", 1))
            shell.send(Shutdown())
            assert await asyncio.wait_for(served.end.ended, LIMIT_S) is None
        assert served.orders == [CancelAttempt("r", 1)]
        served.end.flush_soon()
        await asyncio.sleep(0)
        assert served.reports == 2, "nothing is reported after the end"


async def test_an_engine_on_uvloop_waits_for_a_shell_that_does_not_read() -> None:
    shell, engine, connection = await channel()
    reports = [Failed(str(number) + "x" * 50_000) for number in range(50)]

    async def report_all() -> None:
        with closing(engine), Served(engine, connection).end.receiving():
            for report in reports:
                engine.send(report)

    def serve() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(report_all())

    with closing(shell):
        serving = asyncio.ensure_future(asyncio.to_thread(serve))
        assert await shell.receive() == Loading("report 1", 0.0)
        assert [await shell.receive() for _ in reports] == reports
        await serving


async def test_a_shell_that_has_gone_ends_it() -> None:
    shell, engine, connection = await channel()
    with closing(engine):
        served = Served(engine, connection)
        with served.end.receiving():
            shell.close()
            with pytest.raises(ChannelClosed):
                await asyncio.wait_for(served.end.ended, LIMIT_S)


async def test_the_first_end_counts() -> None:
    shell, engine, connection = await channel()
    with closing(engine), closing(shell):
        served = Served(engine, connection)
        served.end.end(Failed("the core is dead"))
        served.end.break_off(ValueError("later"))
        served.end.end(None)
        assert await served.end.ended == Failed("the core is dead")
