"""Hypothesis's settings for all tests, and fixtures: servers shared by the whole run (`nats_url`, `etcd_endpoint`), and
a test's own for faults.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.servers import EtcdServer, NatsServer, etcd_server, nats_server

# Tests start programs while gRPC's threads run. Its handlers of fork have kept such a child from its exec once.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell's background jobs ignore it, and so would what tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("headrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headrace")  # no test fails because the machine is slow or busy


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A NATS server that every test may use and none may harm."""
    with nats_server(tmp_path_factory.mktemp("nats")) as server:
        yield server.url


@pytest.fixture(scope="session")
def etcd_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The host:port of an etcd that every test may use, each below a prefix of its own."""
    with etcd_server(tmp_path_factory.mktemp("etcd")) as server:
        yield server.endpoint


@pytest.fixture
def own_nats(tmp_path: Path) -> Iterator[NatsServer]:
    """A running NATS server of the test's own, to kill, freeze and restart."""
    with nats_server(tmp_path) as server:
        yield server


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """A running etcd of the test's own, to kill, freeze, restart and wipe."""
    with etcd_server(tmp_path) as server:
        yield server
