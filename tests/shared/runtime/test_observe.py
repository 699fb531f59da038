"""The health of a process. test_lifecycle.py tests its paths with the whole process."""

from __future__ import annotations

import asyncio
import socket
from urllib.parse import urlsplit

from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from prometheus_client import CollectorRegistry, Gauge

from shared.config import ObserveConfig
from shared.runtime.observe import ProcessHealth, add_routes, advertised, serving
from tests.servers import free_port

DEADLINE_S = 10.0


def test_a_process_that_drains_is_never_ready_again() -> None:
    health = ProcessHealth()
    assert health.reasons == ["starting"]
    health.ready()
    assert not health.reasons
    health.unready("the engine starts again", "no blocks")
    assert health.reasons == ["the engine starts again", "no blocks"]
    health.drain()
    health.ready()
    assert health.reasons == ["draining"]
    health.drain(lambda: "2 requests run")
    assert health.reasons == ["2 requests run"]


def test_a_socket_at_any_address_is_advertised_by_the_machines_name() -> None:
    assert advertised("0.0.0.0") == advertised("::") == socket.gethostname()
    assert advertised("127.0.0.1") == "127.0.0.1"


async def test_a_service_may_serve_the_paths_itself() -> None:
    health, registry, app = ProcessHealth(), CollectorRegistry(), web.Application()
    Gauge("headrace_answers", "The answer", registry=registry).set(42)
    add_routes(app, health, registry)
    async with TestServer(app) as server, ClientSession() as session:
        async with session.get(server.make_url("/health")) as answer:
            assert (answer.status, await answer.json()) == (503, {"ready": False, "reasons": ["starting"]})
        health.ready()
        async with session.get(server.make_url("/health")) as answer:
            assert (answer.status, await answer.json()) == (200, {"ready": True, "reasons": []})
        async with session.get(server.make_url("/metrics")) as answer:
            assert "headrace_answers 42.0" in await answer.text()
        async with session.get(server.make_url("/sd")) as answer:
            assert answer.status == 503, "an empty list would have Prometheus drop all targets"
        health.targets = lambda: b"[]"
        async with session.get(server.make_url("/sd")) as answer:
            assert (answer.status, answer.content_type, await answer.read()) == (200, "application/json", b"[]")


async def test_a_body_that_no_path_reads_is_not_decompressed_either() -> None:
    """It would be in the event loop: a few MB stop it for seconds. One that is no gzip would end the connection."""
    async with serving(ObserveConfig(port=free_port()), ProcessHealth(), CollectorRegistry()) as url:
        where = urlsplit(url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        head = b"GET /live HTTP/1.1\r\nHost: x\r\n"
        for more in (b"Content-Encoding: gzip\r\nContent-Length: 7\r\n\r\nno gzip", b"\r\n"):
            writer.write(head + more)
            async with asyncio.timeout(DEADLINE_S):
                assert (await reader.readuntil(b"live\n")).startswith(b"HTTP/1.1 200 ")
        writer.close()
