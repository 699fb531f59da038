"""Hypothesis's settings for all tests, the choice of tests by tier, and fixtures: servers shared by the whole run
(`nats_url`, `etcd_endpoint`), and a test's own for faults.

TEST_TIERS   the tiers whose tests run, such as `check,all`; without it all tests of the files that pytest is given do
"""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.event_planes import with_jetstream
from tests.servers import EtcdServer, NatsServer, etcd_server, nats_server
from tests.tiers import MARKS, Tier, tier_of, tier_with_marks, tiers_of
from tests.worker.diffusers import environment as diffusers
from tests.worker.vllm.environment import INSTALLED, ON_GPU

# Tests start programs while gRPC's threads run. Its handlers of fork have kept such a child from its exec once.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
if ON_GPU:  # Triton's products of float32 numbers have ten bits otherwise, and tokens depend on the batch
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell's background jobs ignore it, and so would what tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("headrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headrace")  # no test fails because the machine is slow or busy

FOLDER = Path(__file__).parents[1]
BEGAN_S = pytest.StashKey[float]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other tiers, and skip those that need vLLM if it is not installed."""
    tiers = tiers_of(os.environ.get("TEST_TIERS") or "check,all,long")
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        file = str(item.path.relative_to(FOLDER))
        marks: list[Tier] = [mark.args[0] for mark in item.iter_markers("tier")]
        tier = tier_with_marks(
            file, [*marks, *(MARKS[mark.name] for mark in item.iter_markers() if mark.name in MARKS)]
        )
        (kept if tier in tiers else left_out).append(item)
        if tier != tier_of(file):
            item.user_properties.append(("tier", tier))  # goes into the report that tests/durations.py reads
        if item.get_closest_marker("vllm") and not INSTALLED:
            item.add_marker(pytest.mark.skip(reason="needs ./headrace install-vllm"))
        if item.get_closest_marker("diffusers") and not diffusers.INSTALLED:
            item.add_marker(pytest.mark.skip(reason="needs ./headrace install-diffusers"))
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Note when a test began, in seconds of processor time of pytest and of the processes that it has waited for."""
    item.stash[BEGAN_S] = sum(os.times()[:4])
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    """Put the processor time that a test and its fixtures took into its report."""
    try:
        return (yield)
    finally:
        item.user_properties.append(("processor_s", f"{sum(os.times()[:4]) - item.stash[BEGAN_S]:.2f}"))


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A NATS server that every test may use and none may harm."""
    with nats_server(tmp_path_factory.mktemp("nats")) as server:
        yield server.url


@pytest.fixture(scope="session")
def jetstream_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A NATS server with JetStream that every test may use, each in a namespace of its own."""
    directory = tmp_path_factory.mktemp("jetstream")
    with nats_server(directory, with_jetstream(directory)) as server:
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
