"""Draining a worker by command: its streams end there, or go on at another worker as if nothing had happened."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from deploy.local.operate import operate
from deploy.local.show.fleet import FleetConfig, fleet_config
from shared.messages import OperateWorker, WorkerOperation
from tests.integration.fleet import Fleet, Service, fleet
from tests.integration.stack import eventually
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.timeout(900)

LIMIT_S = 180.0
TOKENS = 1500
"""Seconds of them, on any machine: a worker shows what it runs every 250 ms."""
READ_BEFORE = 50
"""Chunks until the worker is drained."""
WORKERS = ("worker 1", "worker 2")


class Draining:
    """Two workers with one setting of `drain_s`, and the commands that act on them."""

    def __init__(self, services: Fleet, config: FleetConfig) -> None:
        self.services = services
        self.workers = [services.services[name] for name in WORKERS]
        self._config = config

    def command(self, operation: WorkerOperation, worker: Service) -> int:
        """The exit status of a command on this worker."""
        return operate(self._config, OperateWorker(operation), [instance(worker)], timeout_s=LIMIT_S)

    def busy(self) -> Service:
        """The worker that streams."""
        return eventually(
            lambda: next((one for one in self.workers if one.metric("headrace_inflight_requests")), None),
            limit_s=LIMIT_S,
            what="a worker runs the request",
        )

    def ask(self, then: Callable[[], None] = lambda: None) -> str:
        """The text of a stream; `then` happens in the middle of it."""
        url = f"{self.services.services['frontend'].url}/v1"
        text, finish = "", None
        with openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=LIMIT_S) as client:
            stream = client.completions.create(
                model="tiny",
                prompt="The mill at the river turns",
                max_tokens=TOKENS,
                temperature=0.9,
                seed=7,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            for number, chunk in enumerate(stream):
                if number == READ_BEFORE:
                    then()
                text += chunk.choices[0].text
                finish = chunk.choices[0].finish_reason or finish
        assert finish == "length"
        return text

    @property
    def moved(self) -> float:
        """Number of attempts that went on at another worker."""
        return self.services.services["frontend"].metric("headrace_model_migration_total")


def reasons(service: Service) -> list[str]:
    """Why it is not ready, as /health says."""
    with pytest.raises(urllib.error.HTTPError) as unready:
        urllib.request.urlopen(f"{service.url}/health", timeout=60)
    return [str(each) for each in json.load(unready.value)["reasons"]]


def instance(service: Service) -> str:
    """Its id, which is a label of its metrics."""
    with urllib.request.urlopen(f"{service.url}/metrics", timeout=60) as answer:
        [found] = set(re.findall(r'instance="([^"]*)"', answer.read().decode()))
    return str(found)


def drawn(worker: Service) -> float:
    return worker.metric("headrace_output_tokens_total")


def lives(service: Service) -> bool:
    with urllib.request.urlopen(f"{service.url}/live", timeout=60) as answer:
        return bool(answer.status == 200)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", context_length=8192)


@pytest.fixture
def drain_s(request: pytest.FixtureRequest) -> float:
    """Of the workers, as a test says."""
    return float(request.param)


@pytest.fixture
def draining(tmp_path: Path, nats_url: str, model: Path, drain_s: float) -> Iterator[Draining]:
    found = tmp_path / "where"
    where = ("--namespace", "draining", "--discovery-backend", "file", "--discovery-path", str(found))
    with fleet(tmp_path, nats_url, *where) as services:
        services.start("router", "router")
        for name in WORKERS:
            services.start("worker", name, "--model", str(model), "--threads", "1", "--drain-s", str(drain_s))
        # A busy machine must not make workers look frozen: then attempts would move by themselves.
        services.start("frontend", "frontend", "--limits-frozen-s", "120")
        services.wait_ready()
        router = services.services["router"]  # it sees the workers later than the frontend does, now and then
        eventually(
            lambda: router.metric("headrace_kv_sources") >= len(WORKERS),
            limit_s=LIMIT_S,
            what="the router knows the workers",
        )
        file = tmp_path / "fleet.toml"
        file.write_text(f'[discovery]\nbackend = "file"\npath = "{found}"\n', encoding="utf-8")
        yield Draining(services, fleet_config(namespace="draining", nats=nats_url, etcd="", file=file))


@pytest.mark.parametrize("drain_s", [LIMIT_S], indirect=True)
def test_a_stream_ends_at_the_worker_that_is_drained_and_the_next_one_goes_elsewhere(draining: Draining) -> None:
    text = draining.ask()
    draining.services.wait_idle(*WORKERS)
    with ThreadPoolExecutor(1) as pool:
        commands: list[tuple[Service, Future[int]]] = []

        def drain() -> None:
            one = draining.busy()
            commands.append((one, pool.submit(draining.command, "drain", one)))

        assert draining.ask(drain) == text
        [(one, command)] = commands
        assert command.result(LIMIT_S) == 0
    assert draining.moved == 0
    assert reasons(one) == ["this worker is drained"]
    assert lives(one)
    [other] = [each for each in draining.workers if each is not one]
    before = drawn(other)
    assert draining.ask() == text
    eventually(lambda: drawn(other) - before >= TOKENS, limit_s=LIMIT_S, what="the other worker shows its tokens")
    assert draining.command("drain", one) == 1, "it is drained already"
    assert draining.command("resume", one) == 0
    draining.services.wait_ready(*WORKERS)
    assert draining.command("drain", other) == 0
    assert draining.ask() == text


@pytest.mark.parametrize("drain_s", [0.2], indirect=True)
def test_a_stream_that_takes_longer_than_drain_s_goes_on_at_the_other_worker_with_the_same_text(
    draining: Draining,
) -> None:
    text = draining.ask()
    draining.services.wait_idle(*WORKERS)
    drained: list[Service] = []

    def drain() -> None:
        drained.append(draining.busy())
        assert draining.command("drain", drained[0]) == 0

    assert draining.ask(drain) == text
    assert draining.moved == 1
    assert reasons(drained[0]) == ["this worker is drained"]
    assert draining.command("resume", drained[0]) == 0
    draining.services.wait_ready(*WORKERS)
    assert draining.ask() == text
