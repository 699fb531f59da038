"""KVConnector: an engine's side of its machine's kvbm: whether it is attached, and what is copied to and from the pool.
It decides alone; the mover and the attachment that it is given act. Pure.

                KvbmUp, or the back-off is over         no copy is under way
    detached ──────────────────────────────▶ quieting ──────────────────────▶ attaching ── Attached ──▶ attached
       ▲                                        │  the lock is held, Attach asked │                          │
       └────────────────────────────────────────┴─────────────────────────────────┴──────────────────────────┘
            KvbmDown; refused; no answer to Attach, Store, Commit or Abort; an answer that makes no sense; a copy failed

There is one cure for all failures: to attach again, which says that nothing of this engine is under way; hence the
quiet before it. So no request is ever repeated, and a kvbm that was restarted is no special case. The engine serves
requests all the while: blocks that it does not get, it computes.

Blocks that may be wrong are named to a kvbm that takes a Discard. Nothing waits for its answer: where it is lost, the
next sequence that such a block fails names the block again.

Around each step: `poll_copies`, which takes up copies that have ended; the step is scheduled; `step`, which asks the
kvbm; the step is computed. An engine whose device computes by itself calls both, and `handle`, also meanwhile. Loads
that have ended may wait for a later `poll_copies`, so that they delay no step by much.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import count
from math import inf
from typing import Literal, Protocol, TypeVar, assert_never

import msgspec
from msgspec import Struct

from services.worker.contracts.device_blocks import DeviceBlocks
from services.worker.contracts.messages import Exchanged, KvbmLink, KvbmOperation
from services.worker.contracts.mover import Copied, Mover, Slots
from services.worker.contracts.sharing import Sharer, ShareReader
from services.worker.kv_connector.actions import (
    Action,
    AskSharer,
    CancelBatch,
    LinkLost,
    LoadBatch,
    ReturnShare,
    SaveBatch,
)
from services.worker.kv_connector.contract import KvbmAsk, KvbmDown, KvbmNews, KvbmReply, KvbmUp
from services.worker.kv_connector.fetches import Fetches
from services.worker.kv_connector.stats import TransferStats
from services.worker.kv_connector.stores import COLLECT_S, Stores
from shared.errors import ProtocolError
from shared.messages.kvbm import (
    ATTACH,
    ATTACH_REPLY,
    DISCARD,
    FETCH_REPLY,
    SETTLED,
    STORE_REPLY,
    Attach,
    Attached,
    Discard,
    KvbmRefused,
    StoreLayout,
)
from shared.pool.format import PoolUnfit

BACK_OFF_FIRST_S = 0.25
"""Seconds before the first new try to attach."""
BACK_OFF_MOST_S = 5.0
"""Most seconds before a new try. A link that lasted as long begins the back-off again."""
REASON_CHARS = 300
"""Most characters that are kept of why a link ended: the kvbm's own words may be among them, and they are logged."""
_STEPPED = frozenset[KvbmOperation](("attach", "store", "fetch"))
"""The operations after whose answers there is more to do at once. The others end something."""
_NEXT: dict[str, str] = {"detached": "quieting", "quieting": "attaching", "attaching": "attached"}
"""State → the state that follows it when all goes well. From each, `detached` may follow instead."""


class Attachment(Protocol):
    """This engine process at the pool; `pool_attachment` has the one of a pool file."""

    def hold(self) -> str:
        """Return the owner's name, whose lock this process holds. No copy is under way. Raise PoolUnfit."""
        ...

    def map(self, attached: Attached) -> Slots:
        """Return the slots that the kvbm has named; slots that were mapped before are no longer used. Raises
        PoolUnfit."""
        ...

    def close(self) -> None:
        """Leave the pool: it is not touched any longer."""
        ...


class ExchangeTerms(Struct, frozen=True):
    """How an engine exchanges blocks with its kvbm."""

    worker: str
    """The worker's instance id."""
    layout: StoreLayout
    timeout_s: float
    """Seconds for each answer."""
    most_blocks: int
    """Most blocks of the device that are asked for or held at once."""
    checksums: bool = False
    """Whether blocks go to the kvbm with a checksum, which is compared when they come back."""
    collect_s: float = COLLECT_S
    """Seconds for which a block waits for others that are stored with it."""


class KVConnector:
    """One engine's connection to the kvbm of its machine."""

    def __init__(
        self,
        blocks: DeviceBlocks,
        mover: Mover,
        attachment: Attachment,
        terms: ExchangeTerms,
        share_reader: ShareReader | None = None,
        sharer: Sharer | None = None,
    ) -> None:
        """`share_reader` and `sharer` exchange blocks with other engines."""
        self.mover = mover
        self._blocks = blocks
        self._attachment = attachment
        self._terms = terms
        self._layout = terms.layout
        self._numbers, batches = count(1), count(1)
        common = (blocks, self._numbers, batches)
        self._stores = Stores(*common, terms.most_blocks, checksums=terms.checksums, collect_s=terms.collect_s)
        reads = share_reader is not None
        self._fetches = Fetches(*common, checksums=terms.checksums, reads_shared=reads)
        self._share_reader = share_reader
        self._sharer = sharer
        self._state: Literal["detached", "quieting", "attaching", "attached"] = "detached"
        """Changed by `_enter` alone."""
        self._kvbm = ""
        """Instance id of the kvbm that is up. Empty if none is."""
        self._namespace = ""
        """The namespace of the kvbm that was up last. Empty if it does not say it."""
        self._owner = ""
        """Name of the lock that this process holds in the pool's directory."""
        self._mapped = False
        """Whether the mover has slots."""
        self._most_discards = 0
        """Most keys of one Discard, while attached. 0 if the kvbm does not know Discard."""
        self._try_s = 0.0
        """While detached: when to attach."""
        self._delay_s = BACK_OFF_FIRST_S
        """Seconds from the next loss of the link to the next try."""
        self._attached_s = 0.0
        """When the link began."""
        self._interrupted = False
        """Whether a link ended with an answer that was none, or made no sense, and the first try to attach again is not
        over. Not after a link that stored nothing, which may always be so."""
        self._stored = True
        """Whether blocks were stored since a link was lost last; True before the first."""
        self._paused = False
        """Whether the engine sleeps, or is about to: nothing is exchanged."""
        self._awaited: dict[int, KvbmOperation] = {}
        """Number → operation of the requests of this link, or of the try to attach, that are not answered."""
        self._messages: list[KvbmAsk | KvbmLink] = []
        """Messages that the next `step` returns."""
        self._ended_loads: deque[Copied] = deque()
        """Loads that have ended and were not taken up, the oldest first."""
        self._link = KvbmLink(kvbm="")
        """The link as the shell knows it."""
        self._stats = TransferStats()

    # --- what the engine calls

    def handle(self, news: KvbmNews, now_s: float) -> None:
        """Take up what the connection to the kvbm says."""
        match news:
            case KvbmUp(kvbm, namespace):
                if kvbm != self._kvbm:
                    if self._state != "detached":
                        self._detach(f"kvbm {kvbm} has come", now_s)
                    self._kvbm, self._namespace = kvbm, namespace
                    self._delay_s, self._try_s = BACK_OFF_FIRST_S, now_s
            case KvbmDown(reason):
                self._kvbm = ""
                self._detach(reason, now_s)
            case KvbmReply():
                self._handle_reply(news, now_s)
            case _:
                assert_never(news)

    def poll_copies(self, now_s: float, most_loaded: float = inf) -> None:
        """Take up the copies that have ended, and what other engines share and read. Take up batches of loads until
        they have `most_loaded` blocks; the others wait, in order."""
        if self._sharer is not None:
            if not self._paused:
                self._sharer.turn(self._owner, now_s)
            self._stats.note_sharing(self._sharer.failures, self._sharer.failing)
        if not self.idle:
            for copied in self.mover.ended():
                self._handle_copied(copied, now_s)
        if self._share_reader is not None:
            for answer in self._share_reader.turn():
                self._perform(self._fetches.shared(answer))
            self._ended_loads.extend(self._share_reader.ended())
        while self._ended_loads and most_loaded > 0:
            copied = self._ended_loads.popleft()
            most_loaded -= len(copied.good)
            self._stats.count_loaded(copied)
            self._perform(self._fetches.loaded(copied))
        if self._share_reader is not None and not self._ended_loads:  # all that was shared is known
            for worker in self._share_reader.gone_sharers():
                self._blocks.offer_shared(worker)

    def step(self, now_s: float, *, exchanges: bool = True) -> list[KvbmAsk | KvbmLink]:
        """Do what is due; return what is asked of the kvbm, and news of the link. Called each step: it takes some 2 µs
        while nothing is due. Without `exchanges`, begin no exchange of blocks: the link is only kept."""
        if self._state == "attached" and exchanges:
            self._discard()
            self._perform(self._fetches.step(now_s))
            self._perform(self._stores.step(now_s))
        elif self._state == "detached" and self._kvbm and not self._paused and now_s >= self._try_s:
            self._enter("quieting")
        if self._state == "quieting" and self.idle:
            self._attach(now_s)
        messages, self._messages = self._messages, []
        return messages

    @property
    def idle(self) -> bool:
        """Whether no copy is under way, and none has ended that was not taken up."""
        return self._stores.idle and self._fetches.idle

    @property
    def exchanging(self) -> bool:
        """Whether copies, or answers that copies may follow, are under way."""
        return not self.idle or not _STEPPED.isdisjoint(self._awaited.values())

    @property
    def unsettled(self) -> bool:
        """Whether blocks are exchanged or are about to be stored, or the first try after a lost link is not over. Each
        of these ends by itself. An engine that steps only while it has requests goes on stepping until then. It need
        not step for the answer to a Commit: ranks of vLLM, which spin from step to step, could keep the kvbm from
        giving it."""
        return self.exchanging or self._stores.collecting or self._interrupted

    @property
    def attached(self) -> bool:
        """Whether blocks are exchanged."""
        return self._state == "attached"

    @property
    def wait_until_s(self) -> float | None:
        """When `step` or `poll_copies` will have something to do without any event. None if never, or when the mover's
        descriptor is readable."""
        copies_s = self.mover.ends_s
        own_s: float | None = None
        if self._state == "attached":
            own_s = self._stores.wait_until_s
        elif self._state == "detached" and self._kvbm and not self._paused:
            own_s = self._try_s
        shares = [one.wait_until_s for one in (self._sharer, self._share_reader) if one is not None]
        if self._ended_loads:
            return 0.0
        return min([due_s for due_s in (copies_s, own_s, *shares) if due_s is not None], default=None)

    @property
    def stats_changed(self) -> bool:
        """Whether `new_stats` would return any."""
        return self._stats.changed

    def new_stats(self) -> Exchanged | None:
        """Return what was exchanged since the engine started, or None if that is as it was at the last call."""
        return self._stats.new_totals()

    def pause(self, now_s: float) -> None:
        """Begin no copy until `resume`: the engine's blocks are about to go."""
        self._paused = True
        self._detach("the engine sleeps", now_s)

    def let_go(self) -> bool:
        """Have the mover let go of the pool, unless a copy is still under way; return whether it has. Called after
        `pause`, until it does."""
        assert self._paused
        if self.idle and self._mapped:
            self._mapped = False
            self.mover.detach()
        if self.idle and self._share_reader is not None:
            self._share_reader.leave()
        if self._sharer is not None:
            self._sharer.close()
        return self.idle

    def resume(self, now_s: float) -> None:
        """The engine's blocks are there again: attach at once."""
        self._paused = False
        self._delay_s, self._try_s = BACK_OFF_FIRST_S, now_s

    def use_layout(self, layout: StoreLayout, now_s: float) -> None:
        """Exchange blocks of another layout from now on, of the same size."""
        assert layout.kv.block_bytes == self._layout.kv.block_bytes
        self._layout = layout
        if self._state != "detached":
            self._detach("the engine's blocks have another name now", now_s)

    def close(self) -> None:
        """Begin no further copy. The pool is left alone when this returns. Where the mover fails, since its GPU is lost
        and may still write, the lock is released only when the process ends."""
        if self._sharer is not None:
            self._sharer.close()
        if self._share_reader is not None:
            self._share_reader.close()
        self.mover.close()
        self._attachment.close()

    # --- the link

    def _enter(self, state: Literal["detached", "quieting", "attaching", "attached"]) -> None:
        assert state in ("detached", _NEXT.get(self._state)), f"{self._state} → {state}"
        self._state = state

    def _attach(self, now_s: float) -> None:
        """quieting → attaching, or detached where the pool cannot be used."""
        try:
            self._owner = self._attachment.hold()
        except PoolUnfit as wrong:
            self._detach(str(wrong), now_s)
            return
        self._enter("attaching")
        attach = Attach(self._terms.worker, self._owner, self._layout, self._terms.timeout_s)
        self._ask(KvbmAsk(next(self._numbers), "attach", ATTACH.encode(attach)))

    def _finish_attach(self, attached: Attached, now_s: float) -> None:
        """attaching → attached. Raise LinkLost if the pool is not as it must be."""
        if attached.kvbm != self._kvbm or attached.layout != self._layout.digest or attached.blocks_per_request < 1:
            raise LinkLost(f"kvbm {self._kvbm} answered for {attached.kvbm}, layout {attached.layout}")
        if attached.slot_bytes < self._layout.kv.block_bytes:
            raise LinkLost(f"slots of {attached.slot_bytes} bytes for blocks of {self._layout.kv.block_bytes}")
        if self._mapped:
            self._mapped = False
            self.mover.detach()
        try:
            self.mover.attach(self._attachment.map(attached))
        except PoolUnfit as wrong:
            raise LinkLost(str(wrong)) from None
        self._mapped = True
        self._interrupted = False
        self._enter("attached")
        self._attached_s = now_s
        self._most_discards = attached.blocks_per_request if attached.takes_discards else 0
        self._stores.open(self._owner, attached.slots, attached.blocks_per_request)
        self._fetches.open(self._owner, attached.slots, attached.blocks_per_request)
        self._blocks.set_connected(True)
        self._report_link(KvbmLink(self._kvbm, attached.layout, namespace=self._namespace))

    def _detach(self, reason: str, now_s: float) -> None:
        """Any state → detached. The engine attaches again once the back-off is over and copies have ended."""
        self._interrupted = False
        if self._state == "attached":
            self._stored = False
            self._perform(self._stores.close())
            self._perform(self._fetches.close())
            self._blocks.set_connected(False)
            if now_s - self._attached_s >= BACK_OFF_MOST_S:
                self._delay_s = BACK_OFF_FIRST_S
        self._awaited.clear()
        self._enter("detached")
        self._try_s = now_s + self._delay_s
        self._delay_s = min(2 * self._delay_s, BACK_OFF_MOST_S)
        self._report_link(KvbmLink(kvbm="", reason=reason[:REASON_CHARS]))

    def _put_off(self, now_s: float) -> None:
        """quieting → detached: wait at least the shortest back-off before the next try."""
        self._enter("detached")
        self._try_s = max(self._try_s, now_s + BACK_OFF_FIRST_S)

    def _report_link(self, link: KvbmLink) -> None:
        if link != self._link:
            self._link = link
            self._messages.append(link)

    # --- actions

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case KvbmAsk():
                    self._ask(action)
                case SaveBatch(batch, copies, until_s):
                    self.mover.save(batch, copies, until_s)
                case LoadBatch(batch, copies, share):
                    if share and self._share_reader is not None:
                        self._share_reader.load(batch, share, copies)
                    else:
                        self.mover.load(batch, copies)
                case CancelBatch(batch):
                    self.mover.cancel(batch)
                    if self._share_reader is not None:
                        self._share_reader.cancel(batch)
                case AskSharer(number, worker, keys):
                    assert self._share_reader is not None
                    self._share_reader.ask(number, self._owner, worker, keys)
                case ReturnShare(number):
                    assert self._share_reader is not None
                    self._share_reader.release(number)
                case _:
                    assert_never(action)

    def _ask(self, ask: KvbmAsk) -> None:
        self._awaited[ask.number] = ask.operation
        timeout_s = ask.timeout_s or self._terms.timeout_s
        self._messages.append(msgspec.structs.replace(ask, timeout_s=timeout_s))

    def _discard(self) -> None:
        """Name blocks that may be wrong to the kvbm."""
        keys = self._blocks.new_discards()
        if keys and self._most_discards:
            self._stats.count_discarded(len(keys))
            for first in range(0, len(keys), self._most_discards):
                packed = b"".join(keys[first : first + self._most_discards])
                self._ask(KvbmAsk(next(self._numbers), "discard", DISCARD.encode(Discard(self._owner, packed))))

    # --- answers and copies

    def _handle_reply(self, reply: KvbmReply, now_s: float) -> None:
        operation = self._awaited.get(reply.number)
        if operation is None:
            return  # of the link before: what it granted ends with the Attach
        try:
            if reply.last:
                del self._awaited[reply.number]
            self._handle_answer(operation, reply, now_s)
        except (LinkLost, ProtocolError) as wrong:
            interrupted = self._state == "attached" and self._stored
            self._detach(f"{operation}: {wrong}", now_s)
            self._interrupted = interrupted

    def _handle_answer(self, operation: KvbmOperation, reply: KvbmReply, now_s: float) -> None:
        """Raise LinkLost, ProtocolError."""
        if reply.failed and operation not in ("fetch", "release", "discard"):
            raise LinkLost(reply.failed)
        match operation:
            case "attach":
                self._finish_attach(_accepted(ATTACH_REPLY.decode(reply.payload)), now_s)
            case "store":
                self._perform(self._stores.granted(reply.number, _known(STORE_REPLY.decode(reply.payload))))
            case "commit" | "abort":
                committed = self._stores.settled(reply.number, _known(SETTLED.decode(reply.payload)))
                self._stats.count_committed(committed)
                self._stored = self._stored or committed > 0
            case "fetch":
                fetched = None if reply.failed else _known(FETCH_REPLY.decode(reply.payload))
                self._perform(self._fetches.fetched(reply.number, fetched, reply.last, now_s))
            case "release" | "discard":
                if not reply.failed:
                    _known(SETTLED.decode(reply.payload))
            case _:
                assert_never(operation)

    def _handle_copied(self, copied: Copied, now_s: float) -> None:
        if self._stores.owns(copied.batch):
            self._stats.count_saved(copied)
            self._perform(self._stores.saved(copied, now_s))
        else:
            self._ended_loads.append(copied)
        if copied.failed and self._state == "attached":
            self._detach(f"copying failed: {copied.failed}", now_s)
        elif copied.failed:  # a lost GPU writes for some ms more, and to attach says that nothing does
            self._put_off(now_s)

    def validate(self) -> None:
        """Raise AssertionError if the connector contradicts itself; call it between steps."""
        self._stores.validate()
        self._fetches.validate()
        assert self._state in ("detached", "quieting") or self._kvbm, "attached to no kvbm"
        assert self._state != "attached" or self._mapped
        assert self._state == "detached" or not self._paused
        assert self._state not in ("detached", "quieting") or not self._awaited
        assert bool(self._link.kvbm) == (self._state == "attached")
        assert all(self._fetches.owns(copied.batch) for copied in self._ended_loads)


def _accepted(reply: Attached | KvbmRefused) -> Attached:
    if isinstance(reply, KvbmRefused):
        raise LinkLost(f"{reply.code}: {reply.reason}")
    return reply


Answer = TypeVar("Answer")


def _known(reply: Answer | KvbmRefused) -> Answer | KvbmRefused:
    """Return the reply: a refusal is an answer. Raise LinkLost if the kvbm does not know this engine."""
    if isinstance(reply, KvbmRefused) and reply.code == "unknown_owner":
        raise LinkLost(reply.reason)
    return reply
