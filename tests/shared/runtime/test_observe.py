"""The health of a process. test_lifecycle.py tests its paths with the whole process."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from prometheus_client import CollectorRegistry, Gauge, Histogram

from shared.config import ObserveConfig
from shared.errors import ConfigError
from shared.messages.cards import Instance, ServiceName
from shared.runtime.observe import (
    ProcessHealth,
    add_routes,
    advertised,
    check_host,
    scrape_targets,
    serving,
    takes_openmetrics,
)
from tests.servers import free_port

DEADLINE_S = 60.0
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)
"""What Prometheus sends."""


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


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "localhost", ""])
def test_an_address_of_this_machine_passes_the_check(host: str) -> None:
    check_host("http.host", host)


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "nowhere.invalid", "a" * 70 + ".b"])
def test_an_address_of_another_machine_is_refused_by_the_name_of_its_setting(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"^http\.host: {host} is no address of this machine: [^()]+$"):
        check_host("http.host", host)


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
        health.targets = None
        async with session.get(server.make_url("/sd")) as answer:
            assert answer.status == 404
            assert "ask a frontend" in await answer.text()


async def test_a_scraper_that_takes_openmetrics_gets_exemplars_and_others_the_classic_format() -> None:
    registry = CollectorRegistry()
    Histogram("headrace_wait_seconds", "Wait", registry=registry).observe(0.1, {"trace_id": "ab"})
    async with serving(ObserveConfig(port=free_port()), ProcessHealth(), registry) as url, ClientSession() as session:
        async with session.get(f"{url}/metrics", headers={"Accept": PROMETHEUS}) as answer:
            assert answer.content_type == "application/openmetrics-text"
            text = await answer.text()
            assert ' # {trace_id="ab"} 0.1' in text
            assert text.endswith("# EOF\n")
        for accept in ("*/*", "text/plain;version=0.0.4", "text/html,application/xhtml+xml", ""):
            async with session.get(f"{url}/metrics", headers={"Accept": accept}) as answer:
                assert answer.content_type == "text/plain"
                assert "trace_id" not in await answer.text()


def test_only_openmetrics_of_a_version_that_is_written_is_taken() -> None:
    assert takes_openmetrics([PROMETHEUS])
    assert takes_openmetrics(["text/plain", "application/openmetrics-text"])
    assert not takes_openmetrics(["application/openmetrics-text;version=0.0.1"])
    assert not takes_openmetrics(["application/openmetrics-text;version=1.0.0;q=0"])
    assert not takes_openmetrics(["application/openmetrics-textual", ";;,,=;", "q"])
    assert not takes_openmetrics([])


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


async def test_a_page_of_another_site_gets_nothing_of_an_observe_port() -> None:
    evil = ({"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"})
    for hosts in ((), ("llm.example",)):
        config = ObserveConfig(port=free_port(), hosts=hosts)
        async with serving(config, ProcessHealth(), CollectorRegistry()) as url, ClientSession() as session:
            for path in ("/live", "/health", "/metrics", "/sd"):
                for headers in evil:
                    headers = {"Sec-Fetch-Mode": "no-cors", **headers}
                    async with session.get(f"{url}{path}", headers=headers) as answer:
                        assert answer.status == 403
                        assert (await answer.text()).startswith(tuple(evil[0] | evil[1] | evil[2]))
            async with session.get(f"{url}/metrics", headers={"Host": "llm.example:9100"}) as answer:
                assert answer.status == (200 if hosts else 403)
            async with session.get(f"{url}/metrics", headers={"Host": "prometheus-target:9100"}) as answer:
                assert answer.status == 200


def instance(service: ServiceName, name: str, http: str) -> Instance:
    return Instance("default", service, name, 1, "machine", 7, 0.0, "1.0", http=http)


def test_each_instance_with_metrics_is_a_target_with_the_labels_of_its_series() -> None:
    found: list[dict[str, Any]] = json.loads(
        scrape_targets(
            [
                instance("worker", "0b", "http://[::1]:4001"),
                instance("frontend", "0c", "https://node-1:9100/"),
                instance("worker", "0a", "http://node-1:4000"),
                instance("router", "0d", ""),
            ]
        )
    )
    assert [group["targets"] for group in found] == [["node-1:9100"], ["node-1:4000"], ["[::1]:4001"]]
    assert found[0]["labels"] == {
        "namespace": "default",
        "service": "frontend",
        "instance": "0c",
        "__scheme__": "https",
        "__metrics_path__": "/metrics",
    }
    assert [group["labels"]["instance"] for group in found] == ["0c", "0a", "0b"]


def test_without_instances_there_is_an_empty_list() -> None:
    assert scrape_targets([]) == b"[]"
