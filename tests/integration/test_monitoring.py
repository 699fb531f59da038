"""The boards and alerts at a real Prometheus, which finds a real stack over /sd, under load and with faults.

Each query of each board must return series: under load, or after the fault that its panel names. Alerts are silent
before the faults, and each fires after its own. Their times are those that are shipped, divided by TIMES. Faults that
leave one another alone happen at once, since most of the time of this test is the alerts' own.

    first, second    workers of the model tiny, with the load, on a block store that has a disk
    third            the worker of the model other, on a block store that is too small

The second names a GPU, whose driver is a test's own.
"""

from __future__ import annotations

import base64
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
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from deploy.monitoring.boards import BOARDS, NVML
from services.worker.reports.nvml import THROTTLES
from tests.integration.fleet import Fleet, Service, fleet
from tests.integration.stack import ROOT, eventually
from tests.monitoring.prometheus import ALERTS, PROMETHEUS, SCRAPE_S, Prometheus, prometheus, quickened, shown
from tests.nvml.driver import MISSING, NUMBERS, Driver
from tests.process_tree import children
from tests.servers import EtcdServer, etcd_server, free_port, nats_server
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="Prometheus is not installed")
LIMIT_S = 240.0
TIMES = 240
"""The alerts' times are divided by this."""
QUIET_S = 3600 / TIMES
"""An hour for the alerts."""
KEY = "a-key-of-this-test"
WORKERS = ("first", "second")
SLOWLY = 100
"""1 of this number of requests fails: more than 0.6 %, the slow alert's bound, less than 1.44 %, the fast one's."""
NATS = "max_pending: 16MB\nhttp: 127.0.0.1:{port}\n"
NO_FSYNC = "Time to disk, p99"
"""The panel that is dark because etcd does not wait for its disk in tests."""
UNLIT = {
    NO_FSYNC,
    "Troubles of the policy",  # tests/router/ has policies that raise
    "Memory of the GPU",  # tests/gpu/ has the engine's report
    *[panel.title for board in BOARDS for panel in board.panels if MISSING and panel.lit_by in (NVML, "an Xid error")],
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
            except urllib.error.HTTPError as wrong:
                self.failed.append(f"{wrong}: {wrong.read().decode()}")
                self._stopped.wait(0.1)
            except OSError as wrong:
                self.failed.append(str(wrong))
                self._stopped.wait(0.1)

    def stop(self) -> None:
        self._stopped.set()
        for each in self._threads:
            each.join(LIMIT_S)


def ask(url: str, prompt: str, *, model: str = "tiny", tokens: int = 24, deadline_s: float = 600.0) -> None:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
        "deadline_s": deadline_s,
    }
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        answer.read()


@contextmanager
def again_and_again(call: Callable[[int], None]) -> Iterator[None]:
    """Call it with 0, 1, 2, … in a thread until the end; raise what it raises."""
    ended = threading.Event()

    def call_all() -> None:
        number = 0
        while not ended.is_set():
            call(number)
            number += 1

    with ThreadPoolExecutor(1) as pool:
        calls = pool.submit(call_all)
        try:
            yield
        finally:
            ended.set()
    calls.result()


class Watched:
    """The stack, its Prometheus and its load."""

    def __init__(
        self,
        folder: Path,
        services: Fleet,
        etcd: EtcdServer,
        nats: int,
        seen: Prometheus,
        keys: Path,
        driver: Driver | None,
    ) -> None:
        self.folder, self.services, self.etcd, self.nats, self.seen, self.keys = (
            folder,
            services,
            etcd,
            nats,
            seen,
            keys,
        )
        self.driver = driver
        self.load = Load(self.frontend.url)
        self.lit: set[str] = set()
        self._looked_s = 0.0

    @property
    def frontend(self) -> Service:
        return self.services.services["frontend"]

    def process(self, name: str) -> subprocess.Popen[Any]:
        return self.services.services[name].process

    def address_book(self) -> bytes:
        """What etcd has, as it is now."""
        every = base64.b64encode(b"\0").decode()
        body = json.dumps({"key": every, "range_end": every}).encode()
        with urllib.request.urlopen(f"http://{self.etcd.endpoint}/v3/kv/range", body, timeout=LIMIT_S) as answer:
            return b"\n".join(base64.b64decode(entry["value"]) for entry in json.load(answer).get("kvs", []))

    @contextmanager
    def fires(self, alerts: Mapping[str, Mapping[str, str]]) -> Iterator[None]:
        """These alerts, each with the labels, come to rest before the faults that the block makes, and fire after
        them. Some fire for a few seconds only, in which a slow machine may not look."""

        def rest() -> bool:
            return _missing(alerts, self.seen.firing()) == alerts.keys()

        eventually(rest, limit_s=LIMIT_S, what=f"none of {alerts} fires")
        rested_s = time.monotonic()
        yield
        missing = set(alerts)

        def seen() -> bool:
            nonlocal missing
            self.look()
            missing = _missing(alerts, self.seen.fired(time.monotonic() - rested_s))
            return not missing

        try:
            eventually(seen, limit_s=LIMIT_S, what="alerts fire")
        except AssertionError:
            raise AssertionError(f"not within {LIMIT_S} s: {missing} fire; now {self.seen.firing()}") from None

    def until_lit(self, titles: set[str]) -> None:
        def seen() -> bool:
            self.look()
            return titles <= self.lit

        try:
            eventually(seen, limit_s=LIMIT_S, what="panels show something")
        except AssertionError:
            raise AssertionError(f"not within {LIMIT_S} s: {titles - self.lit} show something") from None

    def look(self) -> None:
        """Note which panels show something now, once per scrape."""
        if time.monotonic() < self._looked_s + SCRAPE_S:
            return
        self._looked_s = time.monotonic()
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
        fleet(folder, nats.url, "--discovery-endpoints", etcd.endpoint) as services,
    ):
        services.start("router", "router", "--source-digest-s", "5")
        kvbm = ("--pool-directory", str(folder / "pool"), "--pool-size-bytes", str(2 << 20))
        disk = ("--disk-directory", str(folder / "disk"), "--disk-limit-bytes", str(64 << 20), "--disk-retry-s", "1")
        often = ("--disk-min-free-bytes", "0", "--disk-segment-bytes", str(4 << 20), "--tiers-disk-sightings", "1")
        services.start("kvbm", "kvbm", *kvbm, *disk, *often)
        small = ("--pool-directory", str(folder / "small"), "--pool-size-bytes", str(128 << 10))
        services.start("kvbm", "small", *small)
        driver = None if MISSING else Driver(folder / "nvml")
        start_worker(services, "first", model, "tiny", folder / "pool")
        on_gpu: dict[str, Any] = {"module": "tests.nvml.gpu_worker", "more": driver.environment} if driver else {}
        start_worker(services, "second", model, "tiny", folder / "pool", **on_gpu)
        forgetful: dict[str, Any] = {"module": "tests.integration.forgetful_worker"}
        start_worker(services, "third", model, "other", folder / "small", "--health-idle-s", "2", **forgetful)
        bounds = ("--limits-requests", "7", "--limits-rescue-s", "3")
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
                one = Watched(folder, services, etcd, nats.port, seen, keys, driver)
                try:
                    yield one
                finally:
                    one.load.stop()
        finally:
            exporter.kill()
            exporter.wait()


def start_worker(
    services: Fleet,
    name: str,
    model: Path,
    model_name: str,
    pool: Path,
    *flags: str,
    module: str = "",
    more: Mapping[str, str] | None = None,
) -> None:
    own = ("--model", str(model), "--model-name", model_name, "--threads", "1", "--capacity-blocks", "400")
    # A stopped engine must outlive the wait for its alerts; one that stalls may be killed after half of stall_s.
    bounds = ("--stall-s", str(4 * LIMIT_S), "--health-limit-s", str(4 * LIMIT_S), "--kvbm-wait-s", "20")
    services.start("worker", name, *own, *bounds, *flags, "--kvbm-pool", str(pool), module=module, more=more)


def test_every_instance_is_found_and_no_alert_fires_in_an_hour_of_load(watched: Watched) -> None:
    eventually(lambda: len(watched.seen.healthy()) == 9, limit_s=LIMIT_S, what="seven processes, NATS and etcd answer")
    fired: list[dict[str, str]] = []
    # On a machine that stands still for seconds, leases end and requests fail: such a time is not without faults.
    begun_s, failed = time.monotonic(), len(watched.load.failed)
    give_up_s = begun_s + LIMIT_S
    while time.monotonic() < begun_s + QUIET_S:
        watched.look()
        fired += watched.seen.firing()
        if len(watched.load.failed) > failed or (failed and fired):  # an alert may come after the failures
            assert time.monotonic() < give_up_s, watched.load.failed[-3:]
            begun_s, failed = time.monotonic(), len(watched.load.failed)
            fired.clear()
        time.sleep(0.5)
    assert watched.load.answered > 10
    assert not fired
    watched.until_lit(watched.dark(lit_by_faults=False))


def test_faults_that_clients_of_the_model_tiny_do_not_notice(watched: Watched) -> None:
    def ask_other(number: int) -> None:
        # Each prompt is another one, so its blocks are new, and more than the small store has.
        prompt = f"{number} " + " ".join(["more"] * 80)
        if number % SLOWLY:
            with suppress(urllib.error.HTTPError):  # the lease of the only worker may end on a slow machine
                ask(watched.frontend.url, prompt, model="other", tokens=1)
            return
        with pytest.raises(urllib.error.HTTPError, match="504"):
            ask(watched.frontend.url, prompt, model="other", deadline_s=0.0001)

    watched.until_lit({"Evictions", "Disk traffic"})
    keys = watched.keys.read_text()
    alerts = {
        "HeadraceRequestsFailingSlowly": {"model": "other"},
        "HeadraceStoreFull": {},
        "HeadraceIndexDiffers": {},
        "HeadraceEngineRestarts": {"model": "tiny"},
        "HeadraceFileStale": {},
        "HeadraceNatsSlowConsumer": {},
        "HeadraceDiskErrors": {},
    }
    with again_and_again(ask_other), watched.fires(alerts):
        watched.process("third").send_signal(signal.SIGUSR1)
        watched.keys.write_text("broken")
        for segment in (watched.folder / "disk").rglob("segment-*"):
            damage(segment)
        kill_engine(watched, "first")
        not_read(watched.nats)
    watched.keys.write_text(keys)
    watched.until_lit({"Blocks lost on disk"})


def test_a_gpu_that_is_hot_slow_and_reports_errors(watched: Watched) -> None:
    if watched.driver is None:
        pytest.skip(MISSING)
    watched.until_lit({panel.title for board in BOARDS for panel in board.panels if panel.lit_by == NVML})
    alerts = {
        "HeadraceGpuHot": {"model": "tiny", "gpu": "0", "uuid": "GPU-0"},
        "HeadraceGpuThrottled": {"model": "tiny", "gpu": "0", "reason": "thermal"},
        "HeadraceGpuErrors": {"model": "tiny", "gpu": "0", "xid": "94"},
    }
    with watched.fires(alerts):
        watched.driver.set(0, temperature=85, margin=2, throttled=THROTTLES["thermal"])
        watched.driver.report_xid(0, 94)
    watched.until_lit({"Errors of the GPU"})
    watched.driver.set(0, **NUMBERS)


def test_engines_that_stop_and_a_disk_that_is_gone(watched: Watched) -> None:
    """The engines of tiny compute only now and then, the engine of other not at all."""

    def ask_stopped(number: int) -> None:
        # The frontend gives up a request whose only engine stands for long, and the alerts may take longer than that.
        with suppress(urllib.error.HTTPError):
            ask(watched.frontend.url, f"{number} stands", model="other")

    disk, away = watched.folder / "disk", watched.folder / "away"
    other = engine(watched, "third")
    alerts = {
        "HeadraceFirstTokenLate": {"model": "tiny"},
        "HeadraceTokensSlow": {"model": "tiny"},
        "HeadraceWorkerStandsStill": {"model": "other"},
        "HeadraceDiskOff": {},
    }
    with (
        again_and_again(ask_stopped),
        stuttering([engine(watched, name) for name in WORKERS], still_s=3.5, works_s=0.01),
    ):
        try:
            with watched.fires(alerts):
                os.kill(other, signal.SIGSTOP)
                disk.rename(away)
                disk.write_text("no directory")
        finally:
            with suppress(ProcessLookupError):  # what failed before is to be seen
                os.kill(other, signal.SIGCONT)
    disk.unlink()
    away.rename(disk)


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


def test_an_etcd_that_does_not_answer_and_a_process_that_stood_still(watched: Watched) -> None:
    first = watched.services.services["first"]
    target = first.url.removeprefix("http://").encode()
    assert target in watched.address_book()
    entries = [json.loads(value) for value in watched.address_book().split(b"\n") if target in value]
    instance = next(entry["instance"] for entry in entries if "pid" in entry)
    counter = f'headrace_leases_lost_total{{instance="{instance}"}}'
    eventually(lambda: bool(watched.seen.series(counter)), limit_s=LIMIT_S, what="Prometheus knows the first")
    with watched.fires({"HeadraceLeasesLost": {"service": "worker", "instance": instance}}):
        with watched.fires({"HeadraceDiscoveryFails": {}, "HeadraceTargetDown": {"service": "worker"}}):
            watched.etcd.freeze()
            first.process.send_signal(signal.SIGSTOP)
        watched.etcd.thaw()
        eventually(
            lambda: target not in watched.address_book(), limit_s=LIMIT_S, what="the lease of the first has ended"
        )
        first.process.send_signal(signal.SIGCONT)


def test_a_worker_that_uses_another_discovery(watched: Watched) -> None:
    elsewhere = ("--discovery-backend", "file", "--discovery-path", str(watched.folder / "elsewhere"))
    with watched.fires({"HeadraceWorkersLeftOut": {"reason": "unregistered"}}):
        start_worker(watched.services, "stray", watched.folder / "tiny", "tiny", watched.folder / "pool", *elsewhere)
    watched.process("stray").kill()


def test_no_worker_no_block_store_and_no_router(watched: Watched) -> None:
    third = watched.services.services["third"]
    eventually(lambda: third.metric("headrace_kvbm_attached") == 1, limit_s=LIMIT_S, what="third has its store")
    alerts = {
        "HeadraceNoWorker": {"model": "tiny"},
        "HeadraceRequestsFailing": {"model": "tiny"},
        "HeadraceStoreMissing": {"model": "other"},
    }
    with watched.fires(alerts):
        for name in (*WORKERS, "small"):
            watched.process(name).kill()
    with watched.fires({"HeadraceNoRouter": {}}):
        watched.process("router").kill()


def test_every_panel_was_lit_but_those_that_are_listed(watched: Watched) -> None:
    assert watched.dark(lit_by_faults=True) == UNLIT
    panels = [panel for board in BOARDS for panel in board.panels]
    assert {panel.title for panel in panels if not panel.lit_by} & UNLIT == {NO_FSYNC}


def _missing(alerts: Mapping[str, Mapping[str, str]], fired: list[dict[str, str]]) -> set[str]:
    """Those that are not among the labels of these."""
    return {
        alert
        for alert, labels in alerts.items()
        if not any({"alertname": alert, **labels}.items() <= one.items() for one in fired)
    }


@contextmanager
def stuttering(engines: list[int], *, still_s: float, works_s: float) -> Iterator[None]:
    """These processes run for `works_s` only, and stand still for `still_s` in between."""
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
        yield
    finally:
        ended.set()
        thread.join()


def damage(file: Path) -> None:
    """Overwrite it, as long as it is."""
    with file.open("r+b") as opened:
        opened.write(random.Random(1).randbytes(file.stat().st_size))
        os.fsync(opened.fileno())


def not_read(nats: int) -> None:
    """Send more to a connection that does not read than the kernel's buffers and the server hold."""

    def connection(command: bytes) -> socket.socket:
        opened = socket.create_connection(("127.0.0.1", nats))
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        opened.sendall(b'CONNECT {"verbose":false}\r\n' + command)
        return opened

    with connection(b"SUB flood 1\r\nPING\r\n") as reader, connection(b"PING\r\nSUB end 1\r\n") as writer:
        assert reader.recv(16)
        message = b"PUB flood 1000000\r\n" + b"x" * 1_000_000 + b"\r\n"
        for _ in range(64):
            writer.sendall(message)
        writer.sendall(b"PUB end 0\r\n\r\n")
        received = b""
        while b"MSG end" not in received:  # the server has read all of it
            received += writer.recv(4096)


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
    return children(watched.process(worker).pid)[-1]
