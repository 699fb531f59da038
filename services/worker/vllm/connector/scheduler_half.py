"""SchedulerHalf: the connector's half in vLLM's scheduler, which decides what is asked of the kvbm and what the ranks
copy.

    vLLM's scheduler ──find, place, offer──▶ VllmBlocks ◀──▶ KVConnector ──KvbmAsk──▶ SocketClient ──▶ kvbm
                                                                 │  ▲
                                       orders of the next step ◀─┘  └── reports of the ranks

It runs in the scheduler's thread, and waits for nothing while vLLM computes. If it does not, a request waits a moment
for the kvbm's answer, and a step for loads that are about to end: else both would be seen a step later, and vLLM sleeps
1 ms between two steps without computing. Nothing goes on while vLLM makes no step; so while `unsettled` holds
it asks vLLM for steps, in which nothing is computed. An idle vLLM makes none: then a thread keeps the link, so that a
kvbm that was started again does not wait for this engine. It touches nothing of vLLM's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

from msgspec import Struct

from services.worker.contracts.messages import Exchanged, KvbmLink
from services.worker.kv_connector.connector import ExchangeTerms, KVConnector
from services.worker.kv_connector.contract import KvbmAsk
from services.worker.kv_connector.link_log import LinkLog
from services.worker.kv_connector.pool_attachment import OwnerName
from services.worker.kv_connector.socket_client import SocketClient
from services.worker.vllm.connector.blocks import VllmBlocks
from services.worker.vllm.connector.chain import TokenChain
from services.worker.vllm.connector.expected import HashedRequest
from services.worker.vllm.connector.orders import (
    RANK_REPORT,
    STEP_ORDERS,
    AttachPool,
    AwaitLoads,
    RankFacts,
    part_bytes,
)
from services.worker.vllm.connector.pool import PoolBlock, VllmPool
from services.worker.vllm.connector.rank_mover import RankMover
from services.worker.vllm.connector.readable import readable
from services.worker.vllm.connector.settings import ConnectorSettings
from shared.errors import ConfigError
from shared.messages.cards import KvLayout
from shared.messages.kvbm import Attached, StoreLayout
from shared.pool.format import Arena, PoolUnfit

ASK_AGAIN_S = 0.0005
"""Seconds between two looks at the socket for requests that ask again in one scheduling pass."""
ANSWER_S = 0.002
"""Most seconds of a step that computes nothing in which requests wait for the kvbm's answers: three times what it takes
for 512 blocks. Other new requests wait as long."""
KEEP_S = 0.5
"""Seconds without a step after which the link is looked after; and between two such looks."""

_log = logging.getLogger(__name__)


class Identity(Struct, frozen=True):
    """What names the blocks of one engine, but for how they lie in its memory."""

    model: str
    weights: str
    """Digest of the weights and of everything else that changes their KV."""
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    blocks: int
    """Number of blocks on the device."""
    ranks: int
    instance: str
    """Names this engine to the kvbm."""


class NamedSlots:
    """Slots that the ranks map; here they only have a place."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.bytes = memoryview(b"")

    def generation(self, slot: int) -> int:
        raise PoolUnfit(f"slot {slot} is not mapped here")


class RankAttachment:
    """An `Attachment` whose pool the ranks map: it holds the owner's lock, which they share."""

    def __init__(self, directory: Path, instance: str, mover: RankMover, offsets: list[int]) -> None:
        """`offsets` say where the part of each rank begins in a slot."""
        self._name = OwnerName(directory, instance, shared=True)
        self._owner = ""
        self._mover = mover
        self._offsets = offsets

    def hold(self) -> str:
        """Return the name whose lock this process holds. Raise PoolUnfit."""
        self._owner = self._name.hold()
        return self._owner

    def map(self, attached: Attached) -> NamedSlots:
        """Have the ranks map the slots. One that cannot says so with the first copy, which fails."""
        arena = Arena(attached.offset, attached.slot_bytes, attached.slots, attached.generations)
        self._mover.order(AttachPool(self._owner, attached.pool_bytes, arena, self._offsets))
        return NamedSlots(arena)

    def close(self) -> None:
        """Release the lock; `hold` takes another one. The ranks hold theirs as long as they may write."""
        self._name.release()


class SchedulerHalf:
    """One engine's. `clock` is CLOCK_MONOTONIC, which all processes of a machine share."""

    def __init__(
        self,
        settings: ConnectorSettings,
        identity: Identity,
        pool: VllmPool,
        clock: Callable[[], float],
        *,
        idle_steps: int,
    ) -> None:
        """`idle_steps` is how many steps in a row that compute nothing show that none is under way; 0 if nothing does,
        so that no step waits for the kvbm."""
        self._most_idle_steps = idle_steps
        self._settings = settings
        self.identity = identity
        self._clock = clock
        self.blocks = VllmBlocks(
            pool, identity.block_size, clock, wait_s=settings.wait_s, offers=settings.offload == "filled"
        )
        self._mover = RankMover(identity.ranks)
        self._client = SocketClient(Path(settings.pool))
        self._facts: dict[int, RankFacts] = {}
        self._attachment: RankAttachment | None = None
        self._connector: KVConnector | None = None
        """None until all ranks have said how their blocks lie."""
        self.link = KvbmLink(kvbm="")
        self._link_log = LinkLog()
        self._turn = threading.RLock()
        """Held by the scheduler's thread, and by the one that keeps the link."""
        self._stepped_s = clock()
        self._idle_steps = 0
        """Steps in a row that compute nothing."""
        self._patience_s = 0.0
        """Seconds left of this step's ANSWER_S."""
        self._closed = threading.Event()
        self._exchanged = Exchanged()
        self._told = (self._exchanged, self.link, 0)
        """What `new_stats` returned last."""

    @property
    def unsettled(self) -> bool:
        """Whether vLLM must go on stepping though it has no requests. It ends by itself: each question has its time."""
        if self._connector is None:
            return len(self._facts) < self.identity.ranks
        if self._client.settling:
            return True
        return self._connector.unsettled or (self._connector.attached and self.blocks.waiting)

    def step(self) -> None:
        """Do what is due, without waiting."""
        with self._turn:
            self._stepped_s = now_s = self._clock()
            if self._connector is not None:
                self._step(self._connector, now_s)
                self._link_log.look(now_s)

    def _step(self, connector: KVConnector, now_s: float, *, exchanges: bool = True) -> None:
        for news in self._client.poll(now_s):
            connector.handle(news, now_s)
        connector.poll_copies(now_s)
        while messages := connector.step(now_s, exchanges=exchanges):
            for message in messages:
                self._take_message(connector, message, now_s)

    def orders(self, *, computes: bool) -> bytes:
        """Return the orders of the step that is being scheduled, as `STEP_ORDERS`. Empty if there is none. `computes`
        says whether it computes anything."""
        with self._turn:
            self._idle_steps = 0 if computes else self._idle_steps + 1
            self._patience_s = ANSWER_S
            self.step()
            orders = [*self._mover.take_orders(), *self.blocks.take_ends()]
            if self._idle and self._connector is not None and not self._connector.idle:
                orders.append(AwaitLoads())
        return STEP_ORDERS.encode(orders) if orders else b""

    def take_reports(self, reports: Sequence[bytes]) -> None:
        """Take up what the ranks have reported after a step."""
        if not reports:
            return
        with self._turn:
            for packed in reports:
                report = RANK_REPORT.decode(packed)
                if report.facts is not None:
                    self._take_facts(report.rank, report.facts)
                self._mover.report(report.rank, report.ended)
            self.step()

    def find(self, request: str, tokens: int, computed: int) -> int | None:
        """Return what `VllmBlocks.find` does. Answers that have come during vLLM's step are taken up first, however
        long it took. A question goes out at once; its answer is awaited if vLLM computes nothing."""
        with self._turn:
            if look := self._clock() - self._stepped_s >= ASK_AGAIN_S:
                self.step()
            found = self.blocks.find(request, tokens, computed)
            if found is None and look:
                self.step()
                while found is None and self._idle and self._await_answer():
                    found = self.blocks.find(request, tokens, computed)
        return found

    def _await_answer(self) -> bool:
        """Wait until the kvbm has said something, and take it up. Return False once this step has no time left for
        that."""
        begun_s = self._clock()
        said = self._patience_s > 0 and readable(self._client, self._patience_s)
        if said:
            self.step()
        self._patience_s -= self._clock() - begun_s
        return said

    @property
    def _idle(self) -> bool:
        """Whether vLLM computes nothing."""
        return 0 < self._most_idle_steps <= self._idle_steps

    def expect(self, request: str, chain: TokenChain) -> None:
        """Do what `ExpectedPrompts.expect` does."""
        with self._turn:
            self.blocks.expected.expect(request, chain)

    def find_expected(self, request: HashedRequest, tokens: int, computed: int) -> bool:
        """Return whether the request stands for an expected prompt; ask for its blocks if it does."""
        with self._turn:
            expected = self.blocks.expected.is_expected(request.request_id)
            if expected:
                self.blocks.find_expected(request, tokens, computed)
        return expected

    def place(self, request: str, block_ids: Sequence[int], tokens: int) -> None:
        """Do what `VllmBlocks.place` does. Copies are ordered at once, for this step."""
        with self._turn:
            self.blocks.place(request, block_ids, tokens)
            if tokens:
                self.step()

    def track(self, request: str, chain: TokenChain) -> None:
        """Do what `VllmBlocks.track` does."""
        with self._turn:
            self.blocks.track(request, chain)

    def forget(self, request: str) -> None:
        """Do what `VllmBlocks.forget` does."""
        with self._turn:
            self.blocks.forget(request)

    def placed_in_memory(self, request: str) -> int:
        """Return what `VllmBlocks.placed_in_memory` does."""
        return self.blocks.placed_in_memory(request)

    def offer_computed(self, request: str, tokens: int, blocks: Callable[[], Sequence[PoolBlock]]) -> int:
        """Do what `VllmBlocks.offer_computed` does."""
        with self._turn:
            return self.blocks.offer_computed(request, tokens, blocks)

    def hand_over(self, request: str, name: str, tokens: int) -> None:
        """Do what `VllmBlocks.hand_over` does."""
        with self._turn:
            self.blocks.hand_over(request, name, tokens)

    def rename(self, identity: Identity) -> None:
        """Use another layout from now on: the blocks that were stored so far are not this engine's any longer."""
        with self._turn:
            self._rename(identity)

    def _rename(self, identity: Identity) -> None:
        self.identity = identity
        if self._connector is not None and self._attachment is not None:
            self.blocks.forget_offered()
            self._attachment.close()  # a name stays with its layout, so the next attach is under another one
            self._connector.use_layout(self._layout(), self._clock())

    def new_stats(self) -> tuple[Exchanged, KvbmLink, list[str]] | None:
        """Return what was exchanged since the start, the link, and the hand-overs whose blocks are stored since the
        last call. None if there is nothing new."""
        if self._connector is None:
            return None
        self._exchanged = self._connector.new_stats() or self._exchanged
        now, stored = (self._exchanged, self.link, self.blocks.expected.loaded), self.blocks.take_stored()
        if now == self._told and not stored:
            return None
        self._told = now
        return self._exchanged, self.link, stored

    def keep_link(self) -> None:
        """Start the thread that keeps the link while vLLM is idle. It ends with `close`."""
        threading.Thread(target=self._keep_link, name="kvbm link", daemon=True).start()

    def _keep_link(self) -> None:
        while not self._closed.wait(KEEP_S):
            try:
                self.keep_link_now()
            except Exception:  # noqa: BLE001 - the thread's edge; the scheduler goes on by itself
                _log.exception("the link to the kvbm is not kept while vLLM is idle")
                return

    def keep_link_now(self) -> None:
        """Notice that the kvbm has gone, come or answered, and attach, if vLLM has made no step for a while. Blocks are
        exchanged only while it steps, since `unsettled` says so, and no exchange begins here."""
        with self._turn:
            now_s = self._clock()
            if self._connector is None or self._closed.is_set() or now_s - self._stepped_s < KEEP_S:
                return
            if not self._connector.attached or not self._connector.exchanging:
                self._step(self._connector, now_s, exchanges=False)
            self._link_log.look(now_s)

    def close(self) -> None:
        """Leave the kvbm: it ends what is open when the last process of this engine has gone."""
        with self._turn:
            self._closed.set()
            if self._connector is not None:
                self._connector.close()
            self._client.close()

    # --- inside

    def _take_message(self, connector: KVConnector, message: KvbmAsk | KvbmLink, now_s: float) -> None:
        if isinstance(message, KvbmAsk):
            for news in self._client.send(message, now_s):
                connector.handle(news, now_s)
            return
        self._link_log.take(message, now_s)
        self.link = message

    def _take_facts(self, rank: int, facts: RankFacts) -> None:
        self._facts[rank] = facts
        if len(self._facts) < self.identity.ranks or self._connector is not None:
            return
        ranks = [self._facts[each] for each in range(self.identity.ranks)]
        parts = [part_bytes(facts.block_bytes, len(ranks)) for facts in ranks]
        offsets = list(accumulate(parts[:-1], initial=0))
        directory, instance = Path(self._settings.pool), self.identity.instance
        self._attachment = RankAttachment(directory, instance, self._mover, offsets)
        terms = ExchangeTerms(
            instance,
            self._layout(),
            self._settings.timeout_s,
            most_blocks=min(self._settings.blocks_in_flight, max(1, self.identity.blocks // 4)),
            checksums=self._settings.checksums and self.identity.ranks == 1,
            collect_s=self._settings.collect_s,
        )
        self._connector = KVConnector(self.blocks, self._mover, self._attachment, terms)

    def _layout(self) -> StoreLayout:
        return store_layout(self.identity, [self._facts[each] for each in range(self.identity.ranks)])


def store_layout(identity: Identity, ranks: Sequence[RankFacts]) -> StoreLayout:
    """Return the layout of the pool's slots: the parts of all ranks one after the other. Raise ConfigError if the
    ranks' memory does not fit together."""
    for facts in ranks:
        if facts.blocks < identity.blocks:
            raise ConfigError(f"a rank's tensors have {facts.blocks} blocks, the scheduler {identity.blocks}")
    kv = KvLayout(
        dtype=identity.dtype,
        layers=identity.layers,
        kv_heads=identity.kv_heads,
        head_dim=identity.head_dim,
        block_size=identity.block_size,
        form=" + ".join(facts.form for facts in ranks),
        form_bytes=sum(part_bytes(facts.block_bytes, len(ranks)) for facts in ranks),
    )
    return StoreLayout(model=identity.model, weights=identity.weights, kv=kv)
