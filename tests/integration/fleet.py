"""Services as processes of their own on one NATS and one discovery: started, asked, and ended one by one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import nats

from shared import subjects
from shared.messages.cards import ServiceName
from tests.integration.stack import ROOT, eventually
from tests.last_release import modules_of
from tests.process_tree import children

READY_LIMIT_S = 300.0
STOP_LIMIT_S = 300.0
ANSWER_LIMIT_S = 300.0
_LISTENS = re.compile(r"listening on (http://[^\s\"]+)")


class Service:
    """One process."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, more: Mapping[str, str] | None = None, folder: Path = ROOT
    ) -> None:
        self.name = name
        self.log = log
        self.url = ""
        """URL of its /health and /metrics, and of a frontend's API; set once it listens."""
        self._url_file = log.with_suffix(".url")
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
        environment |= more or {}
        with log.open("ab") as out:
            self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out)

    def ready(self) -> bool:
        """Whether requests would be served."""
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        if not self.url:
            listens = _LISTENS.search(self.log.read_text())
            if listens is not None:
                self.url = listens[1]
            elif self._url_file.exists():
                self.url = self._url_file.read_text().strip()
            if not self.url:
                return False
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=60) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def metric(self, name: str, **labels: str) -> float:
        """The sum over all that have these labels."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        mine = [line for line in lines if line.partition("{")[0] == name and all(each in line for each in wanted)]
        return sum(float(line.rpartition(" ")[2]) for line in mine)

    def stop(self) -> tuple[int, float]:
        """SIGTERM; the exit status, and how long it took."""
        began_s = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_LIMIT_S), time.monotonic() - began_s

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Fleet:
    """All of them. `where` are the flags that name the discovery."""

    def __init__(self, folder: Path, nats_url: str, where: Sequence[str]) -> None:
        self.services: dict[str, Service] = {}
        self._folder = folder
        self._common = ("--nats-url", nats_url, *where)
        self._started = 0

    def start(
        self,
        service: ServiceName,
        name: str,
        *flags: str,
        module: str = "",
        more: Mapping[str, str] | None = None,
        through: Sequence[str] = (),
        tree: Path | None = None,
    ) -> Service:
        """Returns at once; `ready` says when it serves. `module`: of a service's program that is a test's own. `more`
        is added to its environment. `through` is a command that runs another one. `tree` has the modules, if they are
        not this tree's."""
        self._started += 1
        log = self._folder / f"{name}.{self._started}.log"
        # On a slow machine a worker may be predicted to be late; only a test of that limit wants a refusal.
        patient = ("--http-port", "0", "--limits-wait-s", "0")
        where = patient if service == "frontend" else ("--observe-url-file", str(log.with_suffix(".url")))
        command = [*through, sys.executable, "-m", module or f"services.{service}", *self._common, *where, *flags]
        if tree is not None:
            more = {**(more or {}), **modules_of(tree)}
        self.services[name] = Service(name, command, log, more, tree or ROOT)
        return self.services[name]

    def wait_idle(self, *names: str) -> None:
        """Until those of these workers that live show nothing that runs: they show it late."""
        workers = [one for name in names if (one := self.services[name]).process.poll() is None]
        eventually(
            lambda: not any(one.metric("headrace_inflight_requests") for one in workers),
            limit_s=READY_LIMIT_S,
            what="the workers are idle",
        )

    @contextlib.contextmanager
    def busiest(self, *names: str) -> Iterator[Service]:
        """Yield the one of these workers, of those that live, that runs most. Their engines stand still meanwhile, so
        that no answer ends before it is known whose it is."""
        workers = [one for name in names if (one := self.services[name]).process.poll() is None]
        engines = [engine for one in workers for engine in children(one.process.pid)]

        def running() -> Service | None:
            loads = [one.metric("headrace_inflight_requests") for one in workers]
            return workers[loads.index(max(loads))] if any(loads) else None

        _send(engines, signal.SIGSTOP)
        try:
            yield eventually(running, limit_s=READY_LIMIT_S, what="a worker runs a request")
        finally:
            _send(engines, signal.SIGCONT)

    def wait_ready(self, *names: str, limit_s: float = READY_LIMIT_S) -> None:
        """All of those named, or all there are."""
        for name in names or self.services:
            service = self.services[name]
            try:
                eventually(service.ready, limit_s=limit_s, what=f"{name} is ready")
            except AssertionError as wrong:
                raise AssertionError(f"{wrong}\n{service.log.read_text()[-4000:]}") from None


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def explained(nats_url: str, namespace: str, request: str) -> dict[str, Any]:
    """Return the latest decision of the router of the model tiny on a request."""

    async def ask() -> dict[str, Any]:
        client = await nats.connect(nats_url)
        try:
            reply = await client.request(subjects.explain(namespace, "tiny"), request.encode(), timeout=ANSWER_LIMIT_S)
        finally:
            await client.close()
        decision: dict[str, Any] = json.loads(reply.data)["decisions"][-1]
        return decision

    return asyncio.run(ask())


@contextlib.contextmanager
def fleet(folder: Path, nats_url: str, *where: str) -> Iterator[Fleet]:
    """Empty at first; none of its processes outlives it."""
    one = Fleet(folder, nats_url, where)
    try:
        yield one
    finally:
        for service in one.services.values():
            service.kill()
