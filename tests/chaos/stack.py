"""The real stack: NATS, etcd, a kvbm, and some of each other service, every one a process; before each service two
cuttable links, or clusters of NATS and etcd on machines that can be cut off."""

from __future__ import annotations

import asyncio
import hashlib
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random

import aiohttp
from msgspec import Struct

from deploy.local.stack.stack import Value, toml
from services.worker.config import Device
from shared import subjects
from shared.discovery.contract import Discovery
from shared.discovery.etcd import EtcdDiscovery
from shared.errors import DiscoveryDown
from shared.messages.cards import INSTANCE
from shared.messages.codec import JSON_HEADER
from shared.pool.format import HEADER_BYTES, PoolGeometry
from tests.chaos.clients import MODEL
from tests.chaos.plan import ALONE, ROLES, SERVICES, Target
from tests.chaos.program import START_LIMIT_S, Program
from tests.chaos.servers import ASK_LIMIT_S, ETCD_MEMBERS, NATS_SERVERS, Clusters, Servers, SingleServers
from tests.namespaces import machines
from tests.process_tree import children
from tests.servers import free_port
from tests.tiny_model import write_tiny_model

NAMESPACE = "chaos"
CAPACITY_BLOCKS = 512
POOL_BYTES = 1 << 24
CUDA: Mapping[str, Value] = {"dtype": "float32", "graph_upper_bound": 16}
"""In float32 a GPU answers the same however its batches are made up."""
KEY = "hr-chaos"
"""Every client's API key."""
KEYS = f'chaos = {{ sha256 = "{hashlib.sha256(KEY.encode()).hexdigest()}" }}\n'
"""Every frontend's file of them."""
_POLL_S = 0.1
_HELD = re.compile(
    r"^(headrace_reservations|headrace_inflight_requests|headrace_queued_requests|headrace_blocks|headrace_lent_blocks"
    r"|headrace_kvbm_tickets|headrace_kvbm_slots)\{([^}]*)\} (\S+)$",
    re.MULTILINE,
)
_STATE = re.compile(r'state="(\w+)"')
_HELD_STATES = ("held", "writing", "loading", "quarantined")
"""States of blocks and slots; the other ones are free, or hold what can be found."""
_ATTACHED = re.compile(r"^headrace_kvbm_attached\{[^}]*\} 1\.0$", re.MULTILINE)
_HAND_OVERS = re.compile(r"^headrace_hand_overs_total\{[^}]*\} (\S+)$", re.MULTILINE)
_STALE = re.compile(r"^headrace_stale_files\{[^}]*\} 1\.0$", re.MULTILINE)


class Detection(Struct, frozen=True):
    """How soon the services find what is wrong. None means as they do by default."""

    lease_ttl_s: float | None = None
    quiet_s: float | None = None
    frozen_s: float | None = None
    stall_s: float | None = None


DEFAULTS = Detection()
FAST = Detection(lease_ttl_s=3.0, quiet_s=0.5, frozen_s=2.0, stall_s=4.0)


class Stack:
    """`instances` of each service, named "worker 0" and so on, next to "kvbm", "nats" and "etcd"."""

    def __init__(
        self,
        directory: Path,
        instances: int,
        detection: Detection,
        device: Device,
        servers: Servers,
        *,
        roles: bool = False,
    ) -> None:
        """`device`: where the workers compute; for a GPU the directory lies in memory, as CUDA pins nothing else.
        `roles`: instead of each worker there is one that computes prompts, "prefill 0", and one that decodes,
        "decode 0"."""
        self.workers: list[str] = []
        """The names of all workers."""
        self.programs: dict[str, Program] = {}
        self.servers = servers
        self.urls: dict[str, str] = {}
        """Service's name → where it shows /health and /metrics."""
        self.api_urls: list[str] = []
        """The frontends', in order."""
        self._directory = directory
        self._detection = detection
        self._device: Device = device
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_LIMIT_S))
        self._pool = directory / "pool" / "pool"
        self._model = write_tiny_model(directory / MODEL)
        self._server_names: list[str] = []
        for name, command, ready, health_url in servers.programs():
            self._server_names.append(name)
            self._add(name, command, ready or partial(self._healthy, health_url))
        self._discovery: Discovery = EtcdDiscovery(servers.discovery)
        self._service("kvbm", 0)
        for number in range(instances):
            for service in SERVICES:
                for target in ROLES if roles and service == "worker" else (service,):
                    self._service(target, number)

    def names(self, service: Target) -> list[str]:
        """Return the names of all its instances, in order."""
        return [name for name in self.urls if name.startswith(f"{service} ")]

    async def start(self) -> None:
        """Returns when all is whole."""
        for name in self._server_names:
            await self.programs[name].start()
        for name in self._server_names:
            await self.programs[name].until_ready()
        for link in self.servers.links.values():
            await link.mend()
        for name in self.urls:
            await self.programs[name].start()
        for name in self.urls:
            await self.programs[name].until_ready()
        await self.until_whole(START_LIMIT_S)

    async def close(self) -> None:
        for program in self.programs.values():
            await program.kill()
        for link in self.servers.links.values():
            await link.sever()
        await self._discovery.close()
        await self._http.close()

    def engine(self, worker: str) -> int | None:
        """The process id of a worker's engine. None if it has none now."""
        return next(iter(children(self.programs[worker].pid)), None)

    def wipe_etcd(self) -> None:
        """While it is down."""
        shutil.rmtree(self._directory / "etcd", ignore_errors=True)

    def damage_disk(self, draw: Random) -> None:
        """While kvbm is down: every file of blocks has 0 to 200 bits turned."""
        for file in sorted((self._directory / "disk").rglob("segment-*")):
            _turn_bits(file, draw.randrange(200), 0, draw)

    def damage_pool(self) -> None:
        """While kvbm is down: nothing that maps the file notices."""
        with self._pool.open("r+b") as pool:
            pool.write(bytes(HEADER_BYTES))

    def damage_memory(self, draw: Random) -> None:
        """Damage the blocks alone."""
        _turn_bits(self._pool, 20_000, PoolGeometry.of(self._pool.stat().st_size).slots_at, draw)

    def keys_file(self, frontend: str) -> Path:
        """The one of API keys."""
        return self._directory / f"{frontend.replace(' ', '-')}.keys.toml"

    async def until_whole(self, limit_s: float) -> None:
        """Raises TimeoutError that says what is missing."""
        missing = "nothing was looked at"
        try:
            async with asyncio.timeout(limit_s):
                while missing := await self.missing():  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)  # other processes: there is nothing to wait on
        except TimeoutError:
            raise TimeoutError(missing) from None

    async def missing(self) -> str:
        """Describe what is wrong; empty when every instance is ready and published, and no other is."""
        ended = [name for name, program in self.programs.items() if not program.running]
        if ended:
            return f"ended by themselves: {ended}"
        for name in self._server_names:
            if not await self.programs[name].ready():
                return f"{name} is not ready"
        for name in self.urls:
            if not await self._healthy(f"{self.urls[name]}/health"):
                return f"{name} is not ready"
        try:
            async with asyncio.timeout(ASK_LIMIT_S):
                keys = await self._discovery.list(subjects.namespace_prefix(NAMESPACE))
        except (DiscoveryDown, TimeoutError):
            return "etcd does not answer"
        books = subjects.instances_prefix(NAMESPACE)
        published = {INSTANCE.decode(value, JSON_HEADER).pid for key, value in keys.items() if key.startswith(books)}
        due = {self.programs[name].pid: name for name in self.urls}
        if published != due.keys():
            late = [name for pid, name in due.items() if pid not in published]
            return f"in etcd lack {late}, and {len(published - due.keys())} are there that are gone"
        cards = sum(not key.startswith(books) for key in keys)
        if cards != len(self.workers):
            return f"{cards} model cards are in etcd"
        apart = [name for name in self.workers if not _ATTACHED.search(await self._metrics(name))]
        if apart:
            return f"not attached to the kvbm: {apart}"
        stale = [name for name in self.names("frontend") if _STALE.search(await self._metrics(name))]
        return f"files that cannot be read: {stale}" if stale else ""

    async def unready(self, name: str) -> bool | None:
        """Whether the service says so. None if it says nothing."""
        try:
            async with self._http.get(f"{self.urls[name]}/health") as response:
                return response.status == 503
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def left(self) -> dict[str, float]:
        """Return what is still held, by metric and service, when no client asks any longer."""
        held: dict[str, float] = {}
        for name in self.urls:
            for metric, labels, value in _HELD.findall(await self._metrics(name)):
                state = _STATE.search(labels)
                if state is None or state[1] in _HELD_STATES:
                    held[f"{metric}{{{labels}}} of {name}"] = float(value)
        return held

    async def hand_overs(self) -> dict[int, float]:
        """Return how many prompts each frontend's process has seen handed over."""
        counted: dict[int, float] = {}
        for name in self.names("frontend"):
            if self.programs[name].running and (found := _HAND_OVERS.search(await self._metrics(name))):
                counted[self.programs[name].pid] = float(found[1])
        return counted

    async def _metrics(self, name: str) -> str:
        """Empty if it did not answer."""
        try:
            async with self._http.get(f"{self.urls[name]}/metrics") as response:
                return await response.text()
        except (aiohttp.ClientError, TimeoutError):
            return ""

    # --- what it is made of

    def _service(self, service: Target, number: int) -> None:
        name = service if service in ALONE else f"{service} {number}"
        port = free_port()
        file = self._directory / f"{name.replace(' ', '-')}.toml"
        file.write_text(toml(self._settings(name, service, port)), encoding="utf-8")
        works = service in ("worker", *ROLES)
        if works:
            self.workers.append(name)
        module = "tests.chaos.paced_worker" if works else f"services.{service}"
        self.urls[name] = f"http://{self.servers.host(name)}:{port}"
        arguments = [*self.servers.inside(name), sys.executable, "-m", module, "--config", str(file)]
        self._add(name, arguments, partial(self._healthy, f"{self.urls[name]}/health"))

    def _settings(self, name: str, service: Target, port: int) -> dict[str, Value | Mapping[str, Value]]:
        found = self._detection
        tables = self.servers.tables(name)
        tables["discovery"] |= _given(lease_ttl_s=found.lease_ttl_s)
        tables["observe"]["port"] = port
        settings: dict[str, Value | Mapping[str, Value]] = {"namespace": NAMESPACE, **tables}
        if service == "frontend":
            api_port = free_port()
            self.api_urls.append(f"http://127.0.0.1:{api_port}")
            self.keys_file(name).write_text(KEYS, encoding="utf-8")
            settings["http"] = {"port": api_port}
            settings["limits"] = _given(quiet_s=found.quiet_s, frozen_s=found.frozen_s)
            settings["access"] = {"keys_file": str(self.keys_file(name))}
            return settings
        if service == "router":
            settings["load"] = _given(frozen_s=found.frozen_s)
            return settings
        if service == "kvbm":
            settings["pool"] = {"directory": str(self._pool.parent), "size_bytes": POOL_BYTES}
            settings["disk"] = {"directory": str(self._directory / "disk"), "limit_bytes": 1 << 26, "min_free_bytes": 0}
            return settings
        if service in ROLES:
            settings["role"] = service
        settings["kvbm"] = {"pool": str(self._pool.parent), "wait_s": 1.0, "checksums": True}
        settings |= {"model": str(self._model), "cache": str(self._directory / "models"), "threads": 1}
        if self._device == "cuda":
            settings |= {"device": "cuda", "cuda": CUDA}
        return settings | {"capacity_blocks": CAPACITY_BLOCKS} | _given(stall_s=found.stall_s)

    def _add(self, name: str, arguments: list[str], ready: Callable[[], Awaitable[bool]]) -> None:
        log = self._directory / f"{name.replace(' ', '-')}.log"
        # Servers may say by which signal they ended.
        drained = (0,) if name in self.urls else (0, -signal.SIGTERM)
        self.programs[name] = Program(name, arguments, log, ready, drained=drained)

    async def _healthy(self, url: str) -> bool:
        try:
            async with self._http.get(url) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False


def _turn_bits(file: Path, count: int, first: int, draw: Random) -> None:
    """From the byte `first` on; one that is empty stays."""
    with file.open("r+b") as damaged:
        end = damaged.seek(0, 2)
        for _ in range(count if end > first else 0):
            at = damaged.seek(draw.randrange(first, end))
            [byte] = damaged.read(1)
            damaged.seek(at)
            damaged.write(bytes([byte ^ 1 << draw.randrange(8)]))


def _given(**settings: float | None) -> dict[str, Value]:
    return {name: value for name, value in settings.items() if value is not None}


@asynccontextmanager
async def running(
    directory: Path,
    instances: int,
    detection: Detection,
    device: Device,
    *,
    roles: bool = False,
    clusters: bool = False,
) -> AsyncIterator[Stack]:
    """A whole stack; every process has ended on leaving. With `clusters` its workers are on machines of their own."""
    with ExitStack() as undo:
        servers: Servers = SingleServers(directory)
        if clusters:
            apart = [f"worker {number}" for number in range(instances)]
            joined = undo.enter_context(machines(*NATS_SERVERS, *ETCD_MEMBERS, *apart))
            servers = Clusters(directory, joined, apart)
        stack = Stack(directory, instances, detection, device, servers, roles=roles)
        try:
            await stack.start()
            yield stack
        finally:
            await stack.close()
