"""Scrapes in the middle of a restart: each gets the whole page of one process, or no answer."""

from __future__ import annotations

import http.client
import json
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shared.messages.cards import ServiceName
from tests.integration.fleet import Fleet, Service, fleet
from tests.integration.stack import eventually
from tests.servers import free_port
from tests.tiny_model import write_tiny_model

LIMIT_S = 180.0
SMALL = ("--pool-size-bytes", str(2 << 20))
SERVICES: tuple[ServiceName, ...] = ("frontend", "router", "worker", "kvbm")


class Scrapes:
    """What scrapes of one address brought, and the processes that answered."""

    def __init__(self, without_targets: Collection[int]) -> None:
        """`without_targets` are the statuses of /sd while it has no targets."""
        self._without_targets = without_targets
        self.instances: list[str] = []
        """Instances of each page, in order, without repetitions in a row."""
        self.targets = 0
        """Answers of /sd that have targets."""
        self.unanswered = 0
        self.wrong: list[str] = []
        """What is neither a whole page nor no answer."""

    def take(self, url: str) -> None:
        """Scrape once, and ask for the targets once."""
        try:
            with urllib.request.urlopen(f"{url}/metrics", timeout=LIMIT_S) as answer:
                self._take_page(answer.read().decode())
            with urllib.request.urlopen(f"{url}/sd", timeout=LIMIT_S) as answer:
                self.targets += bool(json.load(answer))
        except urllib.error.HTTPError as wrong:
            if wrong.code not in self._without_targets or wrong.url != f"{url}/sd":
                self.wrong.append(f"{wrong.url}: {wrong.code}")
        except (OSError, http.client.HTTPException):
            self.unanswered += 1
        except ValueError as wrong:
            self.wrong.append(f"{url}: {wrong}")

    def _take_page(self, page: str) -> None:
        samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
        named = {sample.labels.get("instance", "") for sample in samples}
        if len(named) != 1:  # a process that has just begun shows its memory and processor time alone
            self.wrong.append(f"a page of {named} with {len(samples)} samples")
        elif self.instances[-1:] != [*named]:
            self.instances += named


@contextmanager
def scraping(url: str, without_targets: Collection[int]) -> Iterator[Scrapes]:
    """Scrape without a pause."""
    ended, seen = threading.Event(), Scrapes(without_targets)

    def run() -> None:
        while not ended.is_set():
            seen.take(url)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
@pytest.mark.parametrize("service", SERVICES)
def test_a_scrape_in_the_middle_of_a_restart_gets_a_whole_page_or_none(
    service: ServiceName, number: signal.Signals, tmp_path: Path, nats_url: str
) -> None:
    where = ("--namespace", f"scrape-{service}-{number.name}", "--discovery-backend", "file")
    with fleet(tmp_path, nats_url, *where, "--discovery-path", str(tmp_path / "where")) as one:
        port = str(free_port())

        def start() -> Service:
            flags = {
                "frontend": ("--observe-port", port),
                "router": ("--observe-port", port),
                "worker": ("--observe-port", port, "--engine", "simulated", "--model", str(tmp_path / "tiny")),
                "kvbm": ("--observe-port", port, "--pool-directory", str(tmp_path / "pool"), *SMALL),
            }
            return one.start(service, service, *flags[service])

        if service == "worker":
            write_tiny_model(tmp_path / "tiny")
        # A worker follows no others, so it never has targets.
        with scraping(f"http://127.0.0.1:{port}", (503, 404) if service == "worker" else (503,)) as seen:
            first = start()
            answered_by(one, service, seen, count=1)
            first.process.send_signal(number)
            first.process.wait(LIMIT_S)
            start()
            answered_by(one, service, seen, count=2)
            if service != "worker":
                eventually(lambda: seen.targets, limit_s=LIMIT_S, what="there are targets")
    assert not seen.wrong, seen.wrong[:3]
    assert seen.unanswered


def answered_by(one: Fleet, service: str, seen: Scrapes, count: int) -> None:
    """Wait until `count` processes have answered, and no others."""

    def answered() -> bool:
        process = one.services[service].process
        assert process.poll() is None, one.services[service].log.read_text()[-4000:]
        return len(seen.instances) >= count

    eventually(answered, limit_s=LIMIT_S, what=f"{count} processes have answered")
    assert len(seen.instances) == len(set(seen.instances)) == count, seen.instances
