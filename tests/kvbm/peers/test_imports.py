"""Blocks that one kvbm reads from another one's pool, over real connections."""

from __future__ import annotations

from pathlib import Path

from services.kvbm.peers.messages import Take
from services.kvbm.peers.stream import PeerStream
from services.kvbm.tickets.results import TicketLimits
from tests.kvbm.chains import chain
from tests.kvbm.peer_rig import PEERS, Liar, address, faults, listening, machines, read, rests
from tests.kvbm.store_rig import SMALL_BYTES, serving


async def test_blocks_of_another_machine_are_found_in_this_ones_pool(tmp_path: Path) -> None:
    async with machines(tmp_path) as (one, a, two, b):
        contents = chain(*range(1, 21))
        assert await a.store(contents) == 20
        done = await read(two, address(one), contents)
        assert done.fault is None
        assert (len(done.written), done.lent) == (20, 20)
        assert await b.load(contents) == (20, 0)
        assert two.metric("headrace_kvbm_peer_read_blocks_total") == 20
        assert one.metric("headrace_kvbm_peer_sent_bytes_total") == 20 * 8000
        again = await read(two, address(one), contents)
        assert again is not None
        assert again.written == {}, "they are here"


async def test_a_read_that_outlasts_its_store_ticket_publishes_nothing(tmp_path: Path) -> None:
    class Stops(Liar):
        def send(self, stream: PeerStream, take: Take, index: int) -> None:
            self.stopped.wait()

    async with serving(tmp_path, peers=PEERS, tickets=TicketLimits(store_time_s=0.1)) as store:
        engine = await store.world.attached("b")
        with listening(Stops(chain(1, 2, 3))) as peer:
            done = await read(store, peer, chain(1, 2, 3))
        assert not done.written
        assert faults(store, "late") == 1
        assert await engine.load(chain(1, 2, 3)) == (0, 0)
        await rests(store)


async def test_a_read_writes_to_no_more_than_its_share_of_the_slots(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    async with (
        serving(tmp_path, instance="lender", peers=PEERS) as one,
        serving(tmp_path / "two", instance="reader", peers=PEERS, size_bytes=SMALL_BYTES) as two,
    ):
        a, b = await one.world.attached("a"), await two.world.attached("b")
        contents = chain(*range(1, 21))
        await a.store(contents)
        done = await read(two, address(one), contents)
        assert len(done.written) == 2, "a quarter of eight slots"
        assert await b.load(contents) == (2, 0)
