from __future__ import annotations

import socket

import pytest

from deploy.local.bench import client as bench_client
from deploy.local.bench.client import Client
from deploy.local.bench.loads import LoadRequest
from deploy.local.size import token_client


async def test_a_server_that_takes_no_connection_is_unreachable_and_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (bench_client, token_client):
        monkeypatch.setattr(module, "CONNECT_LIMIT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        others = [socket.socket() for _ in range(4)]
        try:
            for each in others:  # its backlog is full, so that the kernel answers no further one
                each.setblocking(False)
                each.connect_ex(full.getsockname())
            url = f"http://127.0.0.1:{full.getsockname()[1]}"
            async with token_client.http_session("") as http:
                result = await Client(http, url, {}, 30.0, ()).ask(LoadRequest((), 1))
        finally:
            for each in others:
                each.close()
    assert (result.outcome, result.reason) == ("unreachable", "no connection within 0.2 s")
