"""The layouts that have an arena, and their disks.

    get_or_open ──▶ its arena (an unused layout may lose its own) ──▶ LayoutStore ──▶ a task brings the disk up

The disk tier is divided as the pool is: each layout has a fixed share. Files of former layouts stay as long as they fit
next to the shares of the open ones; those that were opened longest ago are removed first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from pathlib import Path

from services.kvbm.config import KvbmConfig
from services.kvbm.disk.disk import Disk
from services.kvbm.disk.format import DiskGeometry, disk_geometry
from services.kvbm.disk.io_threads import DiskThreads
from services.kvbm.disk.segments import make_room
from services.kvbm.layout.layout import LayoutStore
from services.kvbm.metrics import StoreMetrics
from services.kvbm.pool.arenas import NoArena
from services.kvbm.pool.host_pool import HostPool
from services.kvbm.tickets.errors import ArenaMissing, NotReady
from shared.errors import ConfigError
from shared.messages.kvbm import StoreLayout
from shared.pool.format import PoolUnfit
from shared.runtime.runtime import Runtime

CLOSE_LIMIT_S = 5.0
"""Seconds that the disk's running requests may take at the end; queued ones end at once."""

_log = logging.getLogger(__name__)


class Layouts:
    """The open layouts of one kvbm. `changed` is called when a layout has been opened or closed."""

    def __init__(
        self, runtime: Runtime, config: KvbmConfig, pool: HostPool, metrics: StoreMetrics, changed: Callable[[], None]
    ) -> None:
        self._runtime = runtime
        self._config = config
        self._pool = pool
        self._metrics = metrics
        self._changed = changed
        self._threads = DiskThreads(config.disk.threads, config.disk.queue) if config.disk.directory else None
        self._disks: dict[str, asyncio.Task[None]] = {}
        """The tasks that run the disks, by layout."""
        self._ending: set[asyncio.Task[None]] = set()
        """The tasks of closed layouts: each keeps its directory locked until it has ended."""
        self.open: dict[str, LayoutStore] = {}
        """The open layouts by digest; for reading only."""

    def get_or_open(self, layout: StoreLayout, former_owners: Collection[str]) -> LayoutStore:
        """Return the layout's store, opened if it is not open. `former_owners` are the engines of a former kvbm that
        may still write to any slot. Raise ArenaMissing, and NotReady if a plug-in policy cannot be made for this
        size."""
        digest = layout.digest
        in_use = [other.digest for other in self.open.values() if other.in_use]
        try:
            place = self._pool.assign_arena(digest, layout.kv.block_bytes, in_use)
        except (NoArena, PoolUnfit) as wrong:
            raise ArenaMissing(str(wrong)) from None
        if digest in self.open:
            return self.open[digest]
        if place.former_layout in self.open:
            self._drop(place.former_layout)
        try:
            made = LayoutStore(
                *(layout, place.slots, self._config, self._runtime, self._metrics),
                former_owners=former_owners,
                disk=self._disk(layout),
            )
        except ConfigError as wrong:
            raise NotReady(str(wrong)) from None
        self.open[digest] = made
        if made.disk is not None:
            self._disks[digest] = self._runtime.tasks.create_task(self._run(made.disk), name=f"disk {digest}")
        _log.info("layout %s of %s: %d slots", digest, layout.model, place.slots.arena.slots)
        self._changed()
        return made

    def _drop(self, digest: str) -> None:
        _log.info("layout %s lost its arena to another layout, as no engine used it", digest)
        layout = self.open.pop(digest)
        disk = self._disks.pop(digest, None)
        if disk is not None:
            disk.cancel()
            self._ending.add(disk)
            disk.add_done_callback(self._ending.discard)
        self._metrics.evictions.labels("host", "layout gone").inc(layout.tiers.statistics().host.ready)
        layout.stop()
        layout.close()

    # --- disks

    @property
    def _share_bytes(self) -> int:
        return self._config.disk.limit_bytes // self._config.pool.arenas

    def _disk(self, layout: StoreLayout) -> tuple[DiskGeometry, DiskThreads] | None:
        """Return where the layout's records are on disk, and the threads for them; None if it has no disk tier."""
        if self._threads is None:
            return None
        segment_bytes = self._config.disk.segment_bytes
        try:
            shape = disk_geometry(layout.digest, layout.kv.block_bytes, self._share_bytes, segment_bytes)
        except ValueError as wrong:
            _log.error("layout %s is not kept on disk: %s", layout.digest, wrong)
            return None
        return shape, self._threads

    async def _run(self, disk: Disk) -> None:
        if self._ending:
            await asyncio.wait(self._ending)
        await self._make_room()
        await disk.run()

    async def _make_room(self) -> None:
        threads = self._threads
        assert threads is not None
        directory, keep = Path(self._config.disk.directory), frozenset(self.open)
        keep_bytes = max(0, self._config.disk.limit_bytes - self._share_bytes * len(keep))
        try:
            removed = await threads.upkeep(lambda _: make_room(directory, keep_bytes, keep), lambda: None)
        except FileNotFoundError:  # the disk tier makes the directory, or logs why not
            return
        except OSError as wrong:  # the disk tier comes up, or logs the same
            _log.info("old layouts were not removed from disk: %s", wrong)
            return
        for layout in removed:
            _log.info("old layout %s was removed from disk: %d bytes", layout.layout, layout.used_bytes)

    # --- the end

    def stop(self) -> None:
        """Begin nothing new in any layout, and refuse the fetches that wait."""
        for layout in self.open.values():
            layout.stop()

    async def close(self) -> bool:
        """End the disks, after `stop`. Return False if a disk did not answer in time; memory of the pool is in use then
        until the process ends."""
        for task in self._disks.values():
            task.cancel()
        ending = [*self._disks.values(), *self._ending]
        if ending:
            await asyncio.wait(ending, timeout=CLOSE_LIMIT_S)
        ended = self._threads is None or await self._threads.close(CLOSE_LIMIT_S)
        await asyncio.sleep(0)  # the disk's refusals are delivered in the next turn
        if not ended:
            _log.warning("the disk did not answer in %g s: the last blocks were not written", CLOSE_LIMIT_S)
        else:
            for layout in self.open.values():
                layout.close()
        return ended

    def validate(self) -> None:
        """Raise AssertionError if anything contradicts itself."""
        self._pool.arenas.validate()
        assert set(self.open) <= set(self._pool.arenas.layouts), "a layout without an arena"
        for layout in self.open.values():
            layout.validate()
