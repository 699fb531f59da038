"""Peers that lie, stall, stop and change: never wrong bytes, and nothing stays held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from services.kvbm.config import PeersConfig
from services.kvbm.peers.messages import (
    PEER_ANSWER,
    PEER_PROTOCOL,
    BlockHeader,
    Borrow,
    Lent,
    PeerAddress,
    PeerAnswer,
    PeerFault,
    PeerHello,
    PeerLayout,
    PeerRefused,
    Take,
    pack_frame,
    pack_header,
)
from services.kvbm.peers.road import ReadBlocks
from services.kvbm.peers.stream import PeerStream
from shared.blocks import Content
from shared.messages.kvbm import StoreBlock
from tests.kvbm.chains import chain
from tests.kvbm.peer_rig import PEERS, Liar, faults, listening, read, rests
from tests.kvbm.store_rig import LAYOUT, LIMIT_S, SMALL_BYTES, Engine, Store, payload, serving, until

CONTENTS = chain(*range(1, 13))
SOON_S = 0.2
"""Seconds for a read that must fail by its deadline."""


@asynccontextmanager
async def reader(folder: Path, peers: PeersConfig = PEERS) -> AsyncIterator[tuple[Store, Engine]]:
    """Run a kvbm that reads; in the end it holds nothing."""
    async with serving(folder, instance="reader", peers=peers) as store:
        yield store, await store.world.attached("b")
        await rests(store)


async def found(engine: Engine, contents: list[Content] = CONTENTS) -> int:
    """Return how many leading blocks are there; the engine compares their bytes."""
    right, _ = await engine.load(contents)
    return right


async def ends_in(store: Store, engine: Engine, liar: Liar, code: str, limit_s: float = LIMIT_S) -> ReadBlocks:
    """Read from a liar; that is one fault of this kind."""
    with listening(liar) as peer:
        done = await read(store, peer, CONTENTS, limit_s)
        await rests(store)
    assert faults(store, code) == 1
    return done


async def test_a_peer_that_does_not_lie_is_believed(tmp_path: Path) -> None:
    async with reader(tmp_path) as (store, engine):
        with listening(Liar(CONTENTS)) as peer:
            done = await read(store, peer, CONTENTS)
        assert done.fault is None
        assert await found(engine) == 12


async def test_a_block_whose_bytes_differ_from_its_checksum_is_not_published(tmp_path: Path) -> None:
    class Wrong(Liar):
        def send(self, stream: PeerStream, take: Take, index: int) -> None:
            if index != 4:
                return super().send(stream, take, index)
            data = bytes(8000)
            stream.send_raw(pack_header(BlockHeader(take.number, index, 8000, xxh3_64_intdigest(payload(CONTENTS[4])))))
            return stream.send_raw(data)

    async with reader(tmp_path) as (store, engine):
        done = await ends_in(store, engine, Wrong(CONTENTS), "checksum")
        assert len(done.written) == 11
        assert await found(engine) == 4


@pytest.mark.parametrize("size_bytes", [7999, 8001, 1 << 40])
async def test_a_block_of_another_size_is_not_read(tmp_path: Path, size_bytes: int) -> None:
    class Wrong(Liar):
        def send(self, stream: PeerStream, take: Take, index: int) -> None:
            stream.send_raw(pack_header(BlockHeader(take.number, index, size_bytes, 1)) + bytes(9000))

    async with reader(tmp_path) as (store, engine):
        done = await ends_in(store, engine, Wrong(CONTENTS), "size")
        assert done.written == {}
        assert await found(engine) == 0


async def test_a_peer_that_sends_less_and_closes_leaves_nothing(tmp_path: Path) -> None:
    class Short(Liar):
        def send(self, stream: PeerStream, take: Take, index: int) -> None:
            data = payload(CONTENTS[index])
            stream.send_raw(pack_header(BlockHeader(take.number, index, 8000, xxh3_64_intdigest(data))) + data[:5000])
            stream.cut()

    async with reader(tmp_path) as (store, engine):
        done = await ends_in(store, engine, Short(CONTENTS), "closed")
        assert done.written == {}
        assert await found(engine) == 0


async def test_a_peer_that_stops_in_the_middle_keeps_what_came_before(tmp_path: Path) -> None:
    class Stops(Liar):
        def send(self, stream: PeerStream, take: Take, index: int) -> None:
            if index < 2:
                return super().send(stream, take, index)
            self.stopped.wait()
            return None

    async with reader(tmp_path, replace(PEERS, streams=1)) as (store, engine):
        done = await ends_in(store, engine, Stops(CONTENTS), "late", SOON_S)
        assert len(done.written) <= 2  # none where the machine is too slow for one
        assert await found(engine) == len(done.written if done else ())


async def test_a_peer_that_sends_a_byte_now_and_then_does_not_outlast_the_deadline(tmp_path: Path) -> None:
    class Drips(Liar):
        def send(self, stream: PeerStream, take: Take, index: int) -> None:
            data = payload(CONTENTS[index])
            stream.send_raw(pack_header(BlockHeader(take.number, index, 8000, xxh3_64_intdigest(data))))
            for each in data:
                stream.send_raw(bytes([each]))
                self.stopped.wait(0.01)

    async with reader(tmp_path) as (store, engine):
        await ends_in(store, engine, Drips(CONTENTS), "late", SOON_S)
        assert await found(engine) == 0


async def test_a_peer_that_sends_a_block_twice_is_not_read_further(tmp_path: Path) -> None:
    class Twice(Liar):
        def send(self, stream: PeerStream, take: Take, index: int) -> None:
            super().send(stream, take, index)
            super().send(stream, take, index)

    async with reader(tmp_path) as (store, engine):
        await ends_in(store, engine, Twice(CONTENTS), "garbage")
        assert await found(engine) <= 12


async def test_a_peer_that_says_nothing_is_late(tmp_path: Path) -> None:
    class Mute(Liar):
        def serve(self, stream: PeerStream) -> None:
            self.stopped.wait()

    async with reader(tmp_path) as (store, engine):
        assert (await ends_in(store, engine, Mute(CONTENTS), "late", SOON_S)).fault is not None


@pytest.mark.parametrize(
    "body", [b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(64), b"\xff" * 64, pack_frame(b"\xc1"), pack_frame(bytes(100))]
)
async def test_another_service_at_the_port_is_not_believed(tmp_path: Path, body: bytes) -> None:
    class Other(Liar):
        def serve(self, stream: PeerStream) -> None:
            stream.send_raw(body)
            self.stopped.wait()

    async with reader(tmp_path) as (store, engine):
        assert (await ends_in(store, engine, Other(CONTENTS), "garbage")).fault is not None


async def test_an_address_at_which_nothing_listens_is_unreachable(tmp_path: Path) -> None:
    with listening(Liar(CONTENTS)) as peer:
        pass
    async with reader(tmp_path) as (store, _):
        assert (await read(store, peer, CONTENTS)).fault is not None
        assert faults(store, "unreachable") == 1


async def test_an_address_book_that_points_elsewhere_is_found_out(tmp_path: Path) -> None:
    async with reader(tmp_path) as (store, _):
        with listening(Liar(CONTENTS)) as peer:
            assert (await read(store, replace(peer, instance="someone"), CONTENTS)).fault is not None
        assert faults(store, "elsewhere") == 1


@pytest.mark.parametrize(
    "layout",
    [
        replace(LAYOUT, rank=1),
        replace(LAYOUT, weights="other"),
        replace(LAYOUT, kv=replace(LAYOUT.kv, dtype="float16", head_dim=1000)),
    ],
)
async def test_blocks_of_another_layout_dtype_or_rank_are_not_asked_for(tmp_path: Path, layout: object) -> None:
    class Other(Liar):
        def hello(self) -> PeerAnswer:
            named = PeerLayout(LAYOUT.digest, layout, 8000)  # type: ignore[arg-type]
            return PeerHello(PEER_PROTOCOL, self.instance, self.epoch, [named])

    liar = Other(CONTENTS)
    async with reader(tmp_path) as (store, engine):
        assert (await ends_in(store, engine, liar, "layout")).fault is not None
    assert liar.questions == []


async def test_a_peer_that_has_started_again_is_not_read_with_what_was_known_of_it(tmp_path: Path) -> None:
    liar = Liar(CONTENTS)
    async with reader(tmp_path) as (store, engine):
        with listening(liar) as peer:
            assert await read(store, peer, CONTENTS[:1]) is not None
            liar.epoch = 8
            for stream in liar.streams:
                stream.cut()
            await until(lambda: all(stream.ended for stream in liar.streams))
            assert (await read(store, peer, CONTENTS)).fault is not None
            assert faults(store, "epoch") == 1
            assert await read(store, peer, CONTENTS) is not None, "it is known by now"
        assert await found(engine) == 12


async def test_a_connection_of_another_epoch_in_one_read_ends_it(tmp_path: Path) -> None:
    class Changes(Liar):
        def hello(self) -> PeerAnswer:
            self.epoch += 1
            return super().hello()

    async with reader(tmp_path) as (store, _engine):
        with listening(Changes(CONTENTS)) as peer:
            done = await read(store, peer, CONTENTS)
        assert done.fault is not None
        assert faults(store, "epoch") == 1


async def test_a_loan_of_other_blocks_than_were_asked_for_is_not_read(tmp_path: Path) -> None:
    class Other(Liar):
        def lend(self, ask: Borrow) -> PeerAnswer:
            return Lent(ask.number, 1, 30.0, [StoreBlock(each.key, each.parent, each.tokens) for each in chain(7, 8)])

    async with reader(tmp_path) as (store, engine):
        assert (await ends_in(store, engine, Other(CONTENTS), "garbage")).fault is not None


async def test_a_block_with_the_tokens_of_no_block_is_not_read(tmp_path: Path) -> None:
    class Other(Liar):
        def lend(self, ask: Borrow) -> PeerAnswer:
            return Lent(ask.number, 1, 30.0, [StoreBlock(CONTENTS[0].key, None, b"12345678")])

    async with reader(tmp_path) as (store, engine):
        assert (await ends_in(store, engine, Other(CONTENTS), "refused")).fault is not None


async def test_a_take_that_is_refused_ends_the_read(tmp_path: Path) -> None:
    class Refuses(Liar):
        def send(self, stream: PeerStream, take: Take, index: int) -> None:
            stream.send_raw(pack_header(BlockHeader(take.number, 0, 0, 0)))
            stream.send_frame(PEER_ANSWER.encode(PeerRefused(take.number, "unknown_loan", "gone", True)))
            stream.cut()

    async with reader(tmp_path) as (store, engine):
        done = await ends_in(store, engine, Refuses(CONTENTS), "refused")
        assert done.written == {}


async def test_a_peer_that_leaves_ends_the_reads_that_are_under_way(tmp_path: Path) -> None:
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Stops(Liar):
        def send(self, stream: PeerStream, take: Take, index: int) -> None:
            loop.call_soon_threadsafe(asked.set)
            self.stopped.wait()

    async with reader(tmp_path) as (store, engine):
        with listening(Stops(CONTENTS)) as peer:
            reading = asyncio.create_task(read(store, peer, CONTENTS))
            await asked.wait()
            assert store.service.peers is not None
            store.service.peers.road.gone(peer.instance)
            done = await reading
        assert done.written == {}
        assert faults(store, "closed") == 1
        assert await found(engine) == 0


async def test_a_peer_that_leaves_while_a_further_connection_to_it_is_made_ends_that_too(tmp_path: Path) -> None:
    async with reader(tmp_path) as (store, _):
        with listening(Liar(CONTENTS)) as peer:
            assert store.service.peers is not None
            connections = store.service.peers.road._connections
            async with connections.limited(LIMIT_S) as parts:
                await connections.connected(peer, LAYOUT, parts)
                further = asyncio.create_task(connections.connected(peer, LAYOUT, parts))
                await asyncio.sleep(0)  # a thread connects
                connections.gone(peer.instance)
                with pytest.raises(PeerFault, match="the peer has left"):
                    await further


async def test_a_kvbm_that_stops_ends_its_reads(tmp_path: Path) -> None:
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Stops(Liar):
        def send(self, stream: PeerStream, take: Take, index: int) -> None:
            loop.call_soon_threadsafe(asked.set)
            self.stopped.wait()

    with listening(Stops(CONTENTS)) as peer:
        async with serving(tmp_path, peers=PEERS) as store:
            await store.world.attached("b")
            reading = asyncio.create_task(read(store, peer, CONTENTS))
            await asked.wait()
        with pytest.raises(asyncio.CancelledError):
            await reading


async def test_a_full_pool_takes_what_has_room(tmp_path: Path) -> None:
    async with serving(tmp_path, instance="reader", peers=PEERS, size_bytes=SMALL_BYTES) as store:
        engine = await store.world.attached("b")
        with listening(Liar(CONTENTS)) as peer:
            granted = await engine.grant(chain(100, 101))
            held = await engine.fetch([])
            done = await read(store, peer, CONTENTS)
            assert done.fault is None
            assert 0 < len(done.written) < 12
            assert await found(engine) == len(done.written)
            assert await engine.abort(granted.ticket) is not None
            del held
        await rests(store)


async def test_connections_are_kept_for_the_next_read(tmp_path: Path) -> None:
    liar = Liar(CONTENTS)
    async with reader(tmp_path) as (store, _):
        with listening(liar) as peer:
            for count in (4, 8, 12):
                assert await read(store, peer, CONTENTS[:count]) is not None
            assert len(liar.streams) <= PEERS.streams


async def test_reads_beyond_the_bound_are_not_begun(tmp_path: Path) -> None:
    async with reader(tmp_path, replace(PEERS, reads=1)) as (store, _):
        assert store.service.peers is not None
        imports = store.service.peers.imports
        mute = PeerAddress("liar", "127.0.0.1", 1)
        reading = asyncio.create_task(read(store, mute, CONTENTS))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert imports.full
        assert (await reading).fault is not None
        assert not imports.full
