"""A process that shares blocks with another, or reads them; a test commands it with lines of JSON.

    python -m tests.worker.sharing.sharing_process share|read SETTINGS

It ends when its standard input ends.
"""

from __future__ import annotations

import hashlib
import os
import select
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import Struct

from services.worker.contracts.mover import Copy
from services.worker.sharing.host_pages import HostMapper, HostPages, SharedHostCopier
from services.worker.sharing.memory import ExportedPages, PageMapper
from services.worker.sharing.messages import NotShared, SharingIdentity, SlotsShared
from services.worker.sharing.page_reader import PageReader
from services.worker.sharing.page_sharer import PageSharer
from services.worker.sharing.shares import SharingLimits
from services.worker.transfer.block_shape import BlockShape
from services.worker.transfer.copier import Copier
from shared.pool.lock import hold_owner
from tests.worker.transfer.layer_major import layer_major

IDENTITY = SharingIdentity("a-model", "0123456789abcdef", "bfloat16", kind="host")
GENERATION = 77


class Settings(Struct):
    """How a process begins."""

    directory: str
    owner: str
    kind: Literal["host", "cuda"] = "host"
    device: int = 0
    fragments: int = 6
    fragment_bytes: int = 832
    slots: int = 24
    layer_major: bool = True
    path: Literal["rows", "batch", "kernel"] | None = None
    limits: SharingLimits = SharingLimits()
    model: str = IDENTITY.model
    layout: str = IDENTITY.layout
    dtype: str = IDENTITY.dtype
    rank: int = 0
    ranks: int = 1
    generation: int = GENERATION

    @property
    def identity(self) -> SharingIdentity:
        return SharingIdentity(self.model, self.layout, self.dtype, self.rank, self.ranks, self.kind)

    @property
    def block_bytes(self) -> int:
        return self.fragments * self.fragment_bytes

    def shape(self, at: int) -> BlockShape:
        """Return where the blocks lie in memory that begins at `at`."""
        if self.layer_major:
            return layer_major(at, self.fragments, self.fragment_bytes, self.slots)
        regions = tuple(at + fragment * self.fragment_bytes for fragment in range(self.fragments))
        return BlockShape(regions, self.fragment_bytes, self.block_bytes, self.slots)


def key_of(slot: int) -> bytes:
    """Return the content key under which the sharer has a slot."""
    return slot.to_bytes(16, "little")


class Memory:
    """The memory of one process, whatever its kind, and its blocks as bytes."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        size_bytes = settings.slots * settings.block_bytes
        self.pages: ExportedPages
        self._array: Any
        if settings.kind == "host":
            host = HostPages(size_bytes)
            self.pages, self._array = host, host.array
        else:
            from services.worker.sharing.device_pages import DevicePages

            pages = DevicePages(size_bytes, settings.device)
            self.pages, self._array = pages, pages.array()
        self.shape = settings.shape(self.pages.address)

    def fill(self, seed: int) -> None:
        """Fill every slot."""
        for slot in range(self._settings.slots):
            self.write(slot, block_of(seed, slot, self._settings.block_bytes))

    def write(self, slot: int, block: bytes) -> None:
        size_bytes = self.shape.fragment_bytes
        for index, at in enumerate(self._places(slot)):
            part = np.frombuffer(block, np.uint8)[index * size_bytes :][:size_bytes]
            if self._settings.kind == "host":
                self._array[at : at + size_bytes] = part
            else:
                self._array[at : at + size_bytes].set(part)
                self._array.device.synchronize()

    def read(self, slot: int) -> bytes:
        size_bytes = self.shape.fragment_bytes
        parts = [self._array[at : at + size_bytes] for at in self._places(slot)]
        return b"".join(
            bytes(part.tobytes() if self._settings.kind == "host" else part.get().tobytes()) for part in parts
        )

    def _places(self, slot: int) -> list[int]:
        return [region - self.pages.address + slot * self.shape.stride_bytes for region in self.shape.regions]


def block_of(seed: int, slot: int, block_bytes: int) -> bytes:
    return np.random.default_rng([seed, slot]).bytes(block_bytes)


def digest(block: bytes) -> str:
    return hashlib.sha256(block).hexdigest()


class LenderProcess:
    """Answers a test's commands while it shares."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        directory = Path(settings.directory)
        self._lock = hold_owner(directory, settings.owner)
        self._memory = Memory(settings)
        self._memory.fill(0)
        self._pins: Counter[int] = Counter()
        self._computed = settings.slots
        """Slots from this one on hold nothing yet."""
        self.sharer = PageSharer(
            directory,
            settings.owner,
            self._memory.pages,
            self._memory.shape,
            settings.identity,
            settings.generation,
            self,
            settings.limits,
        )

    def fileno(self) -> int:
        return self.sharer.fileno()

    def turn(self) -> None:
        self.sharer.turn(time.monotonic())
        self.sharer.watch()
        self.sharer.sharing.validate()

    def state(self) -> dict[str, Any]:
        """Return what is shared."""
        sharing = self.sharer.sharing
        pinned = sorted(slot for slot, count in self._pins.items() if count)
        assert min(self._pins.values(), default=0) >= 0, "a slot was unpinned too often"
        return {"readers": sharing.readers, "pinned": pinned, "may_free": self.sharer.may_free}

    def watch(self, times: int) -> dict[str, Any]:
        for _ in range(times):
            self.turn()
        return self.state()

    def fill(self, seed: int) -> None:
        self._memory.fill(seed)

    def digests(self) -> list[str]:
        return [digest(self._memory.read(slot)) for slot in range(self.settings.slots)]

    def close_sharing(self) -> None:
        self.sharer.close_sharing()

    def compute(self, slots: int) -> None:
        """Have as many slots from now on."""
        self._computed = slots

    def share(self, keys: Sequence[bytes]) -> list[int]:
        slots = [int.from_bytes(key, "little") for key in keys]
        there = list(takewhile(lambda slot: slot < self._computed, slots))
        self._pins.update(there)
        return there

    def take_back(self, slots: Sequence[int]) -> None:
        self._pins.subtract(slots)


class ReaderProcess:
    """Answers a test's commands while it reads."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._lock = hold_owner(Path(settings.directory), settings.owner)
        self._memory = Memory(settings)
        self._mapper: PageMapper
        if settings.kind == "host":
            self._mapper = HostMapper()
        else:
            from services.worker.sharing.device_pages import DeviceMapper

            self._mapper = DeviceMapper(settings.device)
        self.reader: PageReader | None = None
        self._copier: Copier | None = None
        self._answers: dict[int, SlotsShared | NotShared] = {}

    def fileno(self) -> int:
        return self.reader.fileno() if self.reader is not None and not self.reader.ended else -1

    def turn(self) -> None:
        if self.reader is not None:
            self._answers |= {answer.number: answer for answer in self.reader.turn()}

    def connect(self, sharer: str) -> str:
        """Connect and map; return why not."""
        self.reader = reader = PageReader(
            Path(self.settings.directory),
            sharer,
            self.settings.owner,
            self.settings.identity,
            self._memory.shape,
            self._mapper,
            self.settings.generation,
        )
        while reader.theirs is None and not reader.ended:
            self._wait()
        if reader.theirs is not None:
            self._copier = self._new_copier(reader.theirs)
        return reader.ended

    def read(self, number: int, slots: list[int]) -> Any:
        """Read; return the first slots that are shared, or a refusal's code."""
        assert self.reader is not None
        self.reader.read(number, [key_of(slot) for slot in slots])
        return self.answer(number)

    def answer(self, number: int) -> Any:
        """Return the next slots that are shared, or a refusal's code, or why the reader has ended."""
        assert self.reader is not None
        while number not in self._answers and not self.reader.ended:
            self._wait()
        answer = self._answers.pop(number, None)
        if answer is None:
            return self.reader.ended
        return answer.slots if isinstance(answer, SlotsShared) else answer.code

    def copy(self, pairs: list[tuple[int, int]]) -> bool:
        """Copy blocks; return whether they are good."""
        assert self.reader is not None
        assert self._copier is not None
        copies, most = [Copy(*pair) for pair in pairs], self._copier.group_blocks
        for first in range(0, len(copies), most):
            self._copier.begin(copies[first : first + most], loads=True).wait()
        return self.reader.connected

    def copy_endlessly(self, pairs: list[tuple[int, int]]) -> None:
        """Copy again and again, in a thread; each good round prints a line, and the first other one the last line."""

        def go_on() -> None:
            while self.copy(pairs):
                say("copied")
            say("discarded")

        threading.Thread(target=go_on, daemon=True).start()

    def state(self) -> dict[str, Any]:
        assert self.reader is not None
        return {"ended": self.reader.ended, "closing": self.reader.closing}

    def release(self, number: int) -> None:
        assert self.reader is not None
        self.reader.release(number)

    def leave(self) -> None:
        assert self.reader is not None
        if self._copier is not None:
            self._copier.close()
        self.reader.leave()

    def digests(self) -> list[str]:
        return [digest(self._memory.read(slot)) for slot in range(self.settings.slots)]

    def poke(self) -> None:
        """Write to the sharer's memory; that ends this process, if the memory is not writable here."""
        import ctypes

        assert self.reader is not None
        assert self.reader.theirs is not None
        ctypes.memset(self.reader.theirs.regions[0], 0, 1)

    def _new_copier(self, theirs: BlockShape) -> Copier:
        if self.settings.kind == "host":
            return SharedHostCopier(theirs, self._memory.shape)
        from services.worker.sharing.device_copier import SharedDeviceCopier

        return SharedDeviceCopier(theirs, self._memory.shape, self.settings.device, path=self.settings.path)

    def _wait(self) -> None:
        select.select([self.fileno()], [], [], 1)
        self.turn()


def say(answer: Any) -> None:
    os.write(1, msgspec.json.encode(answer) + b"\n")


def main() -> None:
    settings = msgspec.json.decode(sys.argv[2], type=Settings)
    process = LenderProcess(settings) if sys.argv[1] == "share" else ReaderProcess(settings)
    say("ready")
    commands = b""
    while True:
        descriptors = [0] if process.fileno() < 0 else [0, process.fileno()]
        readable, _, _ = select.select(descriptors, [], [], 0.02)
        process.turn()
        if 0 not in readable:
            continue
        received = os.read(0, 1 << 16)
        if not received:
            return
        *lines, commands = (commands + received).split(b"\n")
        for line in lines:
            name, arguments = msgspec.json.decode(line)
            say(getattr(process, name)(*arguments))


if __name__ == "__main__":
    main()
