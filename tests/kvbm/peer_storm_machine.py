"""One of the two machines of a storm, as a process that may be frozen and killed at any time: a kvbm, and engines that
store, fetch, freeze past their deadlines and die (tests/kvbm/storm.py), until its standard input says that it is over.

    python -m tests.kvbm.peer_storm_machine DIRECTORY NAME PORT SEED LIFE

A machine that starts again has the same directory, name and port, and another epoch. Commands and answers are lines of
JSON:

    peer     the other machine's kvbm is in the address book from now on, or no more
    act      the answer comes when the engines have done so much more
    read     the answer comes when more blocks of the other machine were read
    rest     all engines end: when nothing is held any more, the answer says what happened
    end      the process ends
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from services.kvbm.config import PeersConfig
from shared import subjects
from shared.discovery.contract import Registration
from shared.discovery.memory import MemoryDiscovery
from shared.messages.cards import INSTANCE, EventSource, Instance
from shared.messages.codec import JSON_HEADER
from tests.kvbm.peer_rig import rests
from tests.kvbm.store_rig import LAYOUT, NAMESPACE, OTHER_LAYOUT, Store, World, running, until
from tests.kvbm.storm import Storm, hurried
from tests.worker.kvbm_world import STORE

LIFE_NAMES = 100_000
"""More than the engines of one life, whose names no other life has."""
T = TypeVar("T")
_READ = "headrace_kvbm_peer_read_blocks_total"
_FAULTS = "headrace_kvbm_peer_faults_total"


def settings(port: int) -> PeersConfig:
    """Return how a machine reads and lends: few blocks at a time, for a short while."""
    return PeersConfig(
        listen=f"127.0.0.1:{port}",
        streams=2,
        take_bytes=3 * 8192,
        reads=2,
        read_s=1.0,
        connections=6,
        loans=3,
        lend_s=0.5,
        wait_s=0.5,
        least_blocks=1,
    )


async def registered(world: World, name: str, peers: str) -> Registration:
    """Put the other machine's kvbm into the address book. It has all layouts, as far as the book knows."""
    digests = [each.digest for each in (LAYOUT, OTHER_LAYOUT, STORE)]
    entry = Instance(
        *(NAMESPACE, "kvbm", name, 1, "there", 1, 0.0, "1"),
        subjects={"control": subjects.control(NAMESPACE, "kvbm", name)},
        layouts={digest: EventSource("tcp://there:1", "") for digest in digests},
        peers=peers,
    )
    key = subjects.instance_key(NAMESPACE, "kvbm", name)
    return await MemoryDiscovery(world.store).register(lambda _: {key: INSTANCE.encode(entry, JSON_HEADER)})


async def main(directory: Path, name: str, port: int, seed: int, life: int) -> None:
    """Run the machine."""
    storm = Storm(1000 * seed + life, directory, peers=settings(port), names_from=life * LIFE_NAMES)
    async with running(storm.world, name) as store, asyncio.TaskGroup() as tasks:
        going_on = storm.begin(tasks)
        other: Registration | None = None
        _say({"ready": True})
        while line := await _unless_failed(going_on, asyncio.to_thread(sys.stdin.readline)):
            asked: dict[str, Any] = msgspec.json.decode(line)
            match asked["do"]:
                case "peer":
                    if other is not None:
                        await other.close()
                    other = await registered(storm.world, asked["name"], asked["at"]) if asked["at"] else None
                case "act":
                    await _unless_failed(going_on, storm.acted(asked["more"]))
                    _say({})
                case "read":
                    await _unless_failed(going_on, _read_more(store))
                    _say({})
                case "rest":
                    await storm.end(store, going_on)
                    await rests(store)
                    labels = [("lend", "refused"), ("read", "closed"), ("read", "late"), ("read", "epoch")]
                    faults = {
                        " ".join(both): store.metric(_FAULTS, direction=both[0], reason=both[1]) for both in labels
                    }
                    read = store.metric(_READ)
                    sent = store.metric("headrace_kvbm_peer_sent_blocks_total")
                    _say({"seen": dict(storm.seen) | faults | {"read from a peer": read, "sent to a peer": sent}})
                case "end":
                    return
        raise EOFError("the test that began this has ended")


async def _read_more(store: Store) -> None:
    before = store.metric(_READ)
    await until(lambda: store.metric(_READ) > before)


async def _unless_failed(going_on: Sequence[asyncio.Task[None]], line: Awaitable[T]) -> T:
    """Return what is waited for. Raise what one of the tasks has raised."""
    waiting = asyncio.ensure_future(line)
    while not waiting.done():
        pending = [each for each in going_on if not each.done()]
        await asyncio.wait([waiting, *pending], return_when=asyncio.FIRST_COMPLETED)
        for each in going_on:
            if each.done():
                each.result()
    return waiting.result()


def _say(answer: dict[str, Any]) -> None:
    print(msgspec.json.encode(answer).decode(), flush=True)


if __name__ == "__main__":
    with hurried():
        asyncio.run(main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])))
