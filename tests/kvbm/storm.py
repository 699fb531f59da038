"""Seeded storms over one pool: engines that store, fetch, freeze past their deadlines and die at any point, a kvbm that
is stopped and started, a disk that goes, is damaged and comes back. Bytes that a fetch says are right are always those
that were stored under their key; and once everybody is gone every slot is free.

    .venv/bin/python -m tests.kvbm.storm FIRST COUNT
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

import msgspec

from services.kvbm import service
from services.kvbm.answers import Bounds
from services.kvbm.config import DiskConfig, KvbmConfig, PoolConfig, TiersConfig
from services.kvbm.packing import pack_slots, unpack_slots
from shared import kvbm_messages as wire
from shared.blocks import Content
from shared.errors import Unavailable
from shared.memory_bus import MemoryEvents
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

TICKET_S = 0.03
TICK_S = 0.004
ENGINES = 4
LIVES = 3
"""Of kvbm."""
LIFE_S = 0.4
RECORD_BYTES = 4096 + 8192
AT_ONCE = 4
FOLDER = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""A machine's real disk would take most of the time."""
POLICIES = ("lru", "s3-fifo", "reuse")


def storm_settings(random: Random, folder: Path) -> KvbmConfig:
    """A small pool, a smaller disk or a larger one, tickets that are soon over."""
    arenas = random.choice((1, 2))
    limit_bytes = arenas * random.choice((4, 16, 64)) * RECORD_BYTES
    return msgspec.structs.replace(
        settings(folder),
        pool=PoolConfig(directory=str(folder / "pool"), size_bytes=1 << 18, arenas=arenas, prefault_threads=1),
        disk=DiskConfig(
            str(folder / "disk"), limit_bytes, 1 << 16, min_free_bytes=0, threads=2, queue=16, retry_s=0.02
        ),
        tickets=Bounds(TICKET_S, TICKET_S, random.choice((2, 64)), 8, random.choice((0.25, 1.0))),
        tiers=TiersConfig(
            host_policy=random.choice(POLICIES),
            disk_policy=random.choice(POLICIES),
            disk_sightings=random.choice((1, 2)),
            held_share=random.choice((0.3, 1.0)),
            leaves_first=random.random() < 0.3,
        ),
    )


class Storm:
    """One seed's. `seen` counts what came about."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.random = Random(seed)
        self.folder = folder
        self.world = World(storm_settings(self.random, folder))
        self.layouts = self.random.choice(((LAYOUT,), (LAYOUT, OTHER_LAYOUT)))
        roots = [[100 * root + block for block in range(self.random.randint(1, 8))] for root in range(1, 9)]
        self.chains = [chain(*tokens) for tokens in (*roots, [*roots[0][:2], 7, 8, 9])]
        self.seen: Counter[str] = Counter()
        self.over = False
        self._names = 0

    async def run(self) -> None:
        """Raises where anything went wrong."""
        async with asyncio.TaskGroup() as tasks:
            troubles = [tasks.create_task(self._disk_trouble())]
            for life in range(LIVES):
                async with running(self.world, f"b{life}") as store:
                    if not life:
                        troubles += [tasks.create_task(self._engines()) for _ in range(ENGINES)]
                    await asyncio.sleep(LIFE_S * self.random.random())
                    if life == LIVES - 1:
                        self.over = True
                        await asyncio.wait(troubles)
                        await self._all_is_free(store)
                    await self._is_told(store)

    async def _all_is_free(self, store: Store) -> None:
        """Nobody lives: no slot is held, written to or kept from anybody, and no ticket is open."""
        for layout in store.service.layouts.open.values():

            def free() -> bool:
                now = layout.tickets.statistics()  # noqa: B023 - called before the next turn
                host = now.tiers.host
                ended = not (now.owners or now.stores or now.fetches or now.expired or now.awaited)
                return ended and not (host.writing or host.loading or host.quarantined or host.held)

            await until(free)

    async def _is_told(self, store: Store) -> None:
        """What routers have heard is what can be found."""
        for layout in list(store.service.layouts.open.values()):
            mark = layout.log.flush_all()
            router = Router()
            subscription = MemoryEvents(self.world.broker).subscribe(layout.source, lambda _sequence, _payload: None)
            for sequence, payload in await subscription.replay(0, timeout_s=LIMIT_S):
                if sequence <= mark.sequence:
                    router.take(sequence, payload)
            subscription.close()
            assert (router.digest("host_pinned"), router.digest("disk")) == (mark.host_digest, mark.disk_digest)

    # --- engines

    async def _engines(self) -> None:
        """One after the other."""
        random = self.random
        while not self.over:
            self._names += 1
            engine = self.world.engine(f"e{self._names}", layout=random.choice(self.layouts))
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
            elif self.random.random() < 0.5:
                await self._store(engine)
            else:
                await self._fetch(engine)
        except Unavailable:
            self.seen["away"] += 1
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
        """Mostly not for long, sometimes for longer than any ticket lasts."""
        await asyncio.sleep(self.random.choice((0.0, 0.0, 0.001, 0.003, 0.01, 2 * TICKET_S)))

    def _some(self) -> Sequence[Content]:
        whole = self.random.choice(self.chains)
        return whole[: self.random.randint(1, len(whole))]

    async def _store(self, engine: Engine) -> None:
        """Written to at any time until it is answered: an engine that was stopped goes on where it was."""
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
        (self.folder / "disk").touch()

    def _bring_back(self) -> None:
        try:
            (self.folder / "disk").unlink()
            (self.folder / "aside").rename(self.folder / "disk")
        except OSError:  # kvbm was faster, and has a new disk
            shutil.rmtree(self.folder / "aside")


async def one(seed: int) -> Counter[str]:
    """What came about in it. Raises where anything went wrong, with the seed's number."""
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
    """The storms `first` … `first + count - 1`, several at once, since they mostly wait; what came about in all."""
    interval_s, service.REPORT_INTERVAL_S = service.REPORT_INTERVAL_S, TICK_S
    logging.disable(logging.CRITICAL)
    try:
        seen: Counter[str] = Counter()
        for start in range(first, first + count, AT_ONCE):
            async with asyncio.TaskGroup() as tasks:
                seeds = range(start, min(start + AT_ONCE, first + count))
                running_ones = [tasks.create_task(one(seed)) for seed in seeds]
            seen = sum((task.result() for task in running_ones), seen)
        return seen
    finally:
        service.REPORT_INTERVAL_S = interval_s
        logging.disable(logging.NOTSET)


if __name__ == "__main__":
    print(dict(asyncio.run(storms(int(sys.argv[1]), int(sys.argv[2])))))
