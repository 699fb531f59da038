"""The port of a kvbm: what readers do wrong ends their connection, and what they were lent is free."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from services.kvbm.config import PeersConfig
from services.kvbm.peers import server
from services.kvbm.peers.messages import (
    FRAME_BYTES_MOST,
    PEER_QUESTION,
    Borrow,
    Count,
    Counted,
    Lent,
    PeerAnswer,
    PeerFault,
    PeerHello,
    PeerQuestion,
    PeerRefused,
    Received,
    Return,
    Take,
    decode_answer,
)
from services.kvbm.peers.stream import PeerStream
from shared.messages.kvbm import Fetched
from tests.kvbm.chains import chain, keys
from tests.kvbm.peer_rig import PEERS, faults, rests
from tests.kvbm.store_rig import LAYOUT, LIMIT_S, Engine, Store, payload, serving, until

CONTENTS = chain(*range(1, 9))


class Client:
    """A reader, one call at a time."""

    def __init__(self, stream: PeerStream) -> None:
        self.stream = stream
        self.hello = PeerHello(0, "", 0, [])

    async def receive(self) -> PeerAnswer:
        return decode_answer(await asyncio.to_thread(self.stream.receive_frame, FRAME_BYTES_MOST))

    async def send(self, question: PeerQuestion) -> None:
        await asyncio.to_thread(self.stream.send_frame, PEER_QUESTION.encode(question))

    async def ask(self, question: PeerQuestion) -> PeerAnswer:
        await self.send(question)
        return await self.receive()

    async def borrow(self) -> Lent:
        lent = await self.ask(Borrow(1, self.hello.epoch, LAYOUT, b"".join(keys(CONTENTS))))
        assert isinstance(lent, Lent), lent
        return lent

    async def block(self, number: int, index: int) -> bytes:
        memory = bytearray(8000)
        await asyncio.to_thread(self.stream.receive_header, number, index, 8000)
        await asyncio.to_thread(self.stream.receive_into, memoryview(memory))
        return bytes(memory)

    async def closed(self) -> None:
        """Return when the other side has closed."""
        with pytest.raises(PeerFault) as fault:
            await self.receive()
        assert fault.value.code == "closed"


@asynccontextmanager
async def client(store: Store) -> AsyncIterator[Client]:
    assert store.service.peers is not None
    port = store.service.peers.server.port
    made = Client(PeerStream(await asyncio.to_thread(socket.create_connection, ("127.0.0.1", port))))
    try:
        hello = await made.receive()
        assert isinstance(hello, PeerHello)
        made.hello = hello
        yield made
    finally:
        made.stream.close()


@asynccontextmanager
async def lender(folder: Path, peers: PeersConfig = PEERS) -> AsyncIterator[tuple[Store, Engine]]:
    """Run a kvbm with CONTENTS; in the end it lends nothing."""
    async with serving(folder, instance="lender", peers=peers) as store:
        engine = await store.world.attached("a")
        await engine.store(CONTENTS)
        yield store, engine
        await rests(store)


async def checksums(engine: Engine) -> bytes:
    """Return what a Fetch says of the checksums of CONTENTS."""
    (reply,) = await engine.fetch(keys(CONTENTS))
    assert isinstance(reply, Fetched)
    await engine.release(reply.ticket)
    return reply.checksums


async def test_blocks_are_lent_sent_and_given_back(tmp_path: Path) -> None:
    async with lender(tmp_path) as (store, _), client(store) as one, client(store) as two:
        assert [each.layout for each in one.hello.layouts] == [LAYOUT]
        assert await one.ask(Count(4, LAYOUT.digest, b"".join(keys(CONTENTS)))) == Counted(4, 8)
        assert await one.ask(Count(5, LAYOUT.digest, b"".join(keys(chain(9, 1))))) == Counted(5, 0)
        lent = await one.borrow()
        assert [each.key for each in lent.blocks] == keys(CONTENTS)
        assert store.service.layouts.open[LAYOUT.digest].tiers.statistics().host.held == 8
        await two.send(Take(3, one.hello.epoch, lent.loan, [5, 2]))
        assert await two.block(3, 5) == payload(CONTENTS[5])
        assert await two.block(3, 2) == payload(CONTENTS[2])
        assert await one.ask(Return(2, lent.loan)) == Counted(2, 0)
        assert store.service.layouts.open[LAYOUT.digest].tiers.statistics().host.held == 8, "not reported as received"
        await two.send(Received())
        await rests(store)


async def test_a_checksum_that_was_computed_for_a_reader_is_known_from_then_on(tmp_path: Path) -> None:
    async with lender(tmp_path) as (store, engine), client(store) as one:
        assert await checksums(engine) == b""
        lent = await one.borrow()
        await one.send(Take(3, one.hello.epoch, lent.loan, [0, 2]))
        for index in (0, 2):
            await one.block(3, index)
        assert await one.ask(Return(4, lent.loan)) == Counted(4, 0)
        sums = [xxh3_64_intdigest(payload(CONTENTS[index])) if index in (0, 2) else 0 for index in range(8)]
        assert await checksums(engine) == b"".join(each.to_bytes(8, "little") for each in sums)


async def test_what_is_lent_is_held_while_an_engine_needs_room(tmp_path: Path) -> None:
    async with lender(tmp_path) as (store, engine), client(store) as one:
        lent = await one.borrow()
        for first in range(100, 1100, 50):
            await engine.store(chain(*range(first, first + 50)))
        await one.send(Take(3, one.hello.epoch, lent.loan, list(range(8))))
        for index, content in enumerate(CONTENTS):
            assert await one.block(3, index) == payload(content)


async def test_a_block_that_was_discarded_meanwhile_is_not_sent(tmp_path: Path) -> None:
    async with lender(tmp_path) as (store, engine), client(store) as one:
        lent = await one.borrow()
        await engine.discard(keys(CONTENTS[3:4]))
        await one.send(Take(3, one.hello.epoch, lent.loan, [2, 3]))
        assert await one.block(3, 2) == payload(CONTENTS[2])
        header = await asyncio.to_thread(one.stream.receive_header, 3, 3, 8000)
        assert header.size_bytes == 0
        assert isinstance(await one.receive(), PeerRefused)


async def test_a_reader_that_does_not_read_is_cut_when_its_time_is_over(tmp_path: Path) -> None:
    async with lender(tmp_path, replace(PEERS, lend_s=2.0)) as (store, _), client(store) as one:
        one.stream._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lent = await one.borrow()
        await one.send(Take(3, one.hello.epoch, lent.loan, list(range(8))))
        await rests(store)
        await until(lambda: faults(store, "late", "lend") + faults(store, "closed", "lend") == 1)


async def test_a_loan_ends_with_its_time_even_if_its_reader_asks_on(tmp_path: Path) -> None:
    async with lender(tmp_path, replace(PEERS, lend_s=0.3)) as (store, _), client(store) as one:
        lent = await one.borrow()
        await rests(store)
        await one.send(Take(3, one.hello.epoch, lent.loan, [0]))
        header = await asyncio.to_thread(one.stream.receive_header, 3, 0, 8000)
        assert header.size_bytes == 0
        refused = await one.receive()
        assert isinstance(refused, PeerRefused)
        assert refused.code == "unknown_loan"


async def test_a_reader_that_dies_in_the_middle_holds_nothing(tmp_path: Path) -> None:
    async with lender(tmp_path) as (store, _):
        async with client(store) as one:
            lent = await one.borrow()
            await one.send(Take(3, one.hello.epoch, lent.loan, list(range(8))))
        await rests(store)


async def test_what_was_lent_to_another_epoch_or_layout_is_refused(tmp_path: Path) -> None:
    async with lender(tmp_path) as (store, _), client(store) as one:
        packed = b"".join(keys(CONTENTS))
        for ask, code in (
            (Borrow(1, one.hello.epoch + 1, LAYOUT, packed), "epoch"),
            (Borrow(1, one.hello.epoch, replace(LAYOUT, rank=1), packed), "layout"),
            (Borrow(1, one.hello.epoch, LAYOUT, packed[:-1]), "bad_request"),
            (Borrow(1, one.hello.epoch, LAYOUT, packed + packed), "bad_request"),
            (Count(1, LAYOUT.digest, packed[:-1]), "bad_request"),
        ):
            refused = await one.ask(ask)
            assert isinstance(refused, PeerRefused)
            assert refused.code == code
        assert await one.ask(Return(9, 12345)) == Counted(9, 0)


async def test_no_more_is_lent_than_may_be(tmp_path: Path) -> None:
    async with lender(tmp_path, replace(PEERS, lent_bytes=3 * 8000)) as (store, _), client(store) as one:
        assert len((await one.borrow()).blocks) == 3
        refused = await one.ask(Borrow(1, one.hello.epoch, LAYOUT, b"".join(keys(CONTENTS))))
        assert isinstance(refused, PeerRefused)
        assert refused.code == "full"


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", bytes(4), b"\xff" * 100, b"\x01\0\0\0\xc1", os.urandom(999)]
)
async def test_garbage_ends_a_connection_and_nothing_else(tmp_path: Path, garbage: bytes) -> None:
    async with lender(tmp_path) as (store, _), client(store) as one, client(store) as other:
        lent = await one.borrow()
        await asyncio.to_thread(one.stream.send_raw, garbage)
        with suppress(OSError):  # it may be closed already
            one.stream._knife.shutdown(socket.SHUT_WR)
        await one.closed()
        assert await other.ask(Return(1, lent.loan)) == Counted(1, 0)
        await until(lambda: faults(store, "garbage", "lend") + faults(store, "closed", "lend") == 1)


async def test_a_connection_beyond_the_bound_is_closed_if_none_is_idle(tmp_path: Path) -> None:
    async with lender(tmp_path, replace(PEERS, connections=1)) as (store, _), client(store) as one:
        await one.borrow()
        with pytest.raises(PeerFault):
            async with client(store):
                pass
        assert faults(store, "full", "lend") == 1


async def test_the_connection_that_is_idle_longest_makes_room_for_another(tmp_path: Path) -> None:
    question = Count(1, LAYOUT.digest, b"".join(keys(CONTENTS)))
    async with AsyncExitStack() as opened:
        store, _ = await opened.enter_async_context(lender(tmp_path, replace(PEERS, connections=3)))
        asked = [await opened.enter_async_context(client(store)) for _ in range(2)]
        for one in reversed(asked):
            assert await one.ask(question) is not None
        silent = await opened.enter_async_context(client(store))
        others = [await opened.enter_async_context(client(store))]
        await silent.closed()
        for one in (others[0], asked[1], asked[0]):
            await one.ask(question)
        others.append(await opened.enter_async_context(client(store)))
        await others[0].closed()
        assert await asked[0].ask(question) is not None
        assert faults(store, "full", "lend") == 2
        assert faults(store, "closed", "lend") == 0


async def test_silent_connections_of_one_address_keep_none_of_its_real_peers_out(tmp_path: Path) -> None:
    async with AsyncExitStack() as opened:
        store, _ = await opened.enter_async_context(lender(tmp_path, replace(PEERS, connections=64)))
        silent = [await opened.enter_async_context(client(store)) for _ in range(server.SILENT_LIMIT)]
        peer = await opened.enter_async_context(client(store))
        await silent[0].closed()
        await peer.borrow()
        silent += [await opened.enter_async_context(client(store)) for _ in range(2)]
        await silent[1].closed()
        await peer.borrow()
        assert faults(store, "full", "lend") == 2


async def test_a_connection_without_a_question_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_S", 0.05)
    async with lender(tmp_path) as (store, _), client(store) as one:
        await one.closed()


async def test_a_kvbm_that_stops_ends_what_it_lends(tmp_path: Path) -> None:
    async with AsyncExitStack() as open_until_the_end:
        async with serving(tmp_path, instance="lender", peers=PEERS) as store:
            engine = await store.world.attached("a")
            await engine.store(CONTENTS)
            one = await open_until_the_end.enter_async_context(client(store))
            lent = await one.borrow()
            await one.send(Take(3, one.hello.epoch, lent.loan, [0]))
            assert await one.block(3, 0) == payload(CONTENTS[0])
        await one.closed()


async def test_the_address_book_says_where_a_kvbm_lends(tmp_path: Path) -> None:
    async with lender(tmp_path) as (store, _):
        assert store.service.peers is not None
        async with asyncio.timeout(LIMIT_S):
            while (entry := await store.entry()) is None:  # noqa: ASYNC110 - it is in discovery
                await asyncio.sleep(0.002)
        assert entry.peers == f"127.0.0.1:{store.service.peers.server.port}"
