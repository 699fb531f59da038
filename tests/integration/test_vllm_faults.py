"""Two vLLM workers that are frozen, killed, and put to sleep while clients stream: the same texts, no process left."""

from __future__ import annotations

import os
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deploy.local.show.fleet import fleet_config
from tests.integration.fleet import Service, fleet
from tests.integration.stack import eventually
from tests.integration.test_operate import OperatedFleet, cached, reasons
from tests.integration.test_vllm import cores
from tests.process_tree import below
from tests.tiny_model import write_tiny_model
from tests.worker.vllm.environment import LIMIT_S, ON_DEVICE_WORDS, PYTHON, WORKER, needs_vllm

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]
NAMESPACE = "vllm-faults"
WORKERS = ("worker 1", "worker 2")
TOKENS = 400
ARGUMENTS = {"enforce_eager": "true", "dtype": "float32", "num_gpu_blocks_override": "64", "max_model_len": "1024"}
ARGUMENTS |= ON_DEVICE_WORDS
IDLE_S, PROBE_LIMIT_S, STALL_S = 2.0, 20.0, 20.0


class Faulty(OperatedFleet):
    """Two workers with vLLM, which may be started again."""

    model = ""

    def start(self, name: str) -> None:
        arguments = [word for key, value in ARGUMENTS.items() for word in (f"--vllm.{key}", value)]
        health = ("--health-idle-s", str(IDLE_S), "--health-limit-s", str(PROBE_LIMIT_S), "--stall-s", str(STALL_S))
        flags = ("--model", self.model, "--engine", "vllm", "--vllm-python", str(PYTHON), *WORKER)
        self.services.start("worker", name, *flags, *health, "--drain-s", "0.5", *arguments)

    def serve(self) -> None:
        """Wait until all workers serve, and the frontend and the router know them."""
        self.workers = [self.services.services[name] for name in WORKERS]
        for one in self.workers:
            eventually(one.ready, limit_s=LIMIT_S, what=f"{one.name} serves")
        self.services.wait_ready()
        router = self.services.services["router"]
        eventually(
            lambda: router.metric("headrace_kv_sources", state="live") >= len(WORKERS),
            limit_s=LIMIT_S,
            what="the router follows both workers",
        )

    def text(self, then: Callable[[], None] = lambda: None) -> str:
        return self.ask(then, tokens=TOKENS, temperature=0.0)

    def agree(self) -> None:
        """Wait until the router has compared its index with the digests of both workers again; no digest differed."""
        self.services.wait_idle(*WORKERS)
        router = self.services.services["router"]
        before = router.metric("headrace_kv_digests_total", outcome="agreed")
        eventually(
            lambda: router.metric("headrace_kv_digests_total", outcome="agreed") >= before + 2 * len(WORKERS),
            limit_s=LIMIT_S,
            what="digests of both workers agree again",
        )
        assert router.metric("headrace_kv_digests_total", outcome="differed") == 0


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[Faulty]:
    folder = tmp_path_factory.mktemp("vllm-faults")
    found = folder / "where"
    where = ("--namespace", NAMESPACE, "--discovery-backend", "file", "--discovery-path", str(found))
    with fleet(folder, nats_url, *where) as services:
        services.start("router", "router", "--source-digest-s", "1")
        # A busy machine must not make workers look frozen to the frontend: this is of the worker's own limits.
        services.start("frontend", "frontend", "--limits-frozen-s", "120")
        Faulty.model = str(
            write_tiny_model(folder / "tiny", hidden=128, heads=2, context_length=1024, tied=False, seed=3)
        )
        file = folder / "fleet.toml"
        file.write_text(f'[discovery]\nbackend = "file"\npath = "{found}"\n', encoding="utf-8")
        made = Faulty(services, fleet_config(namespace=NAMESPACE, nats=nats_url, etcd="", file=file), ())
        for name in WORKERS:
            made.start(name)
        made.serve()
        yield made


def lives(pid: int) -> bool:
    """Return whether a process is there that has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def get(service: Service, path: str) -> str:
    with urllib.request.urlopen(f"{service.url}/{path}", timeout=60) as answer:
        return str(answer.read().decode())


def test_vllms_own_metrics_are_shown_with_our_labels_each_series_once(faulty: Faulty) -> None:
    faulty.text()
    worker = faulty.workers[0]

    def told() -> bool:
        return sum(one.metric("vllm:generation_tokens_total") for one in faulty.workers) >= TOKENS

    eventually(told, limit_s=LIMIT_S, what="vLLM's counters are shown")
    series = [
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in text_string_to_metric_families(get(worker, "metrics"))
        for sample in family.samples
    ]
    assert len(set(series)) == len(series)
    of_vllm = [dict(labels) for name, labels in series if name.startswith("vllm:")]
    assert len(of_vllm) > 50
    assert "vllm:request_params_n" not in {name.removesuffix("_bucket") for name, _ in series}
    assert all(labels["namespace"] == NAMESPACE and labels["service"] == "worker" for labels in of_vllm)
    assert not [name for name, _ in series if name.endswith("_created")]
    assert worker.metric("headrace_rank_blocks", rank="0") == 64


def test_an_idle_worker_shows_its_probes(faulty: Faulty) -> None:
    worker = faulty.workers[0]
    eventually(
        lambda: worker.metric("headrace_engine_probes_total", outcome="ok") >= 2,
        limit_s=LIMIT_S,
        what="the idle engine is probed",
    )
    assert '"probes": ["rank 0: ok, ' in get(worker, "health")
    assert worker.metric("headrace_engine_probe_seconds", rank="0") > 0


def test_a_core_that_freezes_while_it_is_idle_is_found_and_replaced(faulty: Faulty) -> None:
    text = faulty.text()
    faulty.services.wait_idle(*WORKERS)
    worker = faulty.workers[0]
    group = below(worker.process.pid)
    starts = worker.metric("headrace_engine_starts_total")
    [core] = cores(worker.process.pid)
    os.kill(core, signal.SIGSTOP)
    eventually(
        lambda: worker.metric("headrace_engine_starts_total") > starts,
        limit_s=LIMIT_S,
        what="another engine has started",
    )
    assert worker.metric("headrace_engine_probes_total", outcome="failed") == 1
    eventually(lambda: not any(map(lives, group)), limit_s=LIMIT_S, what="no process of the frozen engine is left")
    faulty.serve()
    assert faulty.text() == text
    faulty.agree()


def test_a_core_that_freezes_in_mid_stream_is_replaced_and_the_stream_goes_on_elsewhere(faulty: Faulty) -> None:
    text = faulty.text()
    faulty.services.wait_idle(*WORKERS)
    moved, frozen = faulty.moved, list[int]()

    def freeze() -> None:
        frozen.extend(cores(faulty.busy().process.pid))
        os.kill(frozen[0], signal.SIGSTOP)

    assert faulty.text(freeze) == text
    assert faulty.moved == moved + 1
    eventually(lambda: not any(map(lives, frozen)), limit_s=LIMIT_S, what="the frozen core is gone")
    faulty.serve()
    faulty.agree()


def test_a_worker_that_is_killed_in_mid_stream_takes_all_its_processes_along_and_the_stream_goes_on(
    faulty: Faulty,
) -> None:
    text = faulty.text()
    faulty.services.wait_idle(*WORKERS)
    killed: list[Service] = []
    group: list[int] = []

    def kill() -> None:
        killed.append(faulty.busy())
        group.extend(below(killed[0].process.pid))
        killed[0].kill()

    assert faulty.text(kill) == text
    assert len(group) >= 2
    eventually(lambda: not any(map(lives, group)), limit_s=LIMIT_S, what="no process of the killed worker is left")
    faulty.start(killed[0].name)
    faulty.serve()
    assert faulty.text() == text


def test_streams_go_on_while_workers_sleep_wake_and_are_cleared_in_turns(faulty: Faulty) -> None:
    text = faulty.text()
    faulty.agree()
    over = threading.Event()

    def stream() -> list[str]:
        texts = [faulty.text()]
        while not over.is_set():
            texts.append(faulty.text())
        return texts

    with ThreadPoolExecutor(3) as pool:
        streams = [pool.submit(stream) for _ in range(3)]
        try:
            for level in (1, 2):
                for one in faulty.workers:
                    assert faulty.command("sleep", one, level=level) == 0
                    assert reasons(one) == ["this worker is asleep"]
                    eventually(lambda one=one: not cached(one), limit_s=LIMIT_S, what="it shows no blocks")  # type: ignore[misc]
                    assert faulty.command("sleep", one, level=level) == 1, "it is asleep already"
                    assert faulty.command("wake", one) == 0
                    faulty.services.wait_ready(*WORKERS)
                    assert faulty.command("clear", one) == 0
        finally:
            over.set()
        assert all(each == text for one in streams for each in one.result(LIMIT_S))
    assert faulty.moved > 0
    for number in range(40):  # more blocks than both engines have, so that blocks are evicted
        faulty.ask(tokens=1, prompt=[5 + (index * 3 + number * 13) % 250 for index in range(160)])
    faulty.agree()
