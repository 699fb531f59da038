"""Operating native workers by command: streams end at a drained worker or go on at another one; LoRAs come and go."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from deploy.local.operate import operate
from deploy.local.show.fleet import FleetConfig, fleet_config
from shared.messages.people import OperateWorker, WorkerOperation
from tests.integration.fleet import Fleet, Service, fleet
from tests.integration.stack import eventually
from tests.process_tree import children
from tests.tiny_lora import write_lora
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.timeout(900)

LIMIT_S = 180.0
TOKENS = 1500
"""Seconds of them, on any machine: a worker shows what it runs every 250 ms."""
READ_BEFORE = 50
"""Chunks until the worker is drained."""
WORKERS = ("worker 1", "worker 2")


class OperatedFleet:
    """Two workers with one setting of `drain_s`, and the commands that act on them."""

    def __init__(self, services: Fleet, config: FleetConfig, names: Sequence[str] = WORKERS) -> None:
        self.services = services
        self.workers = [services.services[name] for name in names]
        self._config = config

    def command(
        self, operation: WorkerOperation, *workers: Service, name: str = "", path: str = "", level: int = 1
    ) -> int:
        """The exit status of a command on these workers; without one, on all of the model's."""
        asked = OperateWorker(operation, name, path, level)
        return operate(self._config, asked, [instance(each) for each in workers], timeout_s=LIMIT_S)

    def busy(self) -> Service:
        """The worker that streams."""
        with self.services.busiest(*(one.name for one in self.workers)) as worker:
            return worker

    def ask(
        self,
        then: Callable[[], None] = lambda: None,
        model: str = "tiny",
        *,
        tokens: int = TOKENS,
        temperature: float = 0.9,
        prompt: str | list[int] = "The mill at the river turns",
    ) -> str:
        """The text of a stream; `then` happens in the middle of it."""
        url = f"{self.services.services['frontend'].url}/v1"
        text, finish = "", None
        with openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=LIMIT_S) as client:
            stream = client.completions.create(
                model=model,
                prompt=prompt,
                max_tokens=tokens,
                temperature=temperature,
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

    def models(self) -> list[str]:
        """The names that the frontend lists."""
        with urllib.request.urlopen(f"{self.services.services['frontend'].url}/v1/models", timeout=60) as answer:
            return sorted(str(each["id"]) for each in json.load(answer)["data"])

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


def cached(worker: Service) -> float:
    return worker.metric("headrace_blocks", state="cached")


def lives(service: Service) -> bool:
    with urllib.request.urlopen(f"{service.url}/live", timeout=60) as answer:
        return bool(answer.status == 200)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", context_length=8192)


@pytest.fixture
def drain_s(request: pytest.FixtureRequest) -> float:
    """Return drain_s of the workers, as a test says."""
    return float(request.param)


@pytest.fixture
def operated(tmp_path: Path, nats_url: str, model: Path, drain_s: float) -> Iterator[OperatedFleet]:
    found = tmp_path / "where"
    where = ("--namespace", "draining", "--discovery-backend", "file", "--discovery-path", str(found))
    with fleet(tmp_path, nats_url, *where) as services:
        services.start("router", "router", "--source-digest-s", "1")
        for name in WORKERS:
            services.start("worker", name, "--model", str(model), "--threads", "1", "--drain-s", str(drain_s))
        # A busy machine must not make workers look frozen or stalled: then attempts would move by themselves.
        services.start("frontend", "frontend", "--limits-frozen-s", "120", "--limits-stall-s", "120")
        services.wait_ready()
        router = services.services["router"]  # it sees the workers later than the frontend does, now and then
        eventually(
            lambda: router.metric("headrace_kv_sources") >= len(WORKERS),
            limit_s=LIMIT_S,
            what="the router knows the workers",
        )
        file = tmp_path / "fleet.toml"
        file.write_text(f'[discovery]\nbackend = "file"\npath = "{found}"\n', encoding="utf-8")
        yield OperatedFleet(services, fleet_config(namespace="draining", nats=nats_url, etcd="", file=file))


@pytest.mark.parametrize("drain_s", [LIMIT_S], indirect=True)
def test_a_stream_ends_at_the_worker_that_is_drained_and_the_next_one_goes_elsewhere(operated: OperatedFleet) -> None:
    text = operated.ask()
    operated.services.wait_idle(*WORKERS)
    with ThreadPoolExecutor(1) as pool:
        commands: list[tuple[Service, Future[int]]] = []

        def drain() -> None:
            one = operated.busy()
            commands.append((one, pool.submit(operated.command, "drain", one)))

        assert operated.ask(drain) == text
        [(one, command)] = commands
        assert command.result(LIMIT_S) == 0
    assert operated.moved == 0
    assert reasons(one) == ["this worker is drained"]
    assert lives(one)
    [other] = [each for each in operated.workers if each is not one]
    before = drawn(other)
    assert operated.ask() == text
    eventually(lambda: drawn(other) - before >= TOKENS, limit_s=LIMIT_S, what="the other worker shows its tokens")
    assert operated.command("drain", one) == 1, "it is drained already"
    assert operated.command("resume", one) == 0
    operated.services.wait_ready(*WORKERS)
    assert operated.command("drain", other) == 0
    assert operated.ask() == text


@pytest.mark.parametrize("drain_s", [0.2], indirect=True)
def test_a_stream_that_takes_longer_than_drain_s_goes_on_at_the_other_worker_with_the_same_text(
    operated: OperatedFleet,
) -> None:
    text = operated.ask()
    operated.services.wait_idle(*WORKERS)
    drained: list[Service] = []

    def drain() -> None:
        drained.append(operated.busy())
        assert operated.command("drain", drained[0]) == 0

    assert operated.ask(drain) == text
    assert operated.moved == 1
    assert reasons(drained[0]) == ["this worker is drained"]
    assert operated.command("resume", drained[0]) == 0
    operated.services.wait_ready(*WORKERS)
    assert operated.ask() == text


@pytest.mark.parametrize("drain_s", [0.2], indirect=True)
def test_streams_go_on_while_workers_sleep_and_wake_in_turns(operated: OperatedFleet) -> None:
    text = operated.ask()
    over = threading.Event()

    def stream() -> list[str]:
        texts = [operated.ask()]
        while not over.is_set():
            texts.append(operated.ask())
        return texts

    with ThreadPoolExecutor(3) as pool:
        streams = [pool.submit(stream) for _ in range(3)]
        try:
            for level in (1, 2, 1, 2):
                for one in operated.workers:
                    assert operated.command("sleep", one, level=level) == 0
                    assert reasons(one) == ["this worker is asleep"]
                    eventually(lambda one=one: not cached(one), limit_s=LIMIT_S, what="it shows no blocks")  # type: ignore[misc]
                    assert operated.command("clear", one) == 1, "it has no cache"
                    assert operated.command("wake", one) == 0
                    operated.services.wait_ready(*WORKERS)
                    assert operated.command("clear", one) == 0
        finally:
            over.set()
        assert all(each == text for one in streams for each in one.result(LIMIT_S))
    assert operated.moved > 0
    operated.services.wait_idle(*WORKERS)
    router = operated.services.services["router"]
    before = router.metric("headrace_kv_digests_total", outcome="agreed")
    eventually(
        lambda: router.metric("headrace_kv_digests_total", outcome="agreed") >= before + 2 * len(WORKERS),
        limit_s=LIMIT_S,
        what="the router compares its index with the workers' digests",
    )
    assert router.metric("headrace_kv_digests_total", outcome="differed") == 0


@pytest.mark.parametrize("drain_s", [0.2], indirect=True)
def test_a_lora_is_loaded_moved_loaded_again_and_replaced(operated: OperatedFleet, model: Path, tmp_path: Path) -> None:
    lora = write_lora(tmp_path / "lora", model)
    assert operated.command("load_lora", name="poet", path=str(lora)) == 0
    eventually(lambda: operated.models() == ["poet", "tiny"], limit_s=LIMIT_S, what="the LoRA is listed")
    base, text = operated.ask(), operated.ask(model="poet")
    assert base != text
    drained: list[Service] = []

    def drain() -> None:
        drained.append(operated.busy())
        assert operated.command("drain", drained[0]) == 0

    operated.services.wait_idle(*WORKERS)
    assert operated.ask(drain, "poet") == text
    assert operated.moved == 1
    assert operated.command("resume", drained[0]) == 0
    operated.services.wait_ready(*WORKERS)

    for one in operated.workers:  # their engines load it again
        starts = one.metric("headrace_engine_starts_total")
        for child in children(one.process.pid):
            os.kill(child, signal.SIGKILL)
        eventually(
            lambda one=one, starts=starts: one.metric("headrace_engine_starts_total") > starts,  # type: ignore[misc]
            limit_s=LIMIT_S,
            what="an engine starts again",
        )
    operated.services.wait_ready(*WORKERS)
    assert operated.ask(model="poet") == text
    assert operated.command("load_lora", name="poet", path=str(lora)) == 0, "it is loaded already"
    other = write_lora(tmp_path / "other", model, seed=1)
    assert operated.command("load_lora", name="poet", path=str(other)) == 1, "unload it first"
    assert operated.command("unload_lora", name="poet") == 0
    eventually(lambda: operated.models() == ["tiny"], limit_s=LIMIT_S, what="the LoRA is not listed")
    with pytest.raises(openai.NotFoundError):
        operated.ask(model="poet")
    write_lora(lora, model, seed=1)
    assert operated.command("load_lora", name="poet", path=str(lora)) == 0
    eventually(lambda: operated.models() == ["poet", "tiny"], limit_s=LIMIT_S, what="the LoRA is listed")
    assert operated.ask(model="poet") not in (base, text)
    assert operated.ask() == base
