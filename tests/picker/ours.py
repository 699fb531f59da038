"""Our own picker, as `headrace picker` starts it in front of simulated servers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio

from tests.integration.stack import START_LIMIT_S, Up, started
from tests.picker import envoy
from tests.picker.cases import PickerControl, Rig
from tests.picker.environment import envoy as envoy_program
from tests.picker.gateway import connected
from tests.picker.servers import SimulatedServer, serving
from tests.servers import free_port
from tests.tiny_model import write_tiny_model

SERVERS = 3


@asynccontextmanager
async def fleet(directory: Path) -> AsyncIterator[tuple[str, list[SimulatedServer], Up]]:
    """Yield the picker's HOST:PORT, its servers and its stack, all running."""
    model = write_tiny_model(directory / "tiny", context_length=512)
    picker = f"127.0.0.1:{free_port()}"
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(SERVERS)]
    flags = ["--picker", picker.rpartition(":")[2], "--set", f"frontend.picker.endpoints={SERVERS}"]
    async with serving(addresses, model) as servers:
        urls = [f"http://{address}" for address in addresses]
        with started(directory / "state", "picker", *flags, *urls) as up:
            assert await asyncio.to_thread(up.ready.wait, START_LIMIT_S), "".join(up.output)
            assert up.process.poll() is None, "".join(up.output) + up.logs()
            await _serving(picker, len(servers), up)
            yield picker, servers, up


@asynccontextmanager
async def rig(directory: Path) -> AsyncIterator[tuple[Rig, Up]]:
    """Yield what the cases need, with servers, stack and Envoy running."""
    async with AsyncExitStack() as stack:
        picker, servers, up = await stack.enter_async_context(fleet(directory))
        addresses = [server.address for server in servers]
        ports = await stack.enter_async_context(envoy.running(envoy_program(), picker, addresses, directory))
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        yield Rig(picker, servers, ports, http, "tiny", _control(up, picker)), up


async def _serving(picker: str, endpoints: int, up: Up) -> None:
    """Wait until the picker is ready, and until all servers are its endpoints."""
    async with asyncio.timeout(START_LIMIT_S):
        while not await _is_ready(picker) or sum(": serves\n" in line for line in up.output) < endpoints:
            assert up.process.poll() is None, "".join(up.output) + up.logs()
            await asyncio.sleep(0.1)


async def _is_ready(picker: str) -> bool:
    async with connected(picker) as gateway:
        try:
            return await gateway.health("readiness") == 1
        except grpc.aio.AioRpcError:
            return False


def _control(up: Up, picker: str) -> PickerControl:
    """Return how the frontend is ended; `headrace route` starts it again by itself."""
    [frontend] = [name for name in up.record["programs"] if name.startswith("frontend")]

    async def end(number: signal.Signals) -> None:
        former = up.pid(frontend)
        os.kill(former, number)
        async with asyncio.timeout(START_LIMIT_S):
            while _lives(former):  # noqa: ASYNC110 - it is no child of this process
                await asyncio.sleep(0.02)

    async def start() -> None:
        async with asyncio.timeout(START_LIMIT_S):
            while not await _is_ready(picker):  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.1)

    async def restart() -> None:
        await end(signal.SIGTERM)
        await start()

    return PickerControl(kill=lambda: end(signal.SIGKILL), start=start, restart=restart)


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def explained(up: Up, model: str, request: str) -> dict[str, Any]:
    """Return what routers say of a request."""
    return await asyncio.to_thread(up.explained, model, request)
