"""One machine's workers and its kvbm, as processes on a real NATS, asked over the wire, each worker by itself.

test (a frontend's end of the wire) ── NATS ──▶ "first" ⇄ kvbm ⇄ "second"          "alone": without a kvbm
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from shared import subjects
from shared.bus.nats_bus import NatsBus, connect
from shared.config import NatsConfig, environment
from shared.discovery.file import FileDiscovery
from shared.errors import Unavailable
from shared.hashing import content_keys, event_hash, pack_tokens, root_key
from shared.messages import kvbm as wire
from shared.messages.cards import INSTANCE, Instance, Pooling, ServiceName
from shared.messages.codec import JSON_HEADER
from shared.messages.frames import TokenLogprob
from shared.messages.generate import Accepted, Sampling
from shared.messages.kv_events import SNAPSHOT_CHUNK, SNAPSHOT_REQUEST, SnapshotRequest, Tier
from shared.messages.load import LoadReport
from shared.messages.people import OPERATE_WORKER, WORKER_OPERATED, OperateWorker, WorkerOperated, WorkerOperation
from shared.pool.format import HEADER_BYTES, parse
from tests.integration.fleet import Fleet, Service
from tests.integration.stack import ROOT
from tests.worker.shell import NAMESPACE, Peer, request

LIMIT_S = 180.0
BLOCK_TOKENS = 16
ATTACHED = ("first", "second")
WORKERS = (*ATTACHED, "alone")
WITHOUT_KVBM = ("alone", "reference")
VOCABULARY = 320

T = TypeVar("T")


class Scored(NamedTuple):
    """What a worker made of a prompt, and how likely it found that."""

    tokens: list[int]
    logprobs: list[TokenLogprob]
    """One for each token."""


class Answer(NamedTuple):
    """What a worker made of a prompt."""

    tokens: list[int]
    cached: int
    """Tokens of the prompt that were not computed …"""
    host: int
    disk: int
    """… and those of them that came from the kvbm."""


def prompt(length: int, seed: object) -> list[int]:
    """Return tokens of a conversation that no other test has."""
    draw = random.Random(repr(seed))
    return [3 + draw.randrange(VOCABULARY - 3) for _ in range(length)]


def full_blocks(tokens: Sequence[int]) -> int:
    """Those of a prompt that can be had from elsewhere: its last token is always computed."""
    return (len(tokens) - 1) // BLOCK_TOKENS


async def eventually(seen: Callable[[], Awaitable[T | None]], what: str, *, pause_s: float = 0.02) -> T:
    """The first truthy answer of `seen`, which asks another process."""
    last: object = None
    try:
        async with asyncio.timeout(LIMIT_S):
            while True:
                last = answer = await seen()
                if answer:
                    return answer
                await asyncio.sleep(pause_s)
    except TimeoutError:
        raise AssertionError(f"not within {LIMIT_S} s: {what}; last: {last}") from None


class Machine:
    """Its processes outlive a test. `flags` are for all of its workers; the pool is in the folder if nowhere else."""

    def __init__(
        self, fleet: Fleet, folder: Path, model: Path, pool_bytes: int, *flags: str, pool: Path | None = None
    ) -> None:
        self.fleet = fleet
        self.folder = folder
        self.pool = pool or folder / "pool"
        self._pool_bytes = pool_bytes
        # Tests count what an engine has: one that a busy machine makes silent is not to be started again.
        patient = ("--stall-s", "600")
        self._worker_flags = ("--model", str(model), "--model-name", "model", "--threads", "1", *patient, *flags)

    @staticmethod
    def where(folder: Path) -> tuple[str, ...]:
        """The flags of the fleet."""
        discovery = ("--discovery-backend", "file", "--discovery-path", str(folder / "discovery"))
        return ("--namespace", NAMESPACE, *discovery)

    def start_kvbm(self) -> None:
        """All that it keeps goes to disk, too."""
        pool = ("--pool-directory", str(self.pool), "--pool-size-bytes", str(self._pool_bytes))
        disk = ("--disk-directory", str(self.folder / "disk"), "--disk-limit-bytes", str(256 << 20))
        kept = ("--disk-min-free-bytes", "0", "--disk-segment-bytes", str(16 << 20), "--tiers-disk-sightings", "1")
        tickets = ("--tickets-fetch-time-s", "3")  # of a fetch whose answer nobody waits for any more
        self.fleet.start("kvbm", "kvbm", *pool, *disk, *kept, *tickets)

    def start_worker(
        self,
        name: str,
        *flags: str,
        pool: Path | None = None,
        module: str = "",
        more: Mapping[str, str] | None = None,
    ) -> None:
        """`flags` of this one; `pool` and `module` if they are not the usual ones; `more` is added to its environment.
        A request waits for blocks as long as it takes: computing them would be faster with so small a model."""
        kvbm = ("--kvbm-pool", str(pool or self.pool), "--kvbm-wait-s", "60", "--kvbm-timeout-s", "4")
        exchanged = () if name in WITHOUT_KVBM else kvbm
        self.fleet.start("worker", name, *self._worker_flags, *exchanged, *flags, module=module, more=more)

    def process(self, name: str) -> Service:
        return self.fleet.services[name]

    def damage_pool(self) -> None:
        """Every number in the pool's slots is none."""
        with (self.pool / "pool").open("r+b") as file:
            geometry = parse(file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size)
            file.seek(geometry.slots_at)
            file.write(b"\xff" * (geometry.file_bytes - geometry.slots_at))

    def freeze_kvbm(self) -> None:
        self.process("kvbm").process.send_signal(signal.SIGSTOP)

    def thaw_kvbm(self) -> None:
        self.process("kvbm").process.send_signal(signal.SIGCONT)


class Wire:
    """A test's connection to a machine."""

    def __init__(self, machine: Machine, bus: NatsBus, discovery: FileDiscovery) -> None:
        self.machine = machine
        self._bus = bus
        self._discovery = discovery
        self._peers: dict[str, Peer] = {}

    # --- workers

    async def instance(self, name: str) -> Instance:
        """The address book of the process that has this name now."""
        pid = self.machine.process(name).process.pid

        async def found() -> Instance | None:
            entries = await self._discovery.list(subjects.instances_prefix(NAMESPACE))
            instances = [INSTANCE.decode(value, JSON_HEADER) for value in entries.values()]
            return next((instance for instance in instances if instance.pid == pid), None)

        return await eventually(found, f"{name} has registered")

    async def peer(self, name: str) -> Peer:
        """The frontend's end of the wire to this worker."""
        instance = (await self.instance(name)).instance
        if instance not in self._peers:
            self._peers[instance] = Peer(self._bus, instance)
            await self._peers[instance].open()
        return self._peers[instance]

    async def begin(self, name: str, tokens: list[int], max_tokens: int = 8, logprobs: int = -1, salt: str = "") -> str:
        """Returns the request's name once the worker has taken it."""
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=logprobs)
        asked = request(secrets.token_hex(8), tokens, sampling=sampling, time_left_s=LIMIT_S, salt=salt)
        reply = await (await self.peer(name)).generate(asked)
        assert isinstance(reply, Accepted), reply
        return asked.request

    async def end(self, name: str, request: str) -> Answer:
        """Waits until it is answered."""
        peer = await self.peer(name)
        assert await peer.ended(request) == "length", peer.parts(request)[-1]
        last = peer.parts(request)[-1]
        return Answer(peer.tokens(request), last.cached_tokens, last.cached_host_tokens, last.cached_disk_tokens)

    async def ask(self, name: str, tokens: list[int], max_tokens: int = 8, salt: str = "") -> Answer:
        return await self.end(name, await self.begin(name, tokens, max_tokens, salt=salt))

    async def score(self, name: str, tokens: list[int], max_tokens: int = 8, logprobs: int = 20) -> Scored:
        """Ask, with `logprobs` of the likeliest tokens at each place."""
        request = await self.begin(name, tokens, max_tokens, logprobs)
        answer = await self.end(name, request)
        parts = (await self.peer(name)).parts(request)
        return Scored(answer.tokens, [one for part in parts for one in part.logprobs or ()])

    async def embed(self, name: str, tokens: list[int], pooling: Pooling) -> NDArray[np.float32]:
        """Return a vector of length 1."""
        peer = await self.peer(name)
        sampling = Sampling(max_tokens=1, pooling=pooling)
        asked = request(secrets.token_hex(8), tokens, sampling=sampling, time_left_s=LIMIT_S)
        reply = await peer.generate(asked)
        assert isinstance(reply, Accepted), reply
        assert await peer.ended(asked.request) == "stop", peer.parts(asked.request)[-1]
        return np.frombuffer(peer.parts(asked.request)[-1].embedding, "<f4")

    async def operate(self, name: str, operation: WorkerOperation, level: int = 1) -> WorkerOperated:
        """Have an operation done on a worker; return its answer."""
        instance = await self.instance(name)
        asked = OPERATE_WORKER.encode(OperateWorker(operation, level=level))
        answer = await self._bus.request(instance.subjects["operate"], asked, timeout_s=LIMIT_S)
        return WORKER_OPERATED.decode(answer.payload, answer.headers)

    async def cancel(self, name: str, request: str) -> None:
        await (await self.peer(name)).cancel(request)

    async def reported(self, name: str, met: Callable[[LoadReport], bool]) -> None:
        """Until one of the worker's next reports is so."""
        peer = await self.peer(name)
        peer.reports.clear()
        await peer.until(lambda: any(map(met, peer.reports)))

    # --- the kvbm

    async def state(self) -> wire.LayoutState | None:
        """Return the state of the one layout; None when kvbm does not answer or no engine has attached."""
        instance = await self.instance("kvbm")
        try:
            answer = await self._bus.request(instance.subjects["stat"], b"", timeout_s=2.0)
        except Unavailable:
            return None
        layouts = wire.KVBM_STATE.decode(answer.payload, answer.headers).layouts
        return layouts[0] if layouts else None

    async def until_state(self, met: Callable[[wire.LayoutState], bool], what: str) -> wire.LayoutState:
        async def seen() -> wire.LayoutState | None:
            state = await self.state()
            return state if state is not None and met(state) else None

        return await eventually(seen, what)

    async def attached(self) -> None:
        """Wait until the workers exchange blocks with the present kvbm, and no earlier engine may still write."""
        await asyncio.to_thread(self.machine.fleet.wait_ready, *WORKERS)
        await self.until_state(
            lambda layout: layout.owners >= len(ATTACHED) and layout.host.state == "on", "all have attached"
        )
        for name in ATTACHED:
            await self.linked(name, True)

    async def linked(self, name: str, linked: bool) -> None:
        """Until the worker exchanges blocks, or does not."""
        process = self.machine.process(name)

        async def seen() -> bool:
            return await asyncio.to_thread(process.metric, "headrace_kvbm_attached") == linked

        await eventually(seen, f"{name} is {'' if linked else 'not '}linked")

    async def compute(self, name: str, tokens: list[int], tier: Tier = "host", salt: str = "") -> Answer:
        """Asked; returns when the kvbm has all of the prompt's full blocks in that tier."""
        answer = await self.ask(name, tokens, salt=salt)
        root = root_key("model", salt=salt)
        wanted = set(map(event_hash, content_keys(root, pack_tokens(tokens), BLOCK_TOKENS)))

        async def stored() -> bool:
            return wanted <= await self._blocks(tier)

        await eventually(stored, f"the prompt's blocks are in the {tier} tier")
        return answer

    async def _blocks(self, tier: Tier) -> set[int]:
        """What can be found there, by the hashes of events."""
        kvbm = (await self.instance("kvbm")).subjects["snapshot"]
        layout = await self.until_state(lambda _: True, "it answers")
        asked = SNAPSHOT_REQUEST.encode(SnapshotRequest(layout=layout.layout))
        blocks: set[int] = set()
        async with self._bus.stream(kvbm, asked, idle_timeout_s=LIMIT_S) as answers:
            async for answer in answers:
                chunk = SNAPSHOT_CHUNK.decode(answer.payload)
                if chunk.tier == tier:
                    blocks.update(block.hash for block in chunk.blocks)
        return blocks

    async def nothing_held(self) -> None:
        """Until no worker holds a block and the kvbm has no ticket."""
        for name in WORKERS:
            await self.reported(name, lambda report: not report.attempts and not report.held_blocks)
        await self.until_state(lambda layout: not any(layout.tickets.values()), "all tickets have ended")


def refusal(service: ServiceName, nats_url: str, folder: Path, *flags: str) -> str:
    """The one line that a service prints which cannot start."""
    common = ("--nats-url", nats_url, *Machine.where(folder))
    ended = subprocess.Popen(
        [sys.executable, "-m", f"services.{service}", *common, *flags],
        cwd=ROOT,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, errors = ended.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        ended.kill()
        raise AssertionError(f"it did not end:\n{ended.communicate()[1]}") from None
    assert ended.returncode == 2, errors
    assert "Traceback" not in errors
    return errors.splitlines()[-1]


@asynccontextmanager
async def connected(machine: Machine, nats_url: str) -> AsyncIterator[Wire]:
    """Within a test."""
    bus = await connect(NatsConfig(url=nats_url), "test")
    discovery = FileDiscovery(machine.folder / "discovery")
    try:
        yield Wire(machine, bus, discovery)
    finally:
        await bus.drain()
        await discovery.close()


@asynccontextmanager
async def settled(machine: Machine, nats_url: str) -> AsyncIterator[Wire]:
    """Connect to a machine on which all are attached; afterwards no block is held."""
    async with connected(machine, nats_url) as one:
        await one.attached()
        yield one
        await one.attached()
        await one.nothing_held()
