"""Exchange: an engine's side of its machine's block store: attached to it or not, and what is copied to and from it
(pure but for the mover and the attachment that it is given). Pure.

                KvbmUp, or the back-off is over         no copy is under way
    detached ──────────────────────────────▶ quieting ──────────────────────▶ attaching ── Attached ──▶ attached
       ▲                                        │  the lock is held, Attach asked │                          │
       └────────────────────────────────────────┴─────────────────────────────────┴──────────────────────────┘
            KvbmDown; refused; no answer to Attach, Store, Commit or Abort; an answer that makes no sense; a copy failed

Blocks that may be wrong are named to a kvbm that takes a Discard. Nothing waits for its answer: where it is lost, the
next sequence that such a block fails names it again.

One cure for all that goes wrong: to attach anew, which says that nothing of this engine is under way; hence the
quiet before it. So no request is ever repeated, and a kvbm that was restarted is no case of its own. The engine serves
all the while: what it does not get, it computes.

Around each step: `collect`, what has ended; the step is scheduled; `turn`, what to ask; the step is computed.
"""

from __future__ import annotations

from itertools import count
from typing import Literal, Protocol, TypeVar, assert_never

from services.worker.kv_connector.fetches import Fetches
from services.worker.kv_connector.link import LinkLost, Operation
from services.worker.kv_connector.stats import Tally
from services.worker.kv_connector.stores import Stores
from services.worker.messages import Exchanged, KvbmAsk, KvbmDown, KvbmLink, KvbmReply, KvbmUp
from services.worker.mover import Copied, Mover, Slots
from services.worker.scheduler.kv_cache_manager import KVCacheManager
from shared.errors import ProtocolError
from shared.kvbm_messages import (
    ABORT,
    ATTACH,
    ATTACH_REPLY,
    DISCARD,
    FETCH_REPLY,
    SETTLED,
    STORE_REPLY,
    Abort,
    Attach,
    Attached,
    Discard,
    Granted,
    KvbmRefused,
    StoreLayout,
)
from shared.pool.format import PoolUnfit

BACK_OFF_FIRST_S = 0.25
BACK_OFF_MOST_S = 5.0
"""A link that lasted as long starts the back-off anew."""
REASON_CHARS = 300
"""Of what ended a link: some of it is the kvbm's own words, and goes to the log."""


class Attachment(Protocol):
    """This engine process at the pool; `pool_attachment` has the one of a pool file."""

    def hold(self) -> str:
        """The owner's name, whose lock this process holds. No copy is under way. Raises PoolUnfit."""
        ...

    def map(self, attached: Attached) -> Slots:
        """The slots that the kvbm has named; nobody uses those of before any more. Raises PoolUnfit."""
        ...

    def close(self) -> None:
        """Nothing of the pool is touched any more."""
        ...


class Exchange:
    """See the module."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        mover: Mover,
        attachment: Attachment,
        layout: StoreLayout,
        *,
        worker: str,
        timeout_s: float,
        most_blocks: int,
        checks: bool = False,
    ) -> None:
        """`worker`: its instance id; `timeout_s`: for each answer; `most_blocks`: as `Stores` has it; `checks`: blocks
        go to the kvbm with a checksum, and are looked at when they come."""
        self.mover = mover
        self._kv_cache = kv_cache
        self._attachment = attachment
        self._layout = layout
        self._worker = worker
        self._timeout_s = timeout_s
        batches = count(1)
        self._stores = Stores(kv_cache, mover, batches, self._ask, most_blocks, checks=checks)
        self._fetches = Fetches(kv_cache, mover, batches, self._ask, checks=checks)
        self._state: Literal["detached", "quieting", "attaching", "attached"] = "detached"
        self._kvbm = ""
        """The one that is up; empty: none is."""
        self._owner = ""
        self._mapped = False
        """Whether the mover has slots."""
        self._most_discards = 0
        """Of one Discard, while attached; 0: the kvbm does not know it."""
        self._try_s = 0.0
        """While detached: when to attach."""
        self._delay_s = BACK_OFF_FIRST_S
        self._attached_s = 0.0
        self._asks = 0
        self._awaited: dict[int, Operation] = {}
        """Asked since the link began, or was tried to."""
        self._late: frozenset[int] = frozenset()
        """Stores of the link before: what is still granted to them nobody will write."""
        self._out: list[KvbmAsk | KvbmLink] = []
        self._link = KvbmLink(kvbm="")
        self._tally = Tally()

    # --- what the engine does with it

    def obey(self, command: KvbmUp | KvbmDown | KvbmReply, now_s: float) -> None:
        """Take what the shell has to say."""
        match command:
            case KvbmUp(kvbm):
                if kvbm != self._kvbm:
                    if self._state != "detached":
                        self._lose(f"kvbm {kvbm} has come", now_s)
                    self._kvbm = kvbm
                    self._delay_s, self._try_s = BACK_OFF_FIRST_S, now_s
            case KvbmDown(reason):
                self._kvbm = ""
                self._lose(reason, now_s)
            case KvbmReply():
                self._guarded(command, now_s)
            case _:
                assert_never(command)

    def collect(self, now_s: float) -> None:
        """The copies that have ended."""
        if not self.quiet:
            for copied in self.mover.ended():
                self._copied(copied, now_s)

    def turn(self, now_s: float) -> list[KvbmAsk | KvbmLink]:
        """What is due; returns what to tell the shell. Called each step: it takes some 2 µs where nothing is."""
        if self._state == "attached":
            self._discard()
            self._fetches.turn(now_s)
            self._stores.turn(now_s)
        elif self._state == "detached" and self._kvbm and now_s >= self._try_s:
            self._state = "quieting"
        if self._state == "quieting" and self.quiet:
            self._attach(now_s)
        out, self._out = self._out, []
        return out

    @property
    def quiet(self) -> bool:
        """Whether no copy is under way."""
        return self._stores.quiet and self._fetches.quiet

    @property
    def wait_until_s(self) -> float | None:
        """When `turn` will have something to do though nobody says anything; a mover with a descriptor is watched."""
        due_s = self.mover.ends_s
        mine_s: float | None = None
        if self._state == "attached":
            mine_s = self._stores.wait_until_s
        elif self._state == "detached" and self._kvbm:
            mine_s = self._try_s
        return mine_s if due_s is None else due_s if mine_s is None else min(due_s, mine_s)

    @property
    def changed(self) -> bool:
        """Whether there is `news`."""
        return self._tally.changed

    def news(self) -> Exchanged | None:
        """What was exchanged, where it is more than was told."""
        return self._tally.news()

    def close(self) -> None:
        """No copy begins any more, and the pool is left alone when this returns. Where the mover fails, as its GPU is
        lost and may still write, the lock goes with the process."""
        self.mover.close()
        self._attachment.close()

    # --- the link

    def _attach(self, now_s: float) -> None:
        try:
            self._owner = self._attachment.hold()
        except PoolUnfit as wrong:
            self._lose(str(wrong), now_s)
            return
        self._state = "attaching"
        self._ask("attach", ATTACH.encode(Attach(self._worker, self._owner, self._layout)))

    def _attached(self, attached: Attached, now_s: float) -> None:
        """Raises LinkLost."""
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
        self._state = "attached"
        self._attached_s = now_s
        self._most_discards = attached.blocks_per_request if attached.takes_discards else 0
        self._stores.open(self._owner, attached.slots, attached.blocks_per_request)
        self._fetches.open(self._owner, attached.slots, attached.blocks_per_request)
        self._kv_cache.set_connected(True)
        self._tell(KvbmLink(self._kvbm, attached.layout))

    def _lose(self, reason: str, now_s: float) -> None:
        """There is no link any more. Attached anew once copies have ended, and some time has passed."""
        if self._state == "attached":
            self._late = frozenset(self._stores.close())
            self._fetches.close()
            self._kv_cache.set_connected(False)
            if now_s - self._attached_s >= BACK_OFF_MOST_S:
                self._delay_s = BACK_OFF_FIRST_S
        self._awaited.clear()
        self._state = "detached"
        self._try_s = now_s + self._delay_s
        self._delay_s = min(2 * self._delay_s, BACK_OFF_MOST_S)
        self._tell(KvbmLink(kvbm="", reason=reason[:REASON_CHARS]))

    def _discard(self) -> None:
        keys = self._kv_cache.new_discards()
        if keys and self._most_discards:
            self._tally.discarded(len(keys))
            for first in range(0, len(keys), self._most_discards):
                packed = b"".join(keys[first : first + self._most_discards])
                self._ask("discard", DISCARD.encode(Discard(self._owner, packed)))

    def _tell(self, link: KvbmLink) -> None:
        if link != self._link:
            self._link = link
            self._out.append(link)

    # --- questions and answers

    def _ask(self, operation: Operation, payload: bytes) -> int:
        self._asks += 1
        self._awaited[self._asks] = operation
        self._out.append(KvbmAsk(self._asks, operation, payload, self._timeout_s))
        return self._asks

    def _guarded(self, reply: KvbmReply, now_s: float) -> None:
        operation = self._awaited.get(reply.number)
        try:
            if operation is not None:
                if reply.last:
                    del self._awaited[reply.number]
                self._answered(operation, reply, now_s)
            elif reply.number in self._late and not reply.failed:
                self._late -= {reply.number}
                self._granted_late(STORE_REPLY.decode(reply.payload))
        except (LinkLost, ProtocolError) as wrong:
            self._lose(f"{operation}: {wrong}", now_s)

    def _answered(self, operation: Operation, reply: KvbmReply, now_s: float) -> None:
        """Raises LinkLost, ProtocolError."""
        if reply.failed and operation not in ("fetch", "release", "discard"):
            raise LinkLost(reply.failed)
        match operation:
            case "attach":
                self._attached(_accepted(ATTACH_REPLY.decode(reply.payload)), now_s)
            case "store":
                self._stores.granted(reply.number, _known(STORE_REPLY.decode(reply.payload)))
            case "commit" | "abort":
                self._tally.committed(self._stores.settled(reply.number, _known(SETTLED.decode(reply.payload))))
            case "fetch":
                fetched = None if reply.failed else _known(FETCH_REPLY.decode(reply.payload))
                self._fetches.fetched(reply.number, fetched, reply.last, now_s)
            case "release" | "discard":
                if not reply.failed:
                    _known(SETTLED.decode(reply.payload))
            case _:
                assert_never(operation)

    def _granted_late(self, reply: Granted | KvbmRefused) -> None:
        """To a Store from before the link was lost, too late for the Attach to have ended it."""
        if isinstance(reply, Granted) and reply.ticket and self._owner:
            self._ask("abort", ABORT.encode(Abort(self._owner, reply.ticket)))

    # --- copies

    def _copied(self, copied: Copied, now_s: float) -> None:
        if self._stores.owns(copied.batch):
            self._tally.saved(copied)
            self._stores.ended(copied, now_s)
        else:
            self._tally.loaded(copied)
            self._fetches.ended(copied)
        if copied.failed and self._state == "attached":
            self._lose(f"copying failed: {copied.failed}", now_s)
        elif copied.failed:  # a GPU that is lost writes for some ms more, and to attach says that nothing does
            self._state, self._try_s = "detached", max(self._try_s, now_s + BACK_OFF_FIRST_S)

    def validate(self) -> None:
        """Raises AssertionError where the exchange contradicts itself; call it between steps."""
        self._stores.validate()
        self._fetches.validate()
        assert self._state in ("detached", "quieting") or self._kvbm, "attached to nobody"
        assert self._state != "attached" or self._mapped
        assert self._state not in ("detached", "quieting") or set(self._awaited.values()) <= {"abort"}
        assert bool(self._link.kvbm) == (self._state == "attached")


def _accepted(reply: Attached | KvbmRefused) -> Attached:
    if isinstance(reply, KvbmRefused):
        raise LinkLost(f"{reply.code}: {reply.reason}")
    return reply


Answer = TypeVar("Answer")


def _known(reply: Answer | KvbmRefused) -> Answer | KvbmRefused:
    """A refusal is an answer, unless the kvbm does not know this engine. Raises LinkLost."""
    if isinstance(reply, KvbmRefused) and reply.code == "unknown_owner":
        raise LinkLost(reply.reason)
    return reply
