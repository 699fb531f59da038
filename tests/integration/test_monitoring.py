"""The boards and alerts at a real Prometheus, which finds a real stack over /sd, under load and with faults.

Each query of each board must return series: under load, or after the fault that its panel names. Alerts are silent
before the faults, and fire after theirs. Their times are those that are shipped, divided by TIMES.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from deploy.monitoring.boards import BOARDS
from tests.integration.fleet import Fleet, Service, fleet
from tests.integration.stack import ROOT, eventually
from tests.monitoring.prometheus import ALERTS, PROMETHEUS, Prometheus, prometheus, quickened, shown
from tests.servers import EtcdServer, etcd_server, free_port, nats_server
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="Prometheus is not installed")
LIMIT_S = 240.0
TIMES = 120
"""The alerts' times are divided by this."""
QUIET_S = 30.0
"""An hour for the alerts."""
KEY = "a-key-of-this-test"
WORKERS = ("first", "second")
NATS = "max_pending: 16MB\nhttp: 127.0.0.1:{port}\n"
NO_FSYNC = "Time to disk, p99"
"""The panel that is dark because etcd does not wait for its disk in tests."""
UNLIT = {
    NO_FSYNC,
    "Troubles of the policy",  # tests/router/ has policies that raise
    "Memory of the GPU",  # tests/gpu/ has the engine's report
    "Probes of idle engines",  # tests/integration/test_vllm_faults.py
    "Blocks lost on disk",  # tests/kvbm/ and tests/chaos/ damage disks
}
"""Panels that nothing here lights, and what does."""


class Load:
    """Clients that ask for completions without a pause, and bear failures."""

    def __init__(self, url: str, clients: int = 4) -> None:
        self._url = url
        self._stopped = threading.Event()
        self.answered = 0
        self.failed: list[str] = []
        self._threads = [threading.Thread(target=self._ask_all, args=(number,)) for number in range(clients)]
        for each in self._threads:
            each.start()

    def _ask_all(self, number: int) -> None:
        draw = random.Random(number)
        while not self._stopped.is_set():
            # Some prompts come again, after their blocks have left the device.
            words = " ".join([f"w{draw.randrange(24)}"] * 150)
            try:
                ask(self._url, words)
                self.answered += 1
            except OSError as wrong:
                self.failed.append(str(wrong))
                self._stopped.wait(0.1)

    def stop(self) -> None:
        self._stopped.set()
        for each in self._threads:
            each.join(LIMIT_S)


def ask(url: str, prompt: str, key: str = KEY, timeout_s: float = 60.0) -> None:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "stream": True, "ignore_eos": True}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        answer.read()


class Watched:
    """The stack, its Prometheus and its load."""

    def __init__(
        self, folder: Path, services: Fleet, etcd: EtcdServer, nats: int, seen: Prometheus, keys: Path
    ) -> None:
        self.folder, self.services, self.etcd, self.nats, self.seen, self.keys = (
            folder,
            services,
            etcd,
            nats,
            seen,
            keys,
        )
        self.load = Load(self.frontend.url)
        self.lit: set[str] = set()
        self.fired: set[str] = set()

    @property
    def frontend(self) -> Service:
        return self.services.services["frontend"]

    def process(self, name: str) -> subprocess.Popen[Any]:
        return self.services.services[name].process

    def until_fires(self, alert: str) -> None:
        def seen() -> bool:
            self.look()
            return alert in self.fired

        eventually(seen, limit_s=LIMIT_S, what=f"{alert} fires; fired: {self.fired}")

    def until_lit(self, titles: set[str]) -> None:
        def seen() -> bool:
            self.look()
            return titles <= self.lit

        try:
            eventually(seen, limit_s=LIMIT_S, what="panels show something")
        except AssertionError:
            raise AssertionError(f"not within {LIMIT_S} s: {titles - self.lit} show something") from None

    def look(self) -> None:
        """Note which panels show something now, and which alerts fire."""
        self.fired |= self.seen.firing()
        for board in BOARDS:
            for panel in board.panels:
                if panel.title not in self.lit and all(self.seen.series(shown(query.expr)) for query in panel.queries):
                    self.lit.add(panel.title)

    def dark(self, *, lit_by_faults: bool) -> set[str]:
        panels = [panel for board in BOARDS for panel in board.panels if lit_by_faults or not panel.lit_by]
        return {panel.title for panel in panels} - self.lit - ({NO_FSYNC} if not lit_by_faults else set())


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("monitoring")
    model = write_tiny_model(folder / "tiny", context_length=1024)
    keys = folder / "keys.toml"
    keys.write_text(f'alice = {{ sha256 = "{hashlib.sha256(KEY.encode()).hexdigest()}" }}\n')
    monitor = free_port()
    with (
        nats_server(folder, NATS.format(port=monitor)) as nats,
        etcd_server(folder) as etcd,
        fleet(folder, nats.url, "--discovery-endpoints", etcd.endpoint, "--discovery-lease-ttl-s", "3") as services,
    ):
        services.start("router", "router", "--source-digest-s", "5")
        kvbm = ("--pool-directory", str(folder / "pool"), "--pool-size-bytes", str(2 << 20))
        disk = ("--disk-directory", str(folder / "disk"), "--disk-limit-bytes", str(64 << 20))
        often = ("--disk-min-free-bytes", "0", "--disk-segment-bytes", str(4 << 20), "--tiers-disk-sightings", "1")
        services.start("kvbm", "kvbm", *kvbm, *disk, *often)
        for name in WORKERS:
            start_worker(services, folder, model, name)
        bounds = ("--limits-requests", "6", "--limits-rescue-s", "3")
        services.start("frontend", "frontend", "--access-keys-file", str(keys), *bounds)
        services.wait_ready()
        address = f"127.0.0.1:{free_port()}"
        program = [sys.executable, str(ROOT / "deploy/compose/nats_metrics.py"), f"http://127.0.0.1:{monitor}", address]
        exporter = subprocess.Popen(program)
        jobs: list[dict[str, Any]] = [
            {
                "job_name": "headrace",
                "http_sd_configs": [{"url": f"{services.services['router'].url}/sd", "refresh_interval": "1s"}],
                "honor_labels": True,
            },
            {"job_name": "nats", "static_configs": [{"targets": [address]}]},
            {"job_name": "etcd", "static_configs": [{"targets": [etcd.endpoint]}]},
        ]
        try:
            with prometheus(folder / "prometheus", jobs, quickened(ALERTS.read_text(), TIMES)) as seen:
                one = Watched(folder, services, etcd, nats.port, seen, keys)
                try:
                    yield one
                finally:
                    one.load.stop()
        finally:
            exporter.kill()
            exporter.wait()


def start_worker(services: Fleet, folder: Path, model: Path, name: str) -> None:
    own = (
        "--model",
        str(model),
        "--model-name",
        "tiny",
        "--threads",
        "1",
        "--capacity-blocks",
        "400",
        "--stall-s",
        "120",
    )
    services.start("worker", name, *own, "--kvbm-pool", str(folder / "pool"), "--kvbm-wait-s", "20")


def test_every_instance_is_found_and_no_alert_fires_in_an_hour_of_load(watched: Watched) -> None:
    eventually(lambda: len(watched.seen.healthy()) == 7, limit_s=LIMIT_S, what="five processes, NATS and etcd answer")
    until_s = time.monotonic() + QUIET_S
    while time.monotonic() < until_s:
        watched.look()
        time.sleep(1)
    assert watched.load.answered > 10
    assert not watched.load.failed, watched.load.failed[:3]
    assert not watched.fired
    watched.until_lit(watched.dark(lit_by_faults=False))


def test_an_engine_that_is_killed_and_one_that_stands_still(watched: Watched) -> None:
    kill_engine(watched, "first")
    watched.until_fires("HeadraceEngineRestarts")
    os.kill(engine(watched, "second"), signal.SIGSTOP)
    watched.until_fires("HeadraceWorkerStandsStill")
    kill_engine(watched, "second")


@pytest.mark.parametrize(
    ("alert", "still_s", "works_s"), [("HeadraceFirstTokenLate", 3.5, 0.1), ("HeadraceTokensSlow", 0.4, 0.01)]
)
def test_engines_that_compute_only_now_and_then(watched: Watched, alert: str, still_s: float, works_s: float) -> None:
    engines = [engine(watched, name) for name in WORKERS]
    ended = threading.Event()

    def stutter() -> None:
        while not ended.wait(works_s):
            for each in engines:
                os.kill(each, signal.SIGSTOP)
            ended.wait(still_s)
            for each in engines:
                os.kill(each, signal.SIGCONT)

    thread = threading.Thread(target=stutter)
    thread.start()
    try:
        watched.until_fires(alert)
    finally:
        ended.set()
        thread.join()


def test_more_requests_than_the_frontend_takes(watched: Watched) -> None:
    def refused(number: int) -> int:
        try:
            ask(watched.frontend.url, f"{number} more")
        except urllib.error.HTTPError as wrong:
            return wrong.code
        return 200

    def seen() -> bool:
        with ThreadPoolExecutor(16) as pool:
            codes = list(pool.map(refused, range(32)))
        watched.look()
        return 429 in codes and "Refused at a limit" in watched.lit

    eventually(seen, limit_s=LIMIT_S, what="requests are refused")


def test_a_keys_file_that_cannot_be_read(watched: Watched) -> None:
    keys = watched.keys.read_text()
    watched.keys.write_text("broken")
    watched.until_fires("HeadraceFileStale")
    watched.keys.write_text(keys)


def test_a_block_store_that_is_gone(watched: Watched) -> None:
    watched.until_lit({"Evictions", "Disk traffic"})
    watched.process("kvbm").kill()
    watched.until_fires("HeadraceStoreMissing")


def test_a_connection_that_does_not_read(watched: Watched) -> None:
    def connection(command: bytes) -> socket.socket:
        opened = socket.create_connection(("127.0.0.1", watched.nats))
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        opened.sendall(b'CONNECT {"verbose":false}\r\n' + command)
        return opened

    with connection(b"SUB flood 1\r\nPING\r\n") as reader, connection(b"PING\r\n") as writer:
        assert reader.recv(16)
        message = b"PUB flood 1000000\r\n" + b"x" * 1_000_000 + b"\r\n"
        for _ in range(64):  # more than the kernel's buffers and the server hold
            writer.sendall(message)
        watched.until_fires("HeadraceNatsSlowConsumer")


def test_an_etcd_that_does_not_answer_and_a_process_that_stood_still(watched: Watched) -> None:
    watched.etcd.freeze()
    watched.until_fires("HeadraceDiscoveryFails")
    watched.etcd.thaw()
    watched.process("first").send_signal(signal.SIGSTOP)
    watched.until_fires("HeadraceTargetDown")
    time.sleep(6)  # twice the lease's time
    watched.process("first").send_signal(signal.SIGCONT)
    watched.until_fires("HeadraceLeasesLost")


def test_no_worker_and_no_router(watched: Watched) -> None:
    for name in WORKERS:
        watched.process(name).kill()
    watched.until_fires("HeadraceNoWorker")
    watched.until_fires("HeadraceRequestsFailing")
    watched.process("router").kill()
    watched.until_fires("HeadraceNoRouter")


def test_every_panel_was_lit_but_those_that_are_listed(watched: Watched) -> None:
    assert watched.dark(lit_by_faults=True) == UNLIT
    panels = [panel for board in BOARDS for panel in board.panels]
    assert {panel.title for panel in panels if not panel.lit_by} & UNLIT == {NO_FSYNC}


def kill_engine(watched: Watched, worker: str) -> None:
    """And wait for the next one."""
    starts = watched.services.services[worker].metric("headrace_engine_starts_total")
    os.kill(engine(watched, worker), signal.SIGKILL)
    eventually(
        lambda: watched.services.services[worker].metric("headrace_engine_starts_total") > starts,
        limit_s=LIMIT_S,
        what=f"{worker} has another engine",
    )


def engine(watched: Watched, worker: str) -> int:
    """The process of a worker's engine."""
    shell = watched.process(worker).pid
    found = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
    return int(found[-1])
