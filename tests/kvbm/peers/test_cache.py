"""The cluster-wide cache: a Fetch that misses brings blocks of another machine, and never waits longer than it may."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from services.kvbm.peers.messages import Count, PeerAddress, PeerQuestion
from services.kvbm.peers.stream import PeerStream
from shared.messages import kvbm as wire
from tests.kvbm.chains import chain, keys
from tests.kvbm.peer_rig import PEERS, Liar, address, listening, machines, rests
from tests.kvbm.store_rig import LAYOUT, Store, serving, until

SLOW = replace(PEERS, wait_s=60.0, least_blocks=4)
"""For tests in which the answer must come, however slow the machine is."""
CONTENTS = chain(*range(1, 21))


def learn(store: Store, peer: PeerAddress) -> None:
    assert store.service.peers is not None
    store.service.peers.cache.choice.learn(peer, [LAYOUT.digest])


def outcomes(store: Store, outcome: str) -> float:
    return store.metric("headrace_kvbm_peer_fetches_total", outcome=outcome)


async def test_a_fetch_brings_the_missing_blocks_of_another_machine(tmp_path: Path) -> None:
    async with machines(tmp_path, reader=SLOW) as (one, a, two, b):
        await a.store(CONTENTS)
        await b.store(CONTENTS[:5])
        learn(two, address(one))
        assert await b.load(CONTENTS) == (20, 0)
        assert outcomes(two, "read") == 1
        assert two.metric("headrace_kvbm_peer_read_blocks_total") == 15
        assert await b.load(CONTENTS) == (20, 0)
        assert outcomes(two, "read") == 1, "they are here now"


async def test_a_few_missing_blocks_are_not_asked_for(tmp_path: Path) -> None:
    async with machines(tmp_path, reader=replace(SLOW, least_blocks=16)) as (one, a, two, b):
        await a.store(CONTENTS)
        await b.store(CONTENTS[:5])
        learn(two, address(one))
        assert await b.load(CONTENTS) == (5, 0)
        assert one.metric("headrace_kvbm_peer_sent_blocks_total") == 0


async def test_the_machine_with_most_blocks_is_read(tmp_path: Path) -> None:
    (tmp_path / "three").mkdir()
    async with (
        machines(tmp_path, reader=SLOW) as (one, a, two, b),
        serving(tmp_path / "three", instance="third", peers=PEERS) as three,
    ):
        c = await three.world.attached("c")
        await c.store(CONTENTS[:6])
        await a.store(CONTENTS[:12])
        for store in (three, one):
            learn(two, address(store))
        assert await b.load(CONTENTS) == (12, 0)
        assert three.metric("headrace_kvbm_peer_sent_blocks_total") == 0


async def test_a_slow_machine_with_more_blocks_is_not_read_before_a_fast_one(tmp_path: Path) -> None:
    (tmp_path / "three").mkdir()
    async with (
        machines(tmp_path, reader=SLOW) as (one, a, two, b),
        serving(tmp_path / "three", instance="third", peers=PEERS) as three,
    ):
        c = await three.world.attached("c")
        await c.store(CONTENTS[:12])
        await a.store(CONTENTS)
        for store in (three, one):
            learn(two, address(store))
        assert two.service.peers is not None
        choice = two.service.peers.cache.choice
        choice.read_begins("lender", asyncio.get_running_loop().time())
        choice.read_done("lender", 1000, 1.0)
        assert await b.load(CONTENTS) == (12, 0)
        assert one.metric("headrace_kvbm_peer_sent_blocks_total") == 0


async def test_that_peers_are_too_slow_is_logged_with_their_rates(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with machines(tmp_path, reader=replace(SLOW, wait_s=20.0)) as (one, a, two, b):
        await a.store(CONTENTS)
        learn(two, address(one))
        assert two.service.peers is not None
        choice = two.service.peers.cache.choice
        choice.read_begins("lender", asyncio.get_running_loop().time())
        choice.read_done("lender", 1000, 1.0)
        assert await b.load(CONTENTS) == (0, 0)
        assert outcomes(two, "not worth it") == 1
        assert "4 blocks do not come in" in caplog.text
        assert "(lender: 0.001 MB/s)" in caplog.text


class Frozen(Liar):
    """A peer that has all blocks, and stops where it is said to."""

    def __init__(self, at: type[PeerQuestion]) -> None:
        super().__init__(CONTENTS)
        self.at = at

    def answer(self, stream: PeerStream, question: PeerQuestion) -> None:
        if isinstance(question, self.at):
            self.stopped.wait()
        super().answer(stream, question)


async def test_a_fetch_waits_no_longer_than_it_may_for_a_peer_that_hangs(tmp_path: Path) -> None:
    async with serving(tmp_path, instance="reader", peers=replace(PEERS, wait_s=0.2, least_blocks=1)) as store:
        engine = await store.world.attached("b")
        await engine.store(CONTENTS[:3])
        with listening(Frozen(Count)) as peer:
            learn(store, peer)
            assert await engine.load(CONTENTS) == (3, 0)
            assert store.service.peers is not None
            await until(lambda: store.service.peers is not None and store.service.peers.cache.under_way == 0)
            assert store.service.peers.cache.choice.candidates(LAYOUT.digest, asyncio.get_running_loop().time()) == []
            assert await engine.load(CONTENTS) == (3, 0), "it rests, and is not asked"
        await rests(store)


async def test_a_fetch_beyond_the_bound_is_answered_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path, instance="reader", peers=replace(SLOW, reads=1)) as store:
        engine = await store.world.attached("b")
        other = await store.world.attached("c")
        liar = Frozen(Count)
        with listening(liar) as peer:
            learn(store, peer)
            waiting = asyncio.create_task(engine.fetch(keys(CONTENTS)))
            await until(lambda: store.service.peers is not None and store.service.peers.cache.under_way == 1)
            (reply,) = await other.fetch(keys(CONTENTS))
            assert isinstance(reply, wire.Fetched)
            assert reply.found == 0
            assert outcomes(store, "full") == 1
            liar.stopped.set()
            await waiting


async def test_fetches_that_come_in_one_turn_of_the_loop_keep_the_bound(tmp_path: Path) -> None:
    async with serving(tmp_path, instance="reader", peers=replace(SLOW, reads=1)) as store:
        engines = [await store.world.attached(name) for name in "bcd"]
        liar = Frozen(Count)
        with listening(liar) as peer:
            learn(store, peer)
            waiting = [asyncio.create_task(engine.fetch(keys(CONTENTS))) for engine in engines]
            await until(lambda: sum(each.done() for each in waiting) == 2)
            assert outcomes(store, "full") == 2
            liar.stopped.set()
            await asyncio.wait(waiting)
        await rests(store)


async def test_a_fetch_is_answered_before_its_engine_gives_the_kvbm_up(tmp_path: Path) -> None:
    async with serving(tmp_path, instance="reader", peers=SLOW) as store:
        engine = await store.world.attached("b")
        engine.answer_s = SLOW.wait_s / 2
        assert isinstance(await engine.try_attach(reply_s=1.0), wire.Attached)
        await engine.store(CONTENTS[:3])
        with listening(Frozen(Count)) as peer:
            learn(store, peer)
            assert await engine.load(CONTENTS) == (3, 0)
            assert outcomes(store, "late") + outcomes(store, "nothing") == 1
        await rests(store)


async def test_an_engine_that_attaches_again_meanwhile_gets_no_ticket(tmp_path: Path) -> None:
    async with serving(tmp_path, instance="reader", peers=SLOW) as store:
        engine = await store.world.attached("b")
        await engine.store(CONTENTS[:3])
        liar = Frozen(Count)
        with listening(liar) as peer:
            learn(store, peer)
            waiting = asyncio.create_task(engine.fetch(keys(CONTENTS)))
            await until(lambda: store.service.peers is not None and store.service.peers.cache.under_way == 1)
            await engine.attach()
            liar.stopped.set()
            (reply,) = await waiting
        assert isinstance(reply, wire.KvbmRefused)
        assert reply.code == "unknown_owner"
        await rests(store)


async def test_an_engine_that_attaches_again_in_the_same_turn_of_the_loop_gets_no_ticket(tmp_path: Path) -> None:
    async with serving(tmp_path, instance="reader", peers=SLOW) as store:
        engine = await store.world.attached("b")
        await engine.store(CONTENTS[:3])
        liar = Frozen(Count)
        with listening(liar) as peer:
            learn(store, peer)
            waiting, attaching = asyncio.create_task(engine.fetch(keys(CONTENTS))), asyncio.create_task(engine.attach())
            await attaching
            liar.stopped.set()
            (reply,) = await waiting
        assert isinstance(reply, wire.KvbmRefused)
        assert reply.code == "unknown_owner"
        await rests(store)


async def test_a_kvbm_that_stops_ends_what_it_asks(tmp_path: Path) -> None:
    with listening(Frozen(Count)) as peer:
        async with serving(tmp_path, instance="reader", peers=SLOW) as store:
            engine = await store.world.attached("b")
            learn(store, peer)
            waiting = asyncio.create_task(engine.fetch(keys(CONTENTS)))
            await until(lambda: store.service.peers is not None and store.service.peers.cache.under_way == 1)
        waiting.cancel()
