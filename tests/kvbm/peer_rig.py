"""Two machines in one process, a kvbm and a pool each, and peers that lie, stall and stop."""

from __future__ import annotations

import importlib.util
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from services.kvbm.config import PeersConfig
from services.kvbm.peers.messages import (
    PEER_ANSWER,
    PEER_PROTOCOL,
    PEER_QUESTION,
    QUESTION_BYTES_MOST,
    BlockHeader,
    Borrow,
    Count,
    Counted,
    Lent,
    PeerAddress,
    PeerAnswer,
    PeerFault,
    PeerHello,
    PeerLayout,
    PeerQuestion,
    Received,
    Return,
    Take,
    pack_header,
)
from services.kvbm.peers.nixl_process import MODULE
from services.kvbm.peers.peers import KvbmPeers
from services.kvbm.peers.road import ReadBlocks
from services.kvbm.peers.stream import PeerStream
from shared.blocks import Content
from shared.messages.kvbm import StoreBlock, StoreLayout
from tests.kvbm.chains import keys
from tests.kvbm.store_rig import LAYOUT, LIMIT_S, Engine, Store, payload, serving, until

ONLY_WITH_NIXL = pytest.mark.skipif(importlib.util.find_spec(MODULE) is None, reason="NIXL is missing: ./check nixl")
BACKENDS = ["sockets", pytest.param("nixl", marks=ONLY_WITH_NIXL)]
PEERS = PeersConfig(listen="127.0.0.1:0", streams=2, take_bytes=3 * 8192)
"""Three blocks a take, so that even short reads have several."""


def address(store: Store) -> PeerAddress:
    """Return where a kvbm lends."""
    return PeerAddress(store.runtime.instance, "127.0.0.1", of(store).server.port)


@asynccontextmanager
async def machines(
    folder: Path, *, lender: PeersConfig = PEERS, reader: PeersConfig = PEERS, **of_reader: object
) -> AsyncIterator[tuple[Store, Engine, Store, Engine]]:
    """Run two kvbms, with an engine of LAYOUT attached to each. In the end neither holds anything."""
    (folder / "one").mkdir()
    (folder / "two").mkdir()
    async with (
        serving(folder / "one", instance="lender", peers=lender) as one,
        serving(folder / "two", instance="reader", peers=reader, **of_reader) as two,
    ):
        yield one, await one.world.attached("a"), two, await two.world.attached("b")
        for store in (one, two):
            await rests(store)


async def rests(store: Store) -> None:
    """Return when a kvbm holds no slot, writes to none, and lends none."""
    peers = store.service.peers
    assert peers is not None

    def met() -> bool:
        hosts = [layout.tiers.statistics().host for layout in store.service.layouts.open.values()]
        busy = any(host.held or host.writing or host.loading or host.quarantined for host in hosts)
        tickets = [layout.tickets.statistics() for layout in store.service.layouts.open.values()]
        open_ones = any(each.stores or each.fetches or each.expired for each in tickets)
        return not (busy or open_ones or len(peers.server.lender.loans) or peers.imports.under_way)

    await until(met)
    store.service.validate()


async def read(store: Store, peer: PeerAddress, contents: Sequence[Content], limit_s: float = LIMIT_S) -> ReadBlocks:
    """Read blocks of LAYOUT from a peer."""
    assert store.service.peers is not None
    layout = store.service.layouts.open[LAYOUT.digest]
    return await store.service.peers.imports.read(peer, layout, keys(list(contents)), limit_s)


def of(store: Store) -> KvbmPeers:
    """Return what a kvbm has to do with others."""
    assert store.service.peers is not None
    return store.service.peers


async def ready(*stores: Store) -> None:
    """Return when blocks can be lent."""
    await until(lambda: all((nixl := of(store).nixl) is None or nixl.ready is not None for store in stores))


def lending(store: Store) -> int:
    """Return how many loans a kvbm has open."""
    return len(of(store).server.lender.loans)


def loans_are_over(store: Store) -> list[int]:
    """Let the time of all loans be over; return the slots that they had."""
    loans = list(of(store).server.lender.loans._loans.values())
    for loan in loans:
        loan.deadline_s = 0.0
    of(store).tick()
    return [slot for loan in loans for slot in loan.slots]


def faults(store: Store, reason: str, direction: str = "read") -> float:
    """Return how many faults of a kind a kvbm has counted."""
    return store.metric("headrace_kvbm_peer_faults_total", direction=direction, reason=reason)


class Liar:
    """A peer that has these blocks of LAYOUT and answers as a kvbm would; its methods are there to be replaced."""

    instance = "liar"
    epoch = 7
    layout: StoreLayout = LAYOUT

    def __init__(self, contents: Sequence[Content]) -> None:
        self.contents = list(contents)
        self.streams: list[PeerStream] = []
        self.stopped = threading.Event()
        self.questions: list[PeerQuestion] = []

    def hello(self) -> PeerAnswer:
        layouts = [PeerLayout(self.layout.digest, self.layout, self.layout.kv.block_bytes)]
        return PeerHello(PEER_PROTOCOL, self.instance, self.epoch, layouts)

    def lend(self, ask: Borrow) -> PeerAnswer:
        blocks = [StoreBlock(each.key, each.parent, each.tokens) for each in self.contents]
        return Lent(ask.number, 1, 30.0, blocks[: len(ask.keys) // 16])

    def send(self, stream: PeerStream, take: Take, index: int) -> None:
        """Send one block."""
        data = payload(self.contents[index])
        stream.send_raw(pack_header(BlockHeader(take.number, index, len(data), xxh3_64_intdigest(data))) + data)

    def answer(self, stream: PeerStream, question: PeerQuestion) -> None:
        self.questions.append(question)
        match question:
            case Borrow():
                stream.send_frame(PEER_ANSWER.encode(self.lend(question)))
            case Take():
                for index in question.indices:
                    self.send(stream, question, index)
            case Count() | Return():
                stream.send_frame(PEER_ANSWER.encode(Counted(question.number, 0)))
            case Received():
                pass

    def serve(self, stream: PeerStream) -> None:
        with suppress(PeerFault):
            stream.send_frame(PEER_ANSWER.encode(self.hello()))
            while True:
                self.answer(stream, PEER_QUESTION.decode(stream.receive_frame(QUESTION_BYTES_MOST)))


@contextmanager
def listening(liar: Liar) -> Iterator[PeerAddress]:
    """Serve a liar on a port, with a thread for each connection, until the block ends."""
    door = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def accept() -> None:
        with suppress(OSError):
            while True:
                stream = PeerStream(door.accept()[0])
                liar.streams.append(stream)
                threads.append(threading.Thread(target=liar.serve, args=(stream,)))
                threads[-1].start()

    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield PeerAddress(Liar.instance, "127.0.0.1", door.getsockname()[1])
    finally:
        liar.stopped.set()
        door.shutdown(socket.SHUT_RDWR)
        door.close()
        accepting.join()
        for stream in liar.streams:
            stream.cut()
        for thread in threads:
            thread.join()
        for stream in liar.streams:
            stream.close()
