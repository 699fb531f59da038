"""Seeded storms over two machines whose kvbms read from each other while their engines store, fetch, abort and die.

machine a: kvbm, engines ──proxy──▶ machine b's port        each machine is a process (tests/kvbm/peer_storm_machine.py)
machine b: kvbm, engines ──proxy──▶ machine a's port        each proxy is cut and hangs as the seed says

Either machine is frozen, cut off, and killed; it comes back under the same name with another epoch. Every block that an
engine is given has the right bytes. After all faults each reads from the other again. A machine comes to rest while the
other is frozen or gone: no slot, ticket, read or loan is held for ever.

    .venv/bin/python -m tests.kvbm.peer_storm FIRST COUNT
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

import msgspec

from tests.chaos.proxy import Proxy
from tests.kvbm.storm import FOLDER
from tests.servers import free_port

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240.0
PAUSE_S = 0.004
"""For each 64 KiB between the machines, so that faults befall reads that are under way."""
ACTS = 60
"""The most stores and fetches of a machine between two faults."""
Kind = Literal["freeze", "cut", "hang", "kill", "leave"]
"""leave: the machine leaves the address book of the other for a while, though it is there."""


class Machine:
    """One machine, life after life."""

    def __init__(self, folder: Path, name: str, seed: int) -> None:
        self.name = name
        self.port = free_port()
        self.proxy = Proxy(free_port(), self.port, PAUSE_S)
        self.seen: Counter[str] = Counter()
        self._folder = folder / name
        self._folder.mkdir()
        self._seed = seed
        self._life = 0
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, other: Machine) -> None:
        """Start it, with another epoch than before."""
        self._life += 1
        arguments = [str(self._folder), self.name, str(self.port), str(self._seed), str(self._life)]
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.kvbm.peer_storm_machine", *arguments), cwd=ROOT, stdin=pipe, stdout=pipe
        )
        assert await self.answer() == {"ready": True}
        await self.see(other)

    async def see(self, other: Machine, *, there: bool = True) -> None:
        """Have the other in the address book, or not."""
        await self.ask("peer", name=other.name, at=f"127.0.0.1:{other.proxy.port}" if there else "")

    async def ask(self, do: str, **more: Any) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode({"do": do, **more}) + b"\n")
        await self._process.stdin.drain()

    async def answer(self) -> dict[str, Any]:
        """Return the next answer. Raises where the machine has ended instead."""
        assert self._process is not None
        assert self._process.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            line = await self._process.stdout.readline()
        assert line, f"machine {self.name} has ended"
        return msgspec.json.decode(line, type=dict[str, Any])

    async def act(self, more: int) -> None:
        """Return when its engines have done so much more."""
        await self.ask("act", more=more)
        await self.answer()

    async def read(self) -> None:
        """Return when it has read more blocks of the other."""
        await self.ask("read")
        await self.answer()

    async def rest(self) -> None:
        """Return when its engines have ended and nothing is held."""
        await self.ask("rest")
        self.seen.update((await self.answer())["seen"])

    async def end(self) -> None:
        await self.ask("end")
        assert self._process is not None
        async with asyncio.timeout(LIMIT_S):
            assert await self._process.wait() == 0, f"machine {self.name} failed"

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        assert self._process.returncode is None, f"machine {self.name} has ended"
        self._process.send_signal(number)

    async def kill(self) -> None:
        """End it, if it runs."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


async def _befall(kind: Kind, one: Machine, other: Machine, for_s: float) -> None:
    match kind:
        case "freeze":
            one.send(signal.SIGSTOP)
            await asyncio.sleep(for_s)
            one.send(signal.SIGCONT)
        case "cut":
            await one.proxy.sever()
            await asyncio.sleep(for_s)
            await one.proxy.mend()
        case "hang":
            await one.proxy.hang()
            await asyncio.sleep(for_s)
            await one.proxy.mend()
        case "kill":
            await one.kill()
            await asyncio.sleep(for_s)
            await one.start(other)
        case "leave":
            await other.see(one, there=False)
            await asyncio.sleep(for_s)
            await other.see(one)


async def _rest(machines: tuple[Machine, Machine], draw: Random) -> None:
    """One comes to rest while the other is as the seed says; then the other does."""
    one, other = draw.sample(machines, 2)
    match draw.choice(("there", "frozen", "hung", "gone")):
        case "frozen":
            other.send(signal.SIGSTOP)
            await one.rest()
            other.send(signal.SIGCONT)
        case "hung":
            await other.proxy.hang()
            await one.proxy.hang()
            await one.rest()
            await asyncio.gather(one.proxy.mend(), other.proxy.mend())
        case "gone":
            await other.kill()
            await one.rest()
            await one.end()
            return
        case _:
            await one.rest()
    await other.rest()
    for each in machines:
        await each.end()


async def one(seed: int) -> Counter[str]:
    """Run the storm of one seed. Return what happened. Raises where anything went wrong, with the seed's number."""
    draw = Random(f"peers {seed}")
    folder = Path(tempfile.mkdtemp(prefix="headrace-peer-storm-", dir=FOLDER))
    machines = Machine(folder, "a", 2 * seed), Machine(folder, "b", 2 * seed + 1)
    seen: Counter[str] = Counter()
    try:
        for each in machines:
            await each.proxy.mend()
        await asyncio.gather(machines[0].start(machines[1]), machines[1].start(machines[0]))
        for kind in draw.sample(get_args(Kind), len(get_args(Kind))):
            await draw.choice(machines).act(draw.randint(1, ACTS))
            seen[kind] += 1
            struck, other = draw.sample(machines, 2)
            await _befall(kind, struck, other, draw.choice((0.02, 0.1, 0.4, 0.8)))
        for each in machines:
            await each.read()
        await _rest(machines, draw)
        return seen + machines[0].seen + machines[1].seen
    except BaseException as error:
        error.add_note(f".venv/bin/python -m tests.kvbm.peer_storm {seed} 1")
        raise
    finally:
        for each in machines:
            await each.kill()
            await each.proxy.sever()
        shutil.rmtree(folder)


async def storms(first: int, count: int) -> Counter[str]:
    """Run the storms `first` … `first + count - 1`, one after the other. Return what happened in all."""
    return sum([await one(seed) for seed in range(first, first + count)], Counter())


if __name__ == "__main__":
    print(dict(asyncio.run(storms(int(sys.argv[1]), int(sys.argv[2])))))
