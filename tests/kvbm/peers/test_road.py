"""What every back end of the road between kvbms promises (`PeerBlockReader`), with real kvbms on both sides."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from services.kvbm.config import PeersConfig
from shared.messages.kvbm import Settled
from tests.kvbm.chains import chain
from tests.kvbm.peer_rig import (
    BACKENDS,
    ONLY_WITH_NIXL,
    PEERS,
    address,
    faults,
    lending,
    loans_are_over,
    machines,
    of,
    read,
    ready,
)
from tests.kvbm.store_rig import LIMIT_S, SMALL_BYTES, Engine, Store, payload, until

CONTENTS = chain(*range(1, 13))
SOON_S = 0.2
NIXL = replace(PEERS, backend="nixl")


@pytest.fixture(params=BACKENDS)
def peers(request: pytest.FixtureRequest) -> PeersConfig:
    """Settings for each back end."""
    return replace(PEERS, backend=request.param)


async def whole(lender: Store, reader: Store, engine: Engine) -> None:
    """Read until all blocks are there: NIXL's process may have ended with the last read, and starts again."""
    async with asyncio.timeout(LIMIT_S):
        while (await engine.load(CONTENTS))[0] < 12:
            await ready(lender)
            await read(reader, address(lender), CONTENTS)


def listening(pid: int) -> set[str]:
    """Return the addresses at which a process listens, as the kernel writes them."""
    targets = [str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()]
    sockets = {target.removeprefix("socket:[").rstrip("]") for target in targets if target.startswith("socket:[")}
    table = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[1].split(":")[0] for row in table if row[9] in sockets and row[3] == "0A"}


async def frozen(lender: Store, then: Callable[[], Awaitable[None]]) -> None:
    """Do something while what sends the lender's blocks stands still."""
    nixl = of(lender).nixl
    if nixl is None:
        held = asyncio.Event()
        loop = asyncio.get_running_loop()
        server = of(lender).server
        before = server._send

        def stands(stream: object, order: object) -> None:
            loop.call_soon_threadsafe(held.set)
            asyncio.run_coroutine_threadsafe(until(lambda: free.is_set()), loop).result()
            before(stream, order)  # type: ignore[arg-type]

        free = asyncio.Event()
        server._send = stands  # type: ignore[method-assign]
        try:
            await then()
        finally:
            free.set()
            server._send = before  # type: ignore[method-assign]
        return
    assert nixl.process is not None
    pid = nixl.process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        await then()
    finally:
        with suppress(ProcessLookupError):  # it was killed for its silence
            os.kill(pid, signal.SIGCONT)


async def test_blocks_are_read_and_published_and_the_next_read_finds_them_there(
    tmp_path: Path, peers: PeersConfig
) -> None:
    async with machines(tmp_path, lender=peers, reader=peers) as (one, a, two, b):
        await ready(one)
        await a.store(CONTENTS)
        for count, new in ((5, 5), (12, 7)):
            done = await read(two, address(one), CONTENTS[:count])
            assert done.fault is None
            assert len(done.written) == new
        assert (await b.load(CONTENTS))[0] == 12
        await until(lambda: not lending(one))


async def test_a_block_that_is_not_what_was_stored_is_not_published(tmp_path: Path, peers: PeersConfig) -> None:
    async with machines(tmp_path, lender=peers, reader=peers) as (one, a, two, b):
        await ready(one)
        granted = await a.grant(CONTENTS)
        a.write(granted, CONTENTS)
        sums = [xxh3_64_intdigest(payload(each)) for each in CONTENTS]
        sums[4] ^= 1
        packed = b"".join(each.to_bytes(8, "little") for each in sums)
        assert await a.commit(granted.ticket, granted.slots, packed) == Settled()
        done = await read(two, address(one), CONTENTS)
        assert len(done.written) == 11
        assert faults(two, "checksum") == 1
        assert (await b.load(CONTENTS))[0] == 4


async def test_a_read_whose_lender_stands_still_ends_at_its_deadline_and_holds_nothing(
    tmp_path: Path, peers: PeersConfig
) -> None:
    async with machines(tmp_path, lender=peers, reader=peers) as (one, a, two, b):
        await ready(one)
        await a.store(CONTENTS)
        assert await read(two, address(one), CONTENTS[:1]) is not None

        async def late() -> None:
            done = await read(two, address(one), CONTENTS, SOON_S)
            assert not done.written
            assert faults(two, "late") == 1
            assert (await b.load(CONTENTS))[0] == 1

        await frozen(one, late)
        await until(lambda: not lending(one))
        await whole(one, two, b)


async def test_a_lender_that_leaves_ends_the_read_from_it(tmp_path: Path, peers: PeersConfig) -> None:
    async with machines(tmp_path, lender=peers, reader=peers) as (one, a, two, b):
        await ready(one)
        await a.store(CONTENTS)
        assert await read(two, address(one), CONTENTS[:1]) is not None

        async def left() -> None:
            reading = asyncio.create_task(read(two, address(one), CONTENTS))
            await until(lambda: bool(of(one).server.lender.loans.sending))
            of(two).road.gone(address(one).instance)
            done = await reading
            assert not done.written
            assert faults(two, "closed") == 1

        await frozen(one, left)
        assert (await b.load(CONTENTS))[0] == 1


async def test_a_reader_that_stops_in_the_middle_leaves_the_lender_nothing_lent(
    tmp_path: Path, peers: PeersConfig
) -> None:
    async with machines(tmp_path, lender=peers, reader=peers) as (one, a, two, _):
        await ready(one)
        await a.store(CONTENTS)

        async def stops() -> None:
            reading = asyncio.create_task(read(two, address(one), CONTENTS))
            await until(lambda: bool(of(one).server.lender.loans.sending))
            await of(two).imports.close()
            with pytest.raises(asyncio.CancelledError):
                await reading

        await frozen(one, stops)
        await until(lambda: not lending(one))


async def test_a_loan_whose_time_is_over_is_cut(tmp_path: Path, peers: PeersConfig) -> None:
    async with machines(tmp_path, lender=peers, reader=peers) as (one, a, two, b):
        await ready(one)
        await a.store(CONTENTS)

        async def over() -> None:
            reading = asyncio.create_task(read(two, address(one), CONTENTS, 5.0))
            await until(lambda: bool(of(one).server.lender.loans.sending))
            assert loans_are_over(one)
            await until(lambda: not lending(one) or of(one).nixl is None)
            of(two).road.gone(address(one).instance)
            await reading

        await frozen(one, over)
        assert (await b.load(CONTENTS))[0] == 0


async def test_a_peer_of_another_epoch_is_not_read_with_what_was_known(tmp_path: Path, peers: PeersConfig) -> None:
    async with machines(tmp_path, lender=peers, reader=peers) as (one, a, two, b):
        await ready(one)
        await a.store(CONTENTS)
        assert await read(two, address(one), CONTENTS[:1]) is not None
        of(one).server.lender.epoch += 1
        first = await read(two, address(one), CONTENTS)
        assert first.fault is not None
        assert faults(two, "epoch") == 1
        await read(two, address(one), CONTENTS)
        await read(two, address(one), CONTENTS)
        assert (await b.load(CONTENTS))[0] == 12


async def test_a_full_pool_takes_what_has_room(tmp_path: Path, peers: PeersConfig) -> None:
    async with machines(tmp_path, lender=peers, reader=peers, size_bytes=SMALL_BYTES) as (one, a, two, b):
        await ready(one)
        await a.store(CONTENTS)
        granted = await b.grant(chain(100, 101))
        done = await read(two, address(one), CONTENTS)
        assert done.fault is None
        assert 0 < len(done.written) < 12
        assert (await b.load(CONTENTS))[0] == len(done.written)
        await b.abort(granted.ticket)


async def test_a_peer_with_no_block_of_it_lends_none(tmp_path: Path, peers: PeersConfig) -> None:
    async with machines(tmp_path, lender=peers, reader=peers) as (one, _, two, _):
        await ready(one)
        done = await read(two, address(one), CONTENTS)
        assert (done.lent, done.written, done.fault) == (0, {}, None)


# --- NIXL alone


@ONLY_WITH_NIXL
@pytest.mark.parametrize("of_lender", ["sockets", "nixl"])
async def test_peers_of_two_back_ends_refuse_each_other(tmp_path: Path, of_lender: str) -> None:
    other = {"sockets": "nixl", "nixl": "sockets"}[of_lender]
    settings = (replace(PEERS, backend=of_lender), replace(PEERS, backend=other))
    async with machines(tmp_path, lender=settings[0], reader=settings[1]) as (one, a, two, _):
        await a.store(CONTENTS)
        assert (await read(two, address(one), CONTENTS)).fault is not None
        assert faults(two, "backend") == 1


@ONLY_WITH_NIXL
async def test_a_lending_process_that_is_killed_ends_the_read_and_is_started_again(tmp_path: Path) -> None:
    async with machines(tmp_path, lender=NIXL, reader=NIXL) as (one, a, two, b):
        await ready(one)
        await a.store(CONTENTS)
        nixl = of(one).nixl
        assert nixl is not None
        assert nixl.process is not None
        first = nixl.process.pid
        os.kill(first, signal.SIGSTOP)
        reading = asyncio.create_task(read(two, address(one), CONTENTS))
        await until(lambda: bool(of(one).server.lender.loans.sending))
        os.kill(first, signal.SIGKILL)
        done = await reading
        assert not done.written
        await until(lambda: nixl.ready is not None and nixl.process is not None and nixl.process.pid != first)
        await whole(one, two, b)


@ONLY_WITH_NIXL
async def test_a_reading_process_is_kept_and_a_dead_one_is_replaced(tmp_path: Path) -> None:
    async with machines(tmp_path, lender=NIXL, reader=NIXL) as (one, a, two, b):
        await ready(one)
        await a.store(CONTENTS)
        await read(two, address(one), CONTENTS[:2])
        reader = of(two).nixl_reader
        assert reader is not None
        (process,) = reader.idle
        await read(two, address(one), CONTENTS[:4])
        assert reader.idle == [process]
        os.kill(process.pid, signal.SIGKILL)
        await until(lambda: process.ended)
        await read(two, address(one), CONTENTS)
        assert (await b.load(CONTENTS))[0] == 12


@ONLY_WITH_NIXL
async def test_the_lending_process_rests_while_nothing_is_lent_and_listens_at_its_device_alone(tmp_path: Path) -> None:
    async with machines(tmp_path, lender=NIXL, reader=NIXL) as (one, a, two, _):
        await ready(one)
        await a.store(CONTENTS)
        await read(two, address(one), CONTENTS)
        await until(lambda: not lending(one))
        nixl = of(one).nixl
        assert nixl is not None
        assert nixl.process is not None
        pid = nixl.process.pid
        await until(lambda: Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "S")
        assert listening(pid) == {"0100007F"}, "127.0.0.1 and nothing else"
