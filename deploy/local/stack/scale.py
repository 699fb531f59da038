"""Another number of workers for an `up` that runs: `headrace autoscale` asks for it on a socket in the run directory.

    {"workers": {"aggregated": 3}, "first": [4711]}  ─▶  {"failed": ""}      one line each, one question a connection

What was asked for last holds until something else is asked for. A worker that is one too many drains, then stops. Where
this machine's workers have GPUs, a new one waits until one of the places that `up` began with is free.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta, Struct

from deploy.local.stack import servers
from deploy.local.stack.stack import UpOptions, named_workers, plan_worker
from deploy.local.stack.up import Shell
from shared.errors import MALFORMED, ConfigError
from shared.processors import usable_processors
from shared.socket_path import reachable

LOOK_S = 0.5
"""Seconds between two looks at what was asked for."""
MOST = 64
"""The most workers of one `up`."""
LINE_BYTES = 1 << 16
QUESTION_LIMIT_S = 2.0


class WantedWorkers(Struct, frozen=True, forbid_unknown_fields=True):
    """How many workers of each role are wanted."""

    workers: dict[str, Annotated[int, Meta(ge=0, le=MOST)]]
    first: list[int] = []
    """Process ids of the workers that report, in the order in which those that are too many leave. The others, which
    serve nothing yet, leave before them."""


class ScaleAnswer(Struct, frozen=True):
    """The answer of `up`."""

    failed: str = ""
    """Why nothing changes. Empty if it does."""


def changes(
    wanted: Mapping[str, int], there: Mapping[str, tuple[str, int]], staying: Sequence[str], places: int
) -> tuple[list[tuple[str, str, int]], list[str]]:
    """Return (name, role, place) of the workers to add now, and the names of those to remove. *Pure.*

    `there` has the role and the place of each worker, `staying` those that do not leave already, the first to leave
    first. A place is free once its worker has ended.
    """
    added: list[tuple[str, str, int]] = []
    removed: list[str] = []
    free = [place for place in range(places) if place not in {place for _, place in there.values()}]
    for role, number in wanted.items():
        mine = [name for name in staying if there[name][0] == role]
        removed += mine[: max(0, len(mine) - number)]
        prefix = "worker" if role == "aggregated" else role
        names = (name for index in range(2 * MOST) if (name := f"{prefix}-{index}") not in there)
        added += [(next(names), role, free.pop(0)) for _ in range(min(number - len(mine), len(free)))]
    return added, removed


def leaving_order(
    names: Sequence[str], there: Mapping[str, tuple[str, int]], pids: Mapping[str, int], first: Sequence[int]
) -> list[str]:
    """Return workers in the order in which they leave: those that are not in `first`, the youngest place first, then
    those that are, in its order. *Pure.*"""
    order = {pid: index for index, pid in enumerate(first)}
    return sorted(names, key=lambda name: (order.get(pids.get(name, 0), -1), -there[name][1]))


class WorkerLauncher(Protocol):
    """What runs the workers of one `up`: this machine, or Ray."""

    @property
    def stopping(self) -> bool:
        """True once nothing will be started again."""
        ...

    def add_worker(self, name: str, role: str, place: int, /) -> bool:
        """Start a worker; the role is empty if it does all. Return False if that must be tried again."""
        ...

    def remove(self, name: str) -> None:
        """Drain a worker. It is there until it has ended."""
        ...

    def knows(self, name: str) -> bool:
        """Return whether a worker is there, even if it drains."""
        ...

    def given_up(self, name: str) -> str:
        """Return why an added worker cannot work as configured. Empty if it can."""
        ...

    def pids(self) -> Mapping[str, int]:
        """Return the process ids of the workers that run."""
        ...


class LocalLauncher:
    """The processes of this machine."""

    def __init__(self, options: UpOptions, shell: Shell) -> None:
        self._options, self._shell = options, shell
        self.remove, self.given_up, self.pids = shell.remove, shell.given_up, shell.pids

    @property
    def stopping(self) -> bool:
        """True once no program will be started again."""
        return self._shell.stopping

    def knows(self, name: str) -> bool:
        """Return whether a program of this name is there."""
        return self._shell.find(name) is not None

    def add_worker(self, name: str, role: str, place: int, /) -> bool:
        """Start a worker at a free port. Return False if none is free now."""
        try:
            (port,) = servers.free_ports(1)
        except ConfigError:
            return False
        launch, files = plan_worker(
            self._options,
            self._shell.stack,
            self._shell.state_dir,
            name,
            port,
            python=sys.executable,
            index=place,
            role=role,
            cores=usable_processors(),
        )
        self._shell.add(launch, files)
        return True


class ScaledWorkers:
    """The workers of one `up`, in the number that was asked for last."""

    def __init__(self, options: UpOptions, *, anywhere: bool = False) -> None:
        """`anywhere` says that GPUs are found for a worker when it starts."""
        self._options = options
        self._there = {name: (role or "aggregated", index) for index, (name, role) in enumerate(named_workers(options))}
        """Worker → its role and its place."""
        self._roles = {role for role, _ in self._there.values()}
        self._leaving: set[str] = set()
        self._wanted: WantedWorkers | None = None
        self._failed = ""
        """Why a worker that was added cannot work, until that is said."""
        bound = options.gpus is not None or options.vllm_gpus
        self._places = options.workers if bound and not anywhere else MOST

    async def keep(self, shell: Shell) -> None:
        """Scale the workers of this machine, until the stack stops."""
        await self.serve(LocalLauncher(self._options, shell), shell.state_dir.scale)

    async def serve(self, launcher: WorkerLauncher, socket: Path) -> None:
        """Answer questions at a socket, and add and remove workers, until the launcher stops."""
        with ExitStack() as opened:
            path = reachable(str(socket), opened)
            answer = partial(self._answer, launcher)
            async with await asyncio.start_unix_server(answer, path, limit=LINE_BYTES):
                while not launcher.stopping:
                    if self._wanted is not None:
                        self._carry_out(launcher, self._wanted)
                    await asyncio.sleep(LOOK_S)

    async def _answer(
        self, launcher: WorkerLauncher, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError, ValueError, TimeoutError):
            async with asyncio.timeout(QUESTION_LIMIT_S):
                line = await reader.readline()
                writer.write(msgspec.json.encode(ScaleAnswer(self._asked(launcher, line))) + b"\n")
                await writer.drain()
        writer.close()

    def _asked(self, launcher: WorkerLauncher, line: bytes) -> str:
        """Take up what is asked for. Return why that cannot be."""
        try:
            wanted = msgspec.json.decode(line, type=WantedWorkers)
        except MALFORMED as wrong:
            return f"not a question: {wrong}"
        total = sum(wanted.workers.values())
        if launcher.stopping:
            return "`up` is about to end"
        if self._options.engine == "attached":
            return "an attached server is one worker"
        if strange := set(wanted.workers).symmetric_difference(self._roles):
            return f"roles {', '.join(sorted(strange))}: the workers of this `up` are {', '.join(sorted(self._roles))}"
        if total > self._places:
            return f"{total} workers: there is room for {self._places}"
        failed, self._failed = self._failed, ""
        self._wanted = self._wanted if failed else wanted
        return failed

    def _carry_out(self, launcher: WorkerLauncher, wanted: WantedWorkers) -> None:
        for name in [name for name in self._leaving if not launcher.knows(name)]:
            self._leaving.discard(name)
            del self._there[name]
        for name in [name for name in self._there if name not in self._leaving and launcher.given_up(name)]:
            self._failed, self._wanted = f"{name} cannot work as configured: {launcher.given_up(name)}", None
            self._leaving.add(name)
            launcher.remove(name)
            return
        names = [name for name in self._there if name not in self._leaving]
        staying = leaving_order(names, self._there, launcher.pids(), wanted.first)
        added, removed = changes(wanted.workers, self._there, staying, self._places)
        for name in removed:
            self._leaving.add(name)
            launcher.remove(name)
        for name, role, place in added:
            if not launcher.add_worker(name, "" if role == "aggregated" else role, place):
                return  # the next look tries again
            self._there[name] = role, place
