"""A router and a frontend that several modules share, one after another; each module brings workers of its own.

The modules kill workers only. What is killed here is started again by its module, and a module's workers are gone
before the next module begins.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from tests.integration.fleet import Fleet, fleet
from tests.integration.stack import eventually

LIMIT_S = 180.0
SETTINGS = '[tool_parser]\nheld = "hermes"\ntools = "hermes"\n'
"""Each module names its model after itself, as the frontend keeps what it has loaded of a model."""

WithWorkers = Callable[[Callable[[Fleet], None]], AbstractContextManager[Fleet]]


@pytest.fixture(scope="session")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[Fleet]:
    """The processes that stay: a router and a frontend."""
    folder = tmp_path_factory.mktemp("shared")
    settings = folder / "frontend.toml"
    settings.write_text(SETTINGS)
    where = ("--namespace", "shared", "--discovery-backend", "file", "--discovery-path", str(folder / "where"))
    with fleet(folder, nats_url, *where) as one:
        one.start("router", "router")
        # Kills are seen soon; a busy machine that makes workers look frozen costs attempts, and no request.
        # An engine may take long to start.
        limits = ("--limits-frozen-s", "8", "--limits-quiet-s", "0.5", "--limits-attempts", "20")
        one.start("frontend", "frontend", "--config", str(settings), *limits, "--limits-rescue-s", "120")
        yield one


@pytest.fixture(scope="session")
def with_workers(shared_fleet: Fleet) -> WithWorkers:
    """The fleet with the workers that the argument starts, ready and known to the router; then without them."""
    services = shared_fleet.services
    seen = set[str]()
    """The models of the modules before."""

    def known(workers: int) -> bool:
        return services["router"].metric("headrace_kv_sources") == workers

    def listed() -> set[str]:
        with urllib.request.urlopen(f"{services['frontend'].url}/v1/models", timeout=LIMIT_S) as answer:
            return {model["id"] for model in json.load(answer)["data"]}

    @contextmanager
    def running(start: Callable[[Fleet], None]) -> Iterator[Fleet]:
        stay = set(shared_fleet.services)
        start(shared_fleet)
        workers = len(shared_fleet.services) - len(stay)
        try:
            shared_fleet.wait_ready()
            # The router sees workers later than the frontend does, now and then.
            eventually(lambda: known(workers), limit_s=LIMIT_S, what="the router knows the workers")
            # And the frontend may be ready by the model of the module before.
            eventually(lambda: bool(listed() - seen), limit_s=LIMIT_S, what="the frontend serves the module's model")
            seen.update(listed())
            yield shared_fleet
        finally:
            for name in set(shared_fleet.services) - stay:
                shared_fleet.services.pop(name).kill()
        eventually(lambda: known(0), limit_s=LIMIT_S, what="the router knows that the workers are gone")

    return running
