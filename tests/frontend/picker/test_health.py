"""gRPC's health protocol at the picker's port, with a gateway of the tests' own."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest

from services.frontend.config import FrontendConfig, LimitsConfig, PickerConfig
from services.frontend.picker import health
from services.frontend.picker.health import NAME_CHARACTERS, NOT_SERVING, SERVICE_UNKNOWN, SERVING
from tests.frontend.peers import DEADLINE_S, World, card_entry, instance_entry, world
from tests.frontend.picker.test_server import ONE, frontend, picking
from tests.picker.gateway import Gateway, connected
from tests.servers import free_port

NAMES = ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")


async def announce_server(w: World, directory: Path) -> None:
    """A router, and a worker that stands for a server."""
    await w.announce_router()
    await w.announce("w1", instance_entry("worker", "w1") | card_entry("w1", directory, address=ONE))


async def test_the_names_of_the_health_protocol_are_known_and_no_others(directory: Path) -> None:
    async with picking(directory) as (_, gateway):
        assert [await gateway.health(name) for name in NAMES] == [SERVING] * 4
        with pytest.raises(grpc.RpcError) as unknown:
            await gateway.health("other")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_watch_says_the_status_at_once_and_each_change(directory: Path) -> None:
    config = FrontendConfig(picker=PickerConfig(port=free_port()))
    address = f"127.0.0.1:{config.picker.port}"
    serving = world(directory, settings=config, announced=False)
    async with asyncio.timeout(DEADLINE_S), serving as w, connected(address) as gateway:
        watches = [gateway.watch(name) for name in NAMES]
        assert [await watch.read() for watch in watches] == [NOT_SERVING, SERVING, NOT_SERVING, NOT_SERVING]
        await announce_server(w, directory)
        assert [await watch.read() for watch in (watches[0], *watches[2:])] == [SERVING] * 3
        await w.leave("w1")
        assert await watches[0].read() == NOT_SERVING


async def test_a_watch_of_an_unknown_name_stays_and_says_so_and_a_long_one_is_refused(directory: Path) -> None:
    async with picking(directory) as (_, gateway):
        assert await gateway.watch("other").read() == SERVICE_UNKNOWN
        refused = gateway.watch("x" * (NAME_CHARACTERS + 1))
        assert await refused.read() == 0
        assert await refused.call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_beyond_the_most_watches_one_more_is_refused_until_one_ends(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "WATCHES", 2)
    async with picking(directory) as (_, gateway):
        first, second = gateway.watch(""), gateway.watch("")
        assert [await watch.read() for watch in (first, second)] == [SERVING, SERVING]
        third = gateway.watch("")
        assert await third.read() == 0
        assert await third.call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        first.call.cancel()
        assert await _again(gateway) == SERVING


async def _again(gateway: Gateway) -> int:
    """Watch until there is room, and return the status."""
    while not (status := await gateway.watch("").read()):
        pass
    return status


async def test_a_frontend_that_drains_ends_watches_with_not_serving(directory: Path) -> None:
    async with AsyncExitStack() as serving:
        w = await serving.enter_async_context(frontend(directory, LimitsConfig(drain_s=DEADLINE_S)))
        async with connected(w.picker) as gateway:
            watches = [gateway.watch(name) for name in ("liveness", "readiness")]
            assert [await watch.read() for watch in watches] == [SERVING, SERVING]
            drained = asyncio.create_task(serving.aclose())
            for watch in watches:
                assert [await watch.read(), await watch.read()] == [NOT_SERVING, 0]
                assert await watch.call.code() is grpc.StatusCode.OK
            await drained
