"""`headrace route`: a fleet in front of servers that run already. servers.py decides; this module acts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import asdict, replace

from deploy.local.route.answers import pick, translate
from deploy.local.route.asking import TLS_NAMES, addresses_of, ask, key_of
from deploy.local.route.kube import pool_of
from deploy.local.route.names import Names
from deploy.local.route.servers import (
    Ask,
    Event,
    Gone,
    Join,
    LeaveServer,
    Say,
    Seen,
    ServerAnswered,
    Servers,
    TimePassed,
    Wanted,
)
from deploy.local.route.targets import Target, parse_file, parse_targets
from deploy.local.stack import servers as programs
from deploy.local.stack.announce import health
from deploy.local.stack.check import check
from deploy.local.stack.model_source import ModelSource, cache_directory, fetch_source, find_source
from deploy.local.stack.options import checked_options
from deploy.local.stack.stack import Launch, Setting, UpOptions, Value, plan_attached
from deploy.local.stack.up import Shell, exclusive, up
from deploy.local.state import CACHE_VARIABLE
from deploy.local.terminal import Terminal
from deploy.local.usage import By, RouteFlags, UpFlags
from shared.errors import ConfigError, Unavailable
from shared.outbound import TlsFiles, read_tls

LOOK_S = 1.0
"""Seconds between two looks at the workers and at the file of servers."""
FILE_LIMIT_BYTES = 1 << 20
LOOKUP_LIMIT_S = 4.0
"""Seconds for a lookup of a name: less than until the next one."""
OWN = ("url", "ip", "kind", "model", "api_key_file", "events", "replay", *TlsFiles.__struct_fields__)
"""Settings of a worker's table `attached` that `route` sets itself."""
CHECKED_URL: Setting = ("--attached.url", "http://127.0.0.1:1")
"""The URL with which a worker's settings are checked; nothing is sent there."""


def route(flags: RouteFlags, terminal: Terminal) -> int:
    """Run until stopped. Return 0 after a drain, 1 if a program could not work. Raise ConfigError and ModelError before
    anything is started."""
    wanted = WantedServers(flags)
    options = _options(flags)
    os.environ.pop(CACHE_VARIABLE, None)  # workers get it from their file; the other services would refuse it

    def check_options(model: str = "") -> None:
        overrides = dict(options.overrides)
        if model or "worker" in overrides:
            overrides["worker"] = [*overrides.get("worker", ()), CHECKED_URL]
        checked = replace(options, model=model or "/not/known/yet", overrides=overrides)
        check(checked, flags.state_dir, python=sys.executable, model=bool(model), notice=terminal.notice)

    source = find_source(flags.model, weights=False) if flags.model else None
    check_options()
    with exclusive(flags.state_dir, flags.port):
        servers, names, name = None, {flags.model_name}, flags.model_name
        if source is None:
            servers = Servers({name} if name else None)
            join = asyncio.run(Keeper(wanted, servers, flags, terminal).first())
            if join.found.text:
                options = by_text(options, flags, join.model)
                keeper = Keeper(wanted, Servers({join.model}, servers, text=True), flags, terminal)
                return up(options, flags.state_dir, terminal, partial(keeper.keep, options))
            source = _source_of(join)
            listed = pick(join.found, {join.model})
            names |= listed.names if listed else set()
            name = name or join.model.rstrip("/").rpartition("/")[2]
        path = fetch_source(source, check_options, terminal, weights=False)
        name = name or source.name
        options = replace(options, model_name=name)
        check_options(str(path))
        names |= {name, source.name, path.name}
        options = replace(options, model=str(path), workers=0)
        keeper = Keeper(wanted, Servers(names - {""}, servers, text=False), flags, terminal)
        return up(options, flags.state_dir, terminal, partial(keeper.keep, options))


def _options(flags: RouteFlags) -> UpOptions:
    """Return the options of the stack, without its model and workers. Raise ConfigError."""
    if flags.by == "text" and flags.model:
        raise ConfigError("--by text: no files of a model are read; leave --model out")
    key_of(flags.api_key_file)
    read_tls(tls_files(flags), TLS_NAMES)
    same = {name: getattr(flags, name) for name in RouteFlags.__struct_fields__ if name in UpFlags.__struct_fields__}
    if flags.picker is not None:
        if not 1 <= flags.picker <= 65535:
            raise ConfigError("--picker is 1 to 65535")
        same["set"] = [f"frontend.picker.port={flags.picker}", *flags.set]
    options, _ = checked_options(replace(UpFlags(), **same | {"engine": "attached", "model": flags.model or "-"}))
    for setting, _ in options.overrides.get("worker", ()):
        name = setting.removeprefix("--").replace("-", "_")
        if name.removeprefix("attached.") in OWN and name.startswith("attached."):
            raise ConfigError(f"--set worker.{name}: `route` sets that itself")
    cache = str(cache_directory(flags.state_dir))
    return replace(options, discovery="etcd" if flags.etcd else "file", cache=cache, workers=1)


def by_text(options: UpOptions, flags: RouteFlags, model: str) -> UpOptions:
    """Return the options of a stack whose frontends send requests to the servers as text. No files of a model are
    needed, and servers know it by the name that clients give. Raise ConfigError."""
    if flags.chat_template:
        raise ConfigError("--chat-template: servers that take text have their own")
    files = {"api_key_file": _path(flags.api_key_file), **asdict(tls_files(flags))}
    settings: list[Setting] = [(f"--text.{name}", file) for name, file in files.items() if file]
    overrides = dict(options.overrides)
    overrides["frontend"] = [*settings, *overrides.get("frontend", ())]
    return replace(options, model=model, model_name=model, workers=0, overrides=overrides)


def tls_files(flags: RouteFlags) -> TlsFiles:
    """Return the files of TLS towards servers."""
    return TlsFiles(_path(flags.ca_file), _path(flags.client_cert), _path(flags.client_key))


def _path(file: Path | None) -> str:
    return "" if file is None else str(file.absolute())


class WantedServers:
    """The servers of the arguments, of a file that is read again when it changes, or of an InferencePool."""

    def __init__(self, flags: RouteFlags, look_up: Callable[[str], list[str]] = addresses_of) -> None:
        """`look_up` returns the addresses of a name, or raises Unavailable; it may block. Raise ConfigError for what is
        wrong with the servers."""
        self._file = flags.file
        if bool(flags.servers) + (self._file is not None) + bool(flags.inference_pool) != 1:
            raise ConfigError(
                "route: give URLs of servers, such as http://127.0.0.1:8001, or a file of them with --file, "
                "or --inference-pool"
            )
        self._pool = pool_of(flags)
        self._text, self._said = "", ""
        self._given = parse_targets(flags.servers)
        if self._file is not None:
            self._text = self._read(self._file)
            self._given = parse_file(f"--file {self._file}", self._text)
        self._look_up, self._names = look_up, Names()
        given = {target.host: target.given for target in self._given}
        for host in self.due_names():
            try:
                self._names.looked_up(host, look_up(host))
            except Unavailable as wrong:
                raise ConfigError(f"{given[host]}: the host {host} has no address: {wrong}") from None
        self.targets, self._news = self._names.servers(self._given)

    def look(self) -> list[str]:
        """Read the file again, and return what is to be said: why it cannot be used, and the former servers stay, or
        what is wrong with names. Each is said once, while it holds."""
        news, self._news = self._news, []
        if fault := self._look_at_file():
            news.append(fault)
        if self._pool is not None:
            self._given, of_pool = self._pool.look()
            news += of_pool
        self.targets, of_names = self._names.servers(self._given)
        return news + of_names

    @property
    def known(self) -> bool:
        """True once it is known which servers there are."""
        return self._pool is None or self._pool.known

    async def follow(self) -> None:
        """Follow the InferencePool, if there is one, until cancelled."""
        if self._pool is not None:
            await self._pool.run()

    def due_names(self) -> list[str]:
        """Return the names of hosts that are to be looked up now."""
        return self._names.due(self._given, time.monotonic())

    async def look_up(self, host: str) -> None:
        """Look a name up, which changes `targets` at the next `look`."""
        addresses: list[str] = []
        fault = ""
        try:
            async with asyncio.timeout(LOOKUP_LIMIT_S):
                addresses = await asyncio.to_thread(self._look_up, host)
        except TimeoutError:
            fault = f"no answer in {LOOKUP_LIMIT_S:g} s"
        except Unavailable as wrong:
            fault = str(wrong)
        self._names.looked_up(host, addresses, fault)

    def _look_at_file(self) -> str:
        """Read the file again. Return why it cannot be used; empty if it can, or if that was said."""
        if self._file is None:
            return ""
        try:
            text = self._read(self._file)
            if text != self._text:
                given = parse_file(f"--file {self._file}", text)
                self._text, self._given = text, given
            said, self._said = self._said, ""
        except ConfigError as wrong:
            said, self._said = self._said, f"{wrong}; the servers stay as they are"
        return self._said if self._said != said else ""

    @staticmethod
    def _read(file: Path) -> str:
        try:
            with file.open("rb") as opened:
                content = opened.read(FILE_LIMIT_BYTES + 1)
            text = content.decode()
        except (OSError, UnicodeDecodeError) as wrong:
            raise ConfigError(f"--file {file}: {getattr(wrong, 'strerror', None) or 'not UTF-8'}") from None
        if len(content) > FILE_LIMIT_BYTES:
            raise ConfigError(f"--file {file}: more than {FILE_LIMIT_BYTES} bytes")
        return text


class Keeper:
    """Asks the servers that are wanted, and keeps a worker for each that fits."""

    def __init__(self, wanted: WantedServers, servers: Servers, flags: RouteFlags, terminal: Terminal) -> None:
        self._wanted, self.servers, self._terminal = wanted, servers, terminal
        self._key_file, self._tls = flags.api_key_file, tls_files(flags)
        self._by: By = flags.by
        self._events: asyncio.Queue[Event] = asyncio.Queue()  # bounded: one answer for each question
        self._asking: set[asyncio.Task[None]] = set()
        self._following: asyncio.Future[None] | None = None
        """What follows a pool of servers; it ends at once if there is none to follow."""

    async def first(self) -> Join:
        """Wait for a server that fits, and return it."""
        self._following = self._begin(self._wanted.follow())
        try:
            while True:
                for action in await self._turn([]):
                    if isinstance(action, Join):
                        return action
        finally:
            await self._end()

    async def keep(self, options: UpOptions, shell: Shell) -> None:
        """Give each server that fits a worker of this stack, until it stops."""
        self._following = self._begin(self._wanted.follow())
        try:
            while not shell.stopping:
                for action in await self._turn(await self._look(shell)):
                    if isinstance(action, Join):
                        shell.add(*self._worker(options, shell, action))
                    else:
                        shell.remove(action.target.worker)
        finally:
            await self._end()

    async def _turn(self, seen: Sequence[Event]) -> list[Join | LeaveServer]:
        """Pass on what has happened, ask and say what follows, and return what else does. Wait if nothing does."""
        if self._following is not None and self._following.done():
            self._following.result()  # what ended it ends all, instead of servers that never change again
        for line in self._wanted.look():
            self._terminal.notice(line)
        for host in self._wanted.due_names():
            self._begin(self._look_up(host))
        events: list[Event] = [*([Wanted(self._wanted.targets)] if self._wanted.known else []), *seen]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                events.append(await self._events.get())
        left: list[Join | LeaveServer] = []
        for event in events:
            for action in self.servers.on(event, time.monotonic()):
                match action:
                    case Ask(target):
                        self._begin(self._ask(target))
                    case Say(line):
                        self._terminal.notice(line)
                    case _:
                        left.append(action)
        return left

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        task = asyncio.ensure_future(work)
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        return task

    async def _ask(self, target: Target) -> None:
        try:
            found = await ask(target, self._key_file, self._tls, self._by)
            self._events.put_nowait(ServerAnswered(target.name, found))
        except (ConfigError, Unavailable) as wrong:
            self._events.put_nowait(ServerAnswered(target.name, None, str(wrong)))

    async def _look_up(self, host: str) -> None:
        await self._wanted.look_up(host)
        self._events.put_nowait(TimePassed())  # the next turn has its addresses

    async def _look(self, shell: Shell) -> list[Event]:
        """Return what the workers say."""
        events: list[Event] = [
            Gone(target.name) for target in self.servers.leaving if shell.find(target.worker) is None
        ]
        joined = [(target, launch) for target in self.servers.joined if (launch := shell.find(target.worker))]
        said = await asyncio.gather(*(health(launch) for _, launch in joined))
        for (target, _), (ready, reason) in zip(joined, said, strict=True):
            if why := shell.given_up(target.worker):
                events.append(Seen(target.name, ready=False, reason=translate(why, target.url), given_up=True))
            else:
                lost = translate(reason, target.url) if "was lost" in reason else ""
                events.append(Seen(target.name, ready, lost))
        return events

    def _worker(self, options: UpOptions, shell: Shell, join: Join) -> tuple[Launch, dict[Path, str]]:
        found, key_file = join.found, self._key_file
        attached: dict[str, Value] = {"url": join.target.url, "ip": join.target.address, "model": join.model}
        attached |= {"events": found.events, "replay": found.replay, **({"kind": "text"} if found.text else {})}
        attached |= {"api_key_file": _path(key_file), **asdict(self._tls)}
        (port,) = programs.free_ports(1, options.observe_host)
        name, python = join.target.worker, sys.executable
        return plan_attached(options, shell.stack, shell.state_dir, name, attached, port, python=python)

    async def _end(self) -> None:
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)


def _source_of(join: Join) -> ModelSource:
    """Return where the files of a server's model are. Raise ConfigError if it is not here, and no name on the hub."""
    listed = pick(join.found, {join.model})
    assert listed is not None
    root = listed.root or listed.id
    try:
        return find_source(root, weights=False)
    except ConfigError:
        raise ConfigError(
            f"{join.target.url} serves {join.model} from {root}, which is not here: name a directory with its "
            "tokenizer and config.json with --model"
        ) from None
