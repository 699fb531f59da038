"""`headrace up --on ray`: has Ray run the programs until Ctrl-C. watch.py decides; this module acts."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import time
from collections.abc import Mapping
from typing import assert_never

from msgspec.structs import replace

from deploy.local.ray.cluster import ActorLost, ActorSilent, Cluster
from deploy.local.ray.order import Order
from deploy.local.ray.plan import Fleet, lacking, paths_needed, plan
from deploy.local.ray.watch import (
    ActorReport,
    AddOrder,
    Create,
    Drain,
    Drained,
    Event,
    Lost,
    Notice,
    Reported,
    SayReady,
    Silent,
    Watch,
)
from deploy.local.stack.announce import health, say_ready, state_flag
from deploy.local.stack.scale import ScaledWorkers
from deploy.local.stack.stack import Launch, UpOptions
from deploy.local.stack.supervise import AllEnded, Kill, Program, Remove, Stop, Tick
from deploy.local.stack.up import prepare
from deploy.local.state import StateDirectory
from deploy.local.terminal import Terminal
from shared.errors import ConfigError
from shared.installation import COMMAND

ASK_EVERY_S = 0.5
ANSWER_LIMIT_S = 3.0
"""Seconds that actors have to answer, before they count as silent."""

LOGS = "Ray's: worker-*.out of each node (docs/ray.md)"


def up_on_ray(options: UpOptions, cluster: Cluster, state_dir: StateDirectory, terminal: Terminal) -> int:
    """Run until stopped. Return 0 after a drain, 1 if a program could not work. Call it within `exclusive`. Raise
    ConfigError if the cluster cannot run it."""
    head = cluster.check_nodes(paths_needed(options), options.port)
    fleet = plan(options, head, state_dir, name=secrets.token_hex(4), password=secrets.token_hex(32))
    if wrong := lacking(options, fleet.orders, cluster.resources()):
        raise ConfigError(wrong)
    cluster.reserve(fleet.orders)
    prepare({state_dir.fleet: fleet.text}, state_dir)
    try:
        return asyncio.run(_Shell(fleet, cluster, state_dir, terminal).run(ScaledWorkers(options, anywhere=True)))
    finally:
        state_dir.record.unlink(missing_ok=True)


class _Shell:
    """Asks Ray for the programs of one fleet and for how they are, as its watch decides."""

    def __init__(self, fleet: Fleet, cluster: Cluster, state_dir: StateDirectory, terminal: Terminal) -> None:
        self._fleet, self._cluster, self._state_dir, self._terminal = fleet, cluster, state_dir, terminal
        self._watch = Watch(fleet.orders, fleet.store)
        self._tasks = asyncio.TaskGroup()
        self._follows: dict[str, asyncio.Task[None]] = {}
        """Program → the task that asks its actor."""
        self._reports: dict[str, ActorReport] = {}
        self._status: int | None = None

    async def run(self, scaled: ScaledWorkers) -> int:
        """Run until every program has ended, with as many workers as are asked for; return the exit status of `up`."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._stop)
        async with self._tasks:
            self._tasks.create_task(scaled.serve(self, self._state_dir.scale))
            while self._status is None:
                self._on(Tick())
                self._record()
                await asyncio.sleep(ASK_EVERY_S)
            for name in list(self._follows):
                self._forget(name)
        return self._status

    @property
    def stopping(self) -> bool:
        """True once no program will be started again."""
        return self._watch.stopping

    def add_worker(self, name: str, role: str, _place: int, /) -> bool:
        """Have Ray find a node for one more worker, wherever there is room."""
        self._on(AddOrder(replace(self._fleet.workers[role], name=name)))
        return True

    def remove(self, name: str) -> None:
        """Drain a program. It is there until it has ended."""
        self._on(Remove(name))

    def knows(self, name: str) -> bool:
        """Return whether a program is there, even if it drains."""
        return self._watch.state(name) != "ended"

    def given_up(self, name: str) -> str:
        """Return why a program cannot work as configured. Empty if it can."""
        return self._watch.wrong(name)

    def pids(self) -> Mapping[str, int]:
        """Return the process ids of the programs that have reported."""
        return {name: report.pid for name, report in self._reports.items()}

    def _stop(self) -> None:
        if not self._watch.stopping:
            self._terminal.notice("stopping: running requests finish first; press Ctrl-C again to end at once")
        self._on(Stop())

    def _on(self, event: Event) -> None:
        for action in self._watch.on(event, time.monotonic()):
            match action:
                case Create(order):
                    self._cluster.create(order, self._fleet.name)
                    self._follows[order.name] = self._tasks.create_task(self._follow(order.name))
                case Drain(order):
                    self._terminal.notice(f"  {order.name}: draining")
                    self._tasks.create_task(self._drain(order))
                case Kill(name):
                    self._cluster.kill(name)
                    self._forget(name)
                case Notice(text):
                    self._terminal.notice(text)
                case SayReady():
                    self._say_ready()
                case AllEnded(status):
                    self._status = status
                case _:
                    assert_never(action)

    async def _follow(self, name: str) -> None:
        """Tell the watch how a program is, until Ray has given its actor up."""
        question: asyncio.Task[Event] | None = None
        try:
            while True:
                question = question or self._tasks.create_task(self._ask(name))
                answered, _ = await asyncio.wait([question], timeout=ANSWER_LIMIT_S)
                event: Event = Silent(name)
                if answered:
                    event, question = question.result(), None
                if isinstance(event, Lost):
                    self._cluster.kill(name)
                    self._forget(name)
                self._on(event)
                await asyncio.sleep(ASK_EVERY_S)
        finally:
            if question is not None:
                question.cancel()

    async def _ask(self, name: str) -> Event:
        """Return what is known of a program now."""
        try:
            report = await self._cluster.ask(name)
        except ActorSilent:
            return Silent(name)
        except ActorLost as wrong:
            return Lost(name, str(wrong))
        self._reports[name] = report
        if report.status is not None or name in ("nats", "etcd"):
            return Reported(name, report, healthy=report.status is None)
        if not report.url:
            return Reported(name, report, healthy=False)
        healthy, reason = await health(Launch(Program(name, 0, 0.0), (), report.url))
        return Reported(name, report, healthy, reason)

    async def _drain(self, order: Order) -> None:
        await self._cluster.drain(order)
        self._forget(order.name)
        self._on(Drained(order.name))

    def _forget(self, name: str) -> None:
        self._reports.pop(name, None)
        if task := self._follows.pop(name, None):
            task.cancel()

    def _say_ready(self) -> None:
        self._terminal.clear()
        fleet, state = self._fleet, state_flag(self._state_dir)
        say_ready(fleet.url, fleet.model, fleet.access, state, f"\nstatus:  {COMMAND} status{state}", LOGS)

    def _record(self) -> None:
        """Write what runs, for `status`, `chat` and people. The file is replaced atomically."""
        record = {
            "pid": os.getpid(),
            "url": f"{self._fleet.url}/v1",
            "single": False,
            "keys": self._fleet.access.keys,
            "nats": self._fleet.nats,
            "etcd": self._fleet.etcd,
            "discovery": "",
            "programs": {
                name: {"pid": report.pid, "observe": report.url, "node": report.node, "host": report.host}
                for name, report in self._reports.items()
            },
        }
        fresh = self._state_dir.record.with_suffix(".new")
        fresh.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        fresh.rename(self._state_dir.record)
