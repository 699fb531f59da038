"""The servers that tests start."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from tests.integration.stack import ROOT
from tests.servers import EtcdServer, NatsServer, Server, free_port

DRAWING = "from tests.servers import free_port; print(*(free_port() for _ in range(120)), flush=True); input()"
"""A program that draws ports, binds none, and stays."""


@pytest.fixture(params=["own_nats", "own_etcd"])
def server(request: pytest.FixtureRequest) -> Server:
    found: NatsServer | EtcdServer = request.getfixturevalue(request.param)
    return found


def test_a_server_restarts_on_its_port(server: Server) -> None:
    server.restart()
    server.kill()
    server.start()


def test_a_killed_server_refuses_connections(own_nats: NatsServer) -> None:
    own_nats.kill()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", own_nats.port), timeout=1.0)


def test_a_frozen_server_answers_after_a_thaw(own_nats: NatsServer) -> None:
    own_nats.freeze()
    with socket.create_connection(("127.0.0.1", own_nats.port), timeout=10.0) as connection:
        own_nats.thaw()
        assert connection.recv(4) == b"INFO"


def test_a_wiped_etcd_starts_again(own_etcd: EtcdServer) -> None:
    own_etcd.wipe()


def test_processes_that_bind_late_never_get_the_same_port() -> None:
    drawn = [free_port() for _ in range(120)]
    with ExitStack() as started:
        for _ in range(2):
            command = [sys.executable, "-c", DRAWING]
            other = started.enter_context(
                subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            assert other.stdout is not None
            drawn += map(int, re.findall(r"\d+", other.stdout.readline()))
    assert len(drawn) == len(set(drawn)) == 360
    assert all(10_000 <= port < 20_000 for port in drawn)
