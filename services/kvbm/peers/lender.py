"""Answers what other machines' kvbms ask, in the event loop. The bytes are sent by the threads of `server.py`.

Count  ──▶ LayoutStore.leading          Borrow ──▶ LayoutStore.lend, under an owner of its own for each loan
Take, Locate ──▶ SendOrder, for the thread    Received, Return, a connection's end ──▶ Loans ──▶ LayoutStore.owner_dead
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from itertools import count

from msgspec import Struct

from services.kvbm.config import PeerBackend, PeersConfig
from services.kvbm.layout.layout import LayoutStore
from services.kvbm.metrics import StoreMetrics
from services.kvbm.peers.loans import LoanEnds, LoanLimits, LoanRefused, Loans
from services.kvbm.peers.messages import (
    FRAME_BYTES_MOST,
    LAYOUTS_MOST,
    PEER_PROTOCOL,
    Borrow,
    Count,
    Counted,
    Lent,
    Locate,
    PeerAnswer,
    PeerHello,
    PeerLayout,
    PeerQuestion,
    PeerRefused,
    Received,
    Return,
    Take,
)
from services.kvbm.peers.nixl_messages import NixlReady
from services.kvbm.tickets.errors import Refusal
from services.kvbm.tickets.packing import unpack_keys
from shared.hashing import EXTRA_BYTES, KEY_BYTES
from shared.messages.kvbm import StoreBlock
from shared.pool.map import ArenaMap

BLOCK_FRAME_BYTES = 128
"""About the bytes of one lent block in a frame, without its tokens and labels."""


class SendOrder(Struct, frozen=True):
    """What a thread must send now."""

    number: int
    loan: int
    slots: ArenaMap
    block_bytes: int
    blocks: list[SendBlock]
    agent: NixlReady | None = None
    """Not None: where the blocks lie is sent, not their bytes."""


class SendBlock(Struct, frozen=True):
    """One block of a loan, to be sent if its slot still has this generation: it may have been discarded."""

    index: int
    slot: int
    checksum: int
    """XXH3-64 of the block. 0 if not known."""
    generation: int


class _Lent(Struct, frozen=True):
    layout: LayoutStore
    owner: str
    blocks: list[SendBlock]


class KvbmLender:
    """The lending side of one kvbm. `cut` ends a connection at once. With NIXL, `agent` is what peers read from, if it
    runs, and `lending` is called with whether anything is lent."""

    def __init__(
        self,
        instance: str,
        epoch: int,
        config: PeersConfig,
        layouts: Mapping[str, LayoutStore],
        metrics: StoreMetrics,
        cut: Callable[[int], None],
        *,
        first_loan: int = 1,
        agent: Callable[[], NixlReady | None] = lambda: None,
        lending: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self.instance = instance
        self.epoch = epoch
        self.loans = Loans(LoanLimits(config.loans, config.lent_bytes), first_loan=first_loan)
        self._layouts = layouts
        self._lend_s = config.lend_s
        self._backend: PeerBackend = config.backend
        self._agent = agent
        self._lending = lending
        self._metrics = metrics
        self._cut = cut
        self._lent: dict[int, _Lent] = {}
        self._owners = count(1)

    def hello(self) -> PeerHello:
        """Return what each connection begins with."""
        layouts = [
            PeerLayout(digest, layout.layout, layout.layout.kv.block_bytes)
            for digest, layout in list(self._layouts.items())[:LAYOUTS_MOST]
        ]
        return PeerHello(PEER_PROTOCOL, self.instance, self.epoch, layouts, self._backend)

    def answer(self, connection: int, question: PeerQuestion) -> PeerAnswer | SendOrder | None:
        """Answer one question of a connection; None if it has no answer."""
        self._carry_out(self.loans.arrived(connection))
        if isinstance(question, Received):
            return None
        try:
            match question:
                case Count():
                    return Counted(question.number, self._count(question))
                case Borrow():
                    return self._borrow(connection, question)
                case Take() | Locate():
                    return self._take(connection, question)
                case Return():
                    self._carry_out(self.loans.give_back(connection, question.loan))
                    return Counted(question.number, 0)
        except LoanRefused as wrong:
            return PeerRefused(question.number, wrong.code, str(wrong)[:200], isinstance(question, Take))
        except Refusal as wrong:
            return PeerRefused(question.number, "bad_request", str(wrong)[:200], isinstance(question, Take))

    def _count(self, ask: Count) -> int:
        layout = self._layouts.get(ask.layout)
        if layout is None:
            return 0
        layout.tickets.check_block_count(len(ask.keys) // KEY_BYTES)
        return layout.leading(unpack_keys(ask.keys))

    def _borrow(self, connection: int, ask: Borrow) -> Lent:
        if ask.epoch != self.epoch:
            raise LoanRefused("epoch", f"the epoch is {self.epoch}, not {ask.epoch}")
        layout = self._layouts.get(ask.layout.digest)
        if layout is None or layout.layout != ask.layout:
            raise LoanRefused("layout", f"there is no layout {ask.layout.digest}")
        layout.tickets.check_block_count(len(ask.keys) // KEY_BYTES)
        block_bytes = layout.layout.kv.block_bytes
        most = self.loans.room_bytes // block_bytes
        if most < 1:
            raise LoanRefused("full", f"{len(self.loans)} loans of {self.loans.size_bytes} bytes are open")
        most = min(most, FRAME_BYTES_MOST // (BLOCK_FRAME_BYTES + (8 + EXTRA_BYTES) * layout.layout.kv.block_size))
        owner = f"peer:{next(self._owners)}"
        layout.attach(owner)
        try:
            blocks = layout.lend(owner, unpack_keys(ask.keys)[:most])
        except Refusal:
            layout.owner_dead(owner)
            raise
        if sum(len(each.content.lora) + len(each.content.salt) for each in blocks) > FRAME_BYTES_MOST // 8:
            blocks = []  # labels of such length are not worth a larger frame
        if not blocks:
            layout.owner_dead(owner)
            return Lent(ask.number, 0, 0.0, [])
        deadline_s = asyncio.get_running_loop().time() + self._lend_s
        slots = [each.slot for each in blocks]
        loan = self.loans.open(connection, slots, block_bytes, deadline_s)
        generations = map(layout.slots.generation, slots)
        self._lent[loan] = _Lent(
            layout,
            owner,
            [
                SendBlock(index, each.slot, each.checksum, generation)
                for index, (each, generation) in enumerate(zip(blocks, generations, strict=True))
            ],
        )
        self._lending(True)
        contents = [each.content for each in blocks]
        wire = [StoreBlock(one.key, one.parent, one.tokens, one.lora, one.salt, one.extra) for one in contents]
        return Lent(ask.number, loan, self._lend_s, wire)

    def _take(self, connection: int, ask: Take | Locate) -> SendOrder:
        agent = self._agent() if isinstance(ask, Locate) else None
        if isinstance(ask, Locate) != (self._backend == "nixl"):
            raise LoanRefused("bad_request", f"peers.backend is {self._backend!r} here")
        if isinstance(ask, Locate) and agent is None:
            raise LoanRefused("no_agent", "the NIXL process does not run")
        if ask.epoch != self.epoch:
            raise LoanRefused("epoch", f"the epoch is {self.epoch}, not {ask.epoch}")
        self.loans.take(connection, ask.loan, ask.indices)
        lent = self._lent[ask.loan]
        block_bytes = lent.layout.layout.kv.block_bytes
        blocks = [lent.blocks[index] for index in ask.indices]
        self._metrics.peer_sent_blocks.inc(len(blocks))
        self._metrics.peer_sent_bytes.inc(len(blocks) * block_bytes)
        return SendOrder(ask.number, ask.loan, lent.layout.slots, block_bytes, blocks, agent)

    def record_checksums(self, loan: int, summed: Mapping[int, int]) -> None:
        """Record the checksums that were computed for blocks of a loan, by slot: the next reader is sent the same.
        After the loan has ended, the slots may have other blocks."""
        lent = self._lent.get(loan)
        if lent is not None:
            lent.layout.record_checksums(summed)

    def closed(self, connection: int) -> None:
        """End a connection, after its thread and the kernel have stopped reading slots for it."""
        self._carry_out(self.loans.connection_closed(connection))

    def expire(self) -> int:
        """End the loans whose deadline has come. Return how many connections were cut for it."""
        ends = self.loans.expire(asyncio.get_running_loop().time())
        self._carry_out(ends)
        return len(ends.cut)

    def _carry_out(self, ends: LoanEnds) -> None:
        for connection in ends.cut:
            self._cut(connection)
        for loan in ends.released:
            lent = self._lent.pop(loan)
            lent.layout.owner_dead(lent.owner)
        if ends.released and not self._lent:
            self._lending(False)

    def cut_loans(self) -> None:
        """Cut all connections that are being sent to, or read from by NIXL: what they read from has ended."""
        for connection in self.loans.sending:
            self._cut(connection)

    def validate(self) -> None:
        """Raise AssertionError if loans and their owners differ."""
        self.loans.validate()
        assert len(self._lent) == len(self.loans), "a loan without its slots"
