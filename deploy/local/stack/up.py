"""`headrace up`: starts the servers and services, keeps them running, drains them. supervise.py decides; this module
acts."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, assert_never

from deploy.local.stack import servers
from deploy.local.stack.announce import PROBE_EVERY_S, Announcer, health
from deploy.local.stack.engine_errors import SERVES_ON, LogFollower, engine_error
from deploy.local.stack.stack import Launch, Stack, UpOptions, plan, ports_needed
from deploy.local.stack.supervise import (
    CONFIG_STATUS,
    Add,
    AllEnded,
    Begin,
    Event,
    Exited,
    Kill,
    Misconfigured,
    Remove,
    Restarting,
    Serving,
    Start,
    Stop,
    Supervisor,
    Terminate,
    Tick,
)
from deploy.local.state import StateDirectory
from deploy.local.terminal import Terminal
from shared.errors import ConfigError
from shared.processors import usable_processors

LOG_LIMIT_BYTES = 64 << 20
"""Size at which a log's content moves to a second file."""
LOG_CHECK_S = 60.0
DRAIN_REPORT_S = 3.0
ENGINE_LOOK_S = 0.5
"""Seconds between two looks at what workers have logged of their engines."""
LINES_SHOWN = 10
"""Lines shown of the log of a program that cannot work."""


Beside = Callable[["Shell"], Coroutine[Any, Any, None]]
"""What runs in addition to a stack, until all programs have ended, and adds programs to it or removes them."""


def up(options: UpOptions, state_dir: StateDirectory, terminal: Terminal, beside: Beside | None = None) -> int:
    """Run until stopped. Return 0 after a drain, 1 if a program could not work. Call it within `exclusive`."""
    stack = plan(
        options,
        state_dir,
        servers.free_ports(ports_needed(options), options.observe_host),
        python=sys.executable,
        cores=usable_processors(),
        password=secrets.token_hex(32),
    )
    prepare(stack.files, state_dir)
    try:
        return asyncio.run(Shell(stack, state_dir, terminal).run(beside))
    finally:
        state_dir.record.unlink(missing_ok=True)


def check_port(port: int) -> None:
    """Raise ConfigError if the frontend could not listen there now."""
    try:
        free = servers.is_free(port)
    except PermissionError:
        raise ConfigError(f"port {port} is not for this user; choose one above 1023 with --port") from None
    if not free:
        raise ConfigError(f"port {port} is taken; choose another with --port")


@contextlib.contextmanager
def exclusive(state_dir: StateDirectory, port: int, *, port_here: bool = True) -> Iterator[None]:
    """Lock the state directory, and check the port if it is one of this machine. The lock ends with the process,
    however that ends.

    Raise ConfigError if another `up` runs there, the port is taken or the directory cannot be written.
    """
    try:
        state_dir.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (state_dir.home / "up.lock").open("a+")
    except OSError as wrong:
        raise ConfigError(f"state directory {state_dir.home}: {wrong.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ConfigError(
                f"another `up` runs here: {lock.read().strip()}; a second one needs another --state"
            ) from None
        if port_here:
            check_port(port)
        lock.truncate(0)
        lock.write(f"pid {os.getpid()}, http://127.0.0.1:{port}/v1\n")
        lock.flush()
        yield


def prepare(files: Mapping[Path, str], state_dir: StateDirectory) -> None:
    """Empty the run directory and the logs, and write the files. Nothing of the former run is needed: its keys in etcd
    had leases of processes that are dead now."""
    shutil.rmtree(state_dir.run, ignore_errors=True)
    state_dir.run.mkdir(mode=0o700, parents=True)
    state_dir.logs.mkdir(mode=0o700, exist_ok=True)
    for log in state_dir.logs.glob("*.log*"):
        log.unlink()
    _write(files)


def _write(files: Mapping[Path, str]) -> None:
    for file, text in files.items():
        file.touch(mode=0o600)
        file.write_text(text, encoding="utf-8")


class Shell:
    """Starts and stops the programs of one `up`, as its supervisor decides."""

    def __init__(self, stack: Stack, state_dir: StateDirectory, terminal: Terminal) -> None:
        self._terminal = terminal
        self.stack, self.state_dir = stack, state_dir
        self._launches = {launch.program.name: launch for launch in stack.launches}
        self._adding: set[str] = set()
        """Programs whose Add is on its way to the supervisor."""
        self._given_up: dict[str, str] = {}
        """Added program that cannot work as configured → the last line of its log."""
        self._supervisor = Supervisor([launch.program for launch in stack.launches])
        self._events: asyncio.Queue[Event] = asyncio.Queue()  # bounded: one exit for each child, and signals
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._returning: dict[str, str] = {}
        """Services that ended by themselves or lost their engine → what is said once they are ready."""
        self._restarts = asyncio.Event()
        """Set if there are some."""
        self._reason = ""
        """Why all programs are stopped: the error of the first one that cannot work as configured."""
        # Only this: the settings of the services are in the files in state_dir.run.
        self._environment = servers.program_environment()

    async def run(self, beside: Beside | None = None) -> int:
        """Run until every child has ended; return the exit status of `up`."""
        loop = asyncio.get_running_loop()
        hang_up = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)  # that of nohup
        for number in (signal.SIGINT, signal.SIGTERM, *hang_up):
            loop.add_signal_handler(number, self.stop)
        try:
            async with asyncio.TaskGroup() as tasks:
                serving = partial(self._events.put_nowait, Serving())
                announcer = Announcer(self.stack, self.state_dir, self._terminal, self._supervisor, serving)
                loops: tuple[Coroutine[Any, Any, None], ...] = (
                    announcer.run(),
                    self._bound_logs(),
                    self._report_drains(),
                    self._report_returns(),
                    self._report_engines(),
                )
                loops += (beside(self),) if beside is not None else ()
                background = [tasks.create_task(loop) for loop in loops]
                status = await self._supervise(tasks)
                for task in background:
                    task.cancel()
        finally:
            for process in self._processes.values():  # only if this shell itself has failed
                _kill_group(process.pid)
        return status

    def stop(self) -> None:
        """Drain all programs; the second call kills them."""
        if not self._supervisor.stopping:
            self._terminal.notice("stopping: running requests finish first; press Ctrl-C again to end at once")
        self._events.put_nowait(Stop())

    def add(self, launch: Launch, files: Mapping[Path, str]) -> None:
        """Write the files, and start one more program, which is not needed. No program of its name may be there."""
        _write(files)
        self._launches[launch.program.name] = launch
        self._adding.add(launch.program.name)
        self._events.put_nowait(Add(launch.program))

    def remove(self, name: str) -> None:
        """Drain a program. It is there until it has ended."""
        self._events.put_nowait(Remove(name))

    def pids(self) -> dict[str, int]:
        """Return the programs that run, with their process ids."""
        return {name: process.pid for name, process in self._processes.items()}

    def find(self, name: str) -> Launch | None:
        """Return the program of this name. None if there is none."""
        return self._launches.get(name)

    def given_up(self, name: str) -> str:
        """Return the last line of an added program that cannot work as configured. Empty if that is not so."""
        return self._given_up.get(name, "")

    @property
    def stopping(self) -> bool:
        """True once no program will be started again."""
        return self._supervisor.stopping

    def _forget_removed(self, event: Event) -> None:
        """Forget the programs that the supervisor has forgotten. `event` is what it was given."""
        if isinstance(event, Add):
            self._adding.discard(event.program.name)
        for name in [name for name in self._launches if not self._supervisor.knows(name)]:
            if name not in self._adding:
                del self._launches[name]
                self._returning.pop(name, None)
                self._given_up.pop(name, None)
                self._record()

    async def _supervise(self, tasks: asyncio.TaskGroup) -> int:
        event: Event = Begin()
        while True:
            for action in self._supervisor.on(event, time.monotonic()):
                match action:
                    case Start(name):
                        await self._start(name, tasks)
                    case Terminate(name):
                        self._terminal.notice(f"  {name}: draining")
                        self._signal(name, signal.SIGTERM)
                    case Kill(name):
                        self._terminal.notice(f"  {name}: killed")
                        self._signal(name, signal.SIGKILL)
                    case Restarting(name, status, delay_s):
                        # A program that was killed has not logged why.
                        said = "" if status <= 0 else ": " + "".join(_tail(self._log(name), 1))
                        wrong = "; it cannot work as configured, the others go on" if status == CONFIG_STATUS else ""
                        ended = f"{name} ended ({_spell(status)}){wrong}"
                        self._terminal.notice(f"{ended}; it starts again in {delay_s} s{said}")
                        if self._launches[name].observe:
                            self._await_return(name, "has started again and is ready")
                    case Misconfigured(name, needed):
                        if self._launches[name].added:
                            self._given_up[name] = "".join(_tail(self._log(name), 1)) or "it ended without a word"
                        elif needed:
                            lines = _tail(self._log(name), LINES_SHOWN)
                            self._terminal.notice("\n  ".join([f"error: {name} cannot work as configured:", *lines]))
                            self._reason = self._reason or f"error: {name}: {''.join(lines[-1:])}"
                        else:
                            self._terminal.notice(f"without {name}: " + "".join(_tail(self._log(name), 1)))
                    case AllEnded(status):
                        if self._reason:  # shown before, but scrolled away since
                            self._terminal.notice(self._reason)
                        return status
                    case _:
                        assert_never(action)
            self._forget_removed(event)
            event = await self._next_event()

    async def _next_event(self) -> Event:
        due_s = self._supervisor.next_due_s
        try:
            async with asyncio.timeout(None if due_s is None else max(0.0, due_s - time.monotonic())):
                return await self._events.get()
        except TimeoutError:
            return Tick()

    async def _start(self, name: str, tasks: asyncio.TaskGroup) -> None:
        """Start a program in a process group of its own, so that Ctrl-C reaches only `up` and the drain keeps its
        order."""
        arguments = (*servers.tether(), *self._launches[name].arguments)
        with self._log(name).open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.state_dir.run,
                env=self._environment,
                process_group=0,
            )
        self._processes[name] = process
        self._record()
        tasks.create_task(self._wait(name, process))

    async def _wait(self, name: str, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        del self._processes[name]
        self._events.put_nowait(Exited(name, status))

    def _signal(self, name: str, number: signal.Signals) -> None:
        process = self._processes.get(name)  # absent: it has just ended, and its Exited is in the queue
        if process is None:
            return
        if number == signal.SIGKILL:
            _kill_group(process.pid)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)  # process.send_signal may take its status from asyncio

    async def _report_returns(self) -> None:
        """Show that services which ended by themselves, or lost their engine, are ready."""
        while True:
            await self._restarts.wait()
            for name, said in sorted(self._returning.items()):
                launch = self._launches.get(name)
                if launch is None:
                    continue  # it was removed meanwhile
                healthy, _ = await health(launch)
                if healthy:
                    self._terminal.notice(f"{name} {said}")
                if healthy or not self._supervisor.knows(name) or self._supervisor.state(name) == "ended":
                    self._returning.pop(name, None)
            if not self._returning:
                self._restarts.clear()
            await asyncio.sleep(PROBE_EVERY_S)

    def _await_return(self, name: str, said: str) -> None:
        """Have it said when a service is ready again."""
        self._returning[name] = said
        self._restarts.set()

    async def _report_engines(self) -> None:
        """Show what workers log of engines that they have lost."""
        follower = LogFollower()
        while True:
            for name, launch in list(self._launches.items()):
                lines = follower.new_lines(self._log(name)) if launch.observe else []
                for said in filter(None, map(engine_error, lines)):
                    self._terminal.notice(f"{name}: {said}")
                    if not said.startswith(SERVES_ON):
                        self._await_return(name, "is ready again")
            await asyncio.sleep(ENGINE_LOOK_S)

    async def _report_drains(self) -> None:
        """Show what the programs that drain wait for, when that has changed."""
        shown: dict[str, str] = {}
        while True:
            await asyncio.sleep(DRAIN_REPORT_S)
            for name, launch in list(self._launches.items()):
                if launch.observe and self._supervisor.knows(name) and self._supervisor.state(name) == "stopping":
                    _, reason = await health(launch)
                    if reason not in ("", "draining", shown.get(name)):
                        shown[name] = reason
                        self._terminal.notice(f"  {name}: {reason}")

    async def _bound_logs(self) -> None:
        """Bound the logs, which the children append to: at the limit, move the content to one older file."""
        while True:
            await asyncio.sleep(LOG_CHECK_S)
            for log in self.state_dir.logs.glob("*.log"):
                if log.stat().st_size > LOG_LIMIT_BYTES:
                    shutil.copyfile(log, log.with_suffix(".log.1"))
                    os.truncate(log, 0)

    def _log(self, name: str) -> Path:
        return self.state_dir.logs / f"{name}.log"

    def _record(self) -> None:
        """Write what runs, for `status`, `chat` and people. The file is replaced atomically."""
        record = {
            "pid": os.getpid(),
            "url": f"{self.stack.url}/v1",
            "single": self.stack.single,
            "keys": self.stack.access.keys,
            "nats": self.stack.nats,
            "etcd": self.stack.etcd,
            "discovery": "" if self.stack.etcd or self.stack.single else str(self.state_dir.run / "discovery"),
            "programs": {
                name: {"pid": process.pid, "observe": self._launches[name].observe, "log": str(self._log(name))}
                for name, process in self._processes.items()
            },
        }
        fresh = self.state_dir.record.with_suffix(".new")
        fresh.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        fresh.rename(self.state_dir.record)


def _kill_group(group: int) -> None:
    """Kill a service and the processes that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _spell(status: int) -> str:
    return f"status {status}" if status >= 0 else signal.Signals(-status).name


def _tail(log: Path, lines: int) -> list[str]:
    """Return the last lines of a log, at most 64 KiB."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - (64 << 10)))
        return file.read().decode(errors="replace").rstrip().splitlines()[-lines:]
