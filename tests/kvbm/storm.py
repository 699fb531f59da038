"""Seeded storms over one pool: engines that store, fetch, freeze past their deadlines and die at any point, a kvbm that
is stopped or lost and started, connections that break, a disk that goes, is slow, damaged, and comes back.
Bytes that a fetch says are right are always those that were stored under their key; an engine that lives on comes to
rest, and the kvbm keeps nothing for it; and once everybody is gone every slot is free.

    .venv/bin/python -m tests.kvbm.storm FIRST COUNT

tests/kvbm/peer_storm.py has storms of two machines whose kvbms read from each other.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random, random
from typing import Any, TypeVar

import msgspec
import pytest

from services.kvbm import service
from services.kvbm.config import DiskConfig, KvbmConfig, PeersConfig, PoolConfig, TiersConfig
from services.kvbm.disk.segments import Segments
from services.kvbm.peers import choice
from services.kvbm.tickets.packing import pack_slots, unpack_slots
from services.kvbm.tickets.results import TicketLimits
from services.worker.kv_connector import connector, socket_client, stores
from shared.blocks import Content
from shared.bus.memory_events import MemoryEventBus
from shared.errors import Unavailable
from shared.messages import kvbm as wire
from tests.kvbm.chains import chain, keys
from tests.kvbm.store_rig import (
    LAYOUT,
    LIMIT_S,
    OTHER_LAYOUT,
    Engine,
    Router,
    Store,
    World,
    running,
    settings,
    until,
    worker_in,
)
from tests.kvbm.whole_engine import ANSWER_S, Faults, Worker

TICKET_S = 0.03
TICK_S = 0.004
ENGINES = 4
LIVES = 3
"""The number of lives of kvbm in one storm."""
LIFE_ACTS = 200
LIFE_S = 2.0
"""The most that happens in one life, and the most seconds that it lasts."""
RECORD_BYTES = 4096 + 8192
PEER_POOL_BYTES, PEER_BLOCKS, PEER_TICKET_S = 1 << 20, 40, 0.4
"""The pool of a machine with a peer, the blocks of the longest chain there, and the seconds of its tickets: a read from
the other machine takes a while."""
AT_ONCE = 4
FOLDER = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""A machine's real disk would take most of the time."""
POLICIES = ("lru", "reuse")
T = TypeVar("T")


def storm_settings(draw: Random, folder: Path, arenas: int) -> KvbmConfig:
    """Draw the settings: a small pool, a smaller or larger disk, tickets that expire soon."""
    limit_bytes = arenas * draw.choice((4, 16, 64)) * RECORD_BYTES
    return msgspec.structs.replace(
        settings(folder),
        pool=PoolConfig(
            directory=str(folder / "pool"),
            size_bytes=(1 + arenas * draw.choice((1, 2))) << 16,
            arenas=arenas,
            prefault_threads=1,
        ),
        disk=DiskConfig(
            str(folder / "disk"), limit_bytes, 1 << 16, min_free_bytes=0, threads=2, queue=16, retry_s=0.02
        ),
        tickets=TicketLimits(TICKET_S, TICKET_S, draw.choice((2, 64)), 8, draw.choice((0.25, 1.0))),
        tiers=TiersConfig(
            host_policy=draw.choice(POLICIES),
            disk_policy=draw.choice(POLICIES),
            disk_sightings=draw.choice((1, 2)),
            held_share=draw.choice((0.3, 1.0)),
        ),
    )


class Storm:
    """The storm of one seed. `seen` counts what happened."""

    def __init__(self, seed: int, folder: Path, *, peers: PeersConfig | None = None, names_from: int = 0) -> None:
        """`peers`: how its kvbm reads from other machines. None if it reads from none. Its engines are numbered from
        `names_from` on."""
        self.random = Random(seed)
        self.folder = folder
        self.workers = self.random.choice((0, 0, 2, 3))
        """The number of workers; the other clients are engines that go wrong in ways of their own."""
        arenas = 2 if self.workers else self.random.choice((1, 2))
        self.answer_s = ANSWER_S
        """The seconds that an engine waits for an answer."""
        self.ticket_s = TICKET_S
        config = storm_settings(self.random, folder, arenas)
        if peers is not None:
            pool = msgspec.structs.replace(config.pool, size_bytes=PEER_POOL_BYTES)
            self.ticket_s, self.answer_s = PEER_TICKET_S, 20 * ANSWER_S
            tickets = TicketLimits(self.ticket_s, self.ticket_s, 64, PEER_BLOCKS, 1.0)
            config = msgspec.structs.replace(config, peers=peers, pool=pool, tickets=tickets)
        self.world = World(config)
        self.faults = Faults(self.random, self.world.sockets)
        self.layouts = (
            (LAYOUT,) if self.workers or peers is not None else self.random.choice(((LAYOUT,), (LAYOUT, OTHER_LAYOUT)))
        )
        longest = 8 if peers is None else PEER_BLOCKS
        roots = [[100 * root + block for block in range(self.random.randint(1, longest))] for root in range(1, 9)]
        self.chains = [chain(*tokens) for tokens in (*roots, [*roots[0][:2], 7, 8, 9])]
        self.seen: Counter[str] = Counter()
        self.over = False
        self.life = 0
        """The number of the kvbm that answers now."""
        self._sleeper = ""
        """An engine that sleeps from one life into the next, in the middle of what it writes."""
        self._names = names_from
        self._answered = 0
        self._workers: list[Worker] = []
        self._last: asyncio.Future[Store] = asyncio.get_running_loop().create_future()
        """The last kvbm, which meets no more faults."""

    async def run(self) -> None:
        """Run the storm. Raises where anything went wrong."""
        async with asyncio.TaskGroup() as tasks:
            troubles = [tasks.create_task(self._disk_trouble())]
            for life in range(LIVES):
                async with running(self.world, f"b{life}") as store:
                    self.life = life
                    if not life:
                        troubles += self.begin(tasks)
                    await self._lived()
                    if life == LIVES - 1:
                        await self.end(store, troubles)
                    await self._is_told(store)
                    if self.random.random() < 0.5:
                        store.lose()

    def begin(self, tasks: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Start the engines and the workers. Return their tasks."""
        begun = [tasks.create_task(self._engines()) for _ in range(ENGINES - self.workers)]
        return begun + [tasks.create_task(self._worker(f"w{name}")) for name in range(self.workers)]

    async def end(self, store: Store, troubles: Sequence[asyncio.Task[None]]) -> None:
        """Let all that goes on come to its end, and check that nothing is held. `store` meets no more faults."""
        self.over = True
        self.faults.mend()
        self._last.set_result(store)
        await asyncio.wait(troubles)
        for each in troubles:
            each.result()
        self.seen.update(self.faults.seen)
        await self._all_is_free(store)

    async def _lived(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(LIFE_S):
                await self.acted(self.random.randrange(LIFE_ACTS))

    async def acted(self, more: int) -> None:
        """Wait until so much more has been done, however busy the machine is."""
        ends = self._acts() + more
        while self._acts() < ends:  # noqa: ASYNC110 - all of them are watched
            await asyncio.sleep(TICK_S)

    def _acts(self) -> int:
        return self._answered + sum(one.acts for one in self._workers)

    async def _all_is_free(self, store: Store) -> None:
        """Check that after all engines died no slot is held, written to or quarantined, and no ticket is open."""
        for layout in store.service.layouts.open.values():

            def free() -> bool:
                now = layout.tickets.statistics()  # noqa: B023 - called before the next turn
                host = now.tiers.host
                ended = not (now.owners or now.stores or now.fetches or now.expired or now.awaited)
                return ended and not (host.writing or host.loading or host.quarantined or host.held)

            await until(free)

    async def _is_told(self, store: Store) -> None:
        """Check that routers have heard of exactly the blocks that can be found."""
        for layout in list(store.service.layouts.open.values()):
            mark = layout.log.flush_all()
            router = Router()
            subscription = MemoryEventBus(self.world.broker.events).subscribe(
                layout.log.source, lambda _sequence, _payload: None
            )
            for sequence, payload in await subscription.replay(0, timeout_s=LIMIT_S):
                if sequence <= mark.sequence:
                    router.take(sequence, payload)
            subscription.close()
            assert (router.digest("host_pinned"), router.digest("disk")) == (mark.host_digest, mark.disk_digest)

    # --- engines

    async def _engines(self) -> None:
        """Run one engine after the other."""
        random = self.random
        while not self.over:
            self._names += 1
            engine = self.world.engine(f"e{self._names}", layout=random.choice(self.layouts))
            engine.answer_s = self.answer_s
            engine.hold()
            lease = await worker_in(self.world, engine.worker) if random.random() < 0.2 else None
            try:
                for _ in range(random.randint(1, 80)):
                    if not self.over:
                        await self._act(engine)
                if lease is not None:
                    await lease.close()
                    await self._act(engine)
            finally:
                engine.die()
                self.seen["died"] += 1

    async def _act(self, engine: Engine) -> None:
        try:
            if engine.slots is None or self.random.random() < 0.05:
                await self._attach(engine)
            elif self.world.config.peers.listen and self.random.random() < 0.2:
                await self._discard(engine)  # so that there is something to read from the other machine
            elif self.random.random() < 0.5:
                await self._store(engine)
            else:
                await self._fetch(engine)
            self._answered += 1
        except Unavailable:
            self.seen["away"] += 1
            engine.unmap()  # it may be attached, to another arena: whoever is not answered attaches anew
            await asyncio.sleep(0.01)

    async def _attach(self, engine: Engine) -> None:
        reply = await engine.try_attach()
        if isinstance(reply, wire.Attached):
            engine.map(reply)
        else:
            assert reply.code in ("not_ready", "no_arena"), reply
            await self._refused(engine, reply)

    async def _refused(self, engine: Engine, reply: wire.KvbmRefused) -> None:
        self.seen[reply.code] += 1
        if reply.code == "unknown_owner":
            await self._attach(engine)
        else:
            await self._pause()

    async def _pause(self) -> None:
        """Pause, mostly for a moment, sometimes for longer than any ticket lasts."""
        pause_s = self.random.choice((0.0, 0.0, 0.001, 0.003, 0.01, 2 * self.ticket_s))
        seldom = self.world.config.peers.listen and self.random.random() < 0.8  # tickets last long there
        await asyncio.sleep(min(pause_s, 0.01) if seldom else pause_s)

    async def _sleep(self, engine: Engine) -> None:
        self._sleeper, life = engine.owner, self.life
        await until(lambda: self.life > life or self.over)
        await asyncio.sleep(0.05 * self.random.random())
        self._sleeper = ""
        self.seen["slept"] += 1

    def _some(self) -> Sequence[Content]:
        whole = self.random.choice(self.chains)
        return whole[: self.random.randint(1, len(whole))]

    async def _store(self, engine: Engine) -> None:
        """Store blocks, and write until the reply comes: an engine that was stopped goes on where it was."""
        contents = self._some()
        granted = await engine.try_store(contents)
        if isinstance(granted, wire.KvbmRefused):
            assert granted.code in ("unknown_owner", "full"), granted
            await self._refused(engine, granted)
            return
        written: list[int] = []
        for index, slot in zip(granted.blocks, unpack_slots(granted.slots), strict=True):
            if self.random.random() < 0.05:
                await self._pause()
            if not self._sleeper and not self.world.config.peers.listen and self.random.random() < 0.1:
                await self._sleep(engine)
            if self.random.random() < 0.03:
                break
            engine.write_one(slot, contents[index])
            written.append(slot)
        if not granted.ticket or self.random.random() < 0.1:
            self.seen["forgotten"] += granted.ticket > 0
            return
        if self.random.random() < 0.1:
            reply = await engine.abort(granted.ticket)
        else:
            reply = await engine.commit(granted.ticket, pack_slots(written))
        if isinstance(reply, wire.KvbmRefused):
            assert reply.code in ("unknown_owner", "unknown_ticket", "expired"), reply
            await self._refused(engine, reply)
        else:
            self.seen["written"] += len(written)

    async def _discard(self, engine: Engine) -> None:
        reply = await engine.discard(keys(list(self._some())))
        if isinstance(reply, wire.KvbmRefused):
            assert reply.code == "unknown_owner", reply
            await self._refused(engine, reply)

    async def _fetch(self, engine: Engine) -> None:
        contents = self._some()
        replies = await engine.fetch(keys(list(contents)))
        ticket = end = 0
        for reply in replies:
            if isinstance(reply, wire.KvbmRefused):
                assert reply.code in ("unknown_owner", "unknown_ticket", "expired", "full"), reply
                await self._refused(engine, reply)
                return
            if self.random.random() < 0.1:
                await self._pause()
            assert reply.first == end, "out of order"
            right = engine.read(reply, contents[end : end + len(reply.slots) // 4])
            end += len(right)
            ticket = reply.ticket
            self.seen["right from disk" if reply.disk else "right from memory"] += sum(right)
            self.seen["stale"] += len(right) - sum(right)
        if self.random.random() < 0.9:
            await engine.release(ticket)

    # --- workers

    async def _worker(self, name: str) -> None:
        """Run a worker's engines, one after the other; the last one comes to rest."""
        one = Worker(Path(self.world.config.pool.directory), name, self.random, self.faults)
        self._workers.append(one)
        while True:
            engine = await one.life(self.random.randint(1, 400), lambda: self.over, 2 * self.ticket_s)
            try:
                if self.over:
                    await one.rest(engine, (await self._last).service)
            finally:
                one.die(engine)
                self.seen["died"] += 1
                self.seen["saved"] += int(engine.exchanged.saved_blocks)
                self.seen["loaded"] += int(engine.exchanged.loaded_blocks)
                self.seen["not loaded"] += int(engine.exchanged.bad_blocks)
                self.seen["used"] += engine.host_tokens + engine.disk_tokens
            if self.over:
                return

    # --- the disk

    async def _disk_trouble(self) -> None:
        while not self.over:
            await asyncio.sleep(0.05 * self.random.random())
            with suppress(FileNotFoundError):  # kvbm makes and removes files, too
                match self.random.choice(("gone", "damaged", "cut", "well", "well")):
                    case "gone":
                        self._take_away()
                        await asyncio.sleep(0.05 * self.random.random())
                        self._bring_back()
                    case "damaged":
                        with self._segment().open("r+b") as segment:
                            segment.seek(self.random.randrange(1 << 16))
                            segment.write(self.random.randbytes(3))
                    case "cut":
                        with self._segment().open("r+b") as segment:
                            segment.truncate(4096 * self.random.randrange(16))
                    case _:
                        pass

    def _segment(self) -> Path:
        segments = sorted((self.folder / "disk").glob("*/segment-*"))
        return self.random.choice([*segments, self.folder / "none"])

    def _take_away(self) -> None:
        (self.folder / "disk").rename(self.folder / "aside")
        with suppress(IsADirectoryError):  # kvbm was faster, and has a new disk
            (self.folder / "disk").touch()

    def _bring_back(self) -> None:
        try:
            (self.folder / "disk").unlink()
            (self.folder / "aside").rename(self.folder / "disk")
        except OSError:  # kvbm was faster, and has a new disk
            shutil.rmtree(self.folder / "aside")


async def one(seed: int) -> Counter[str]:
    """Run the storm of one seed. Return what happened. Raises where anything went wrong, with the seed's number."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-storm-", dir=FOLDER))
    try:
        async with asyncio.timeout(LIMIT_S * 3):
            storm = Storm(seed, folder)
            await storm.run()
            return storm.seen
    except BaseException as error:
        error.add_note(f".venv/bin/python -m tests.kvbm.storm {seed} 1")
        raise
    finally:
        shutil.rmtree(folder)


async def storms(first: int, count: int) -> Counter[str]:
    """Run the storms `first` … `first + count - 1`, several at once, since they mostly wait. Return what happened in
    all."""
    with hurried():
        seen: Counter[str] = Counter()
        for start in range(first, first + count, AT_ONCE):
            async with asyncio.TaskGroup() as tasks:
                seeds = range(start, min(start + AT_ONCE, first + count))
                running_ones = [tasks.create_task(one(seed)) for seed in seeds]
            seen = sum((task.result() for task in running_ones), seen)
        return seen


@contextmanager
def hurried() -> Iterator[None]:
    """Shorten what is waited for, make disks bad, and log nothing."""
    logging.disable(logging.CRITICAL)
    try:
        with pytest.MonkeyPatch.context() as faster:
            faster.setattr(service, "REPORT_INTERVAL_S", TICK_S)
            faster.setattr(stores, "COLLECT_S", TICK_S / 2)
            faster.setattr(socket_client, "RETRY_S", TICK_S)
            faster.setattr(connector, "BACK_OFF_FIRST_S", TICK_S)
            faster.setattr(connector, "BACK_OFF_MOST_S", 8 * TICK_S)
            faster.setattr(choice, "REST_S", 4 * TICK_S)
            faster.setattr(choice, "REST_MOST_S", 16 * TICK_S)
            faster.setattr(choice, "RATE_S", 16 * TICK_S)
            for name in ("read", "write"):
                faster.setattr(Segments, name, _bad(getattr(Segments, name)))
            yield
    finally:
        logging.disable(logging.NOTSET)


def _bad(request: Callable[..., T]) -> Callable[..., T]:
    """Make a disk request that is slow now and then, and fails seldom; it runs in a thread, so no seed says when."""

    def bad(*record: Any) -> T:
        roll = random()
        if roll < 0.02:
            time.sleep(2 * TICKET_S)
        if roll < 0.002:
            raise OSError(errno.EIO, "a bad sector")
        return request(*record)

    return bad


if __name__ == "__main__":
    print(dict(asyncio.run(storms(int(sys.argv[1]), int(sys.argv[2])))))
