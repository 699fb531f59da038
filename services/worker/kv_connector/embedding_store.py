"""KvbmEmbeddings: the embeddings of images in the machine's kvbm, so that other engines and later ones find them.

    connect ─▶ Attach ─▶ Fetch ─┬─▶ there: copy, Release ───────────────────────────────────▶ leave
                                └─▶ not there: Store ─┬─▶ a slot: encode, copy, Commit ─────▶ leave
                                                      └─▶ none: Fetch ─┬─▶ it comes: copy ──▶ leave
                                                                       └─▶ late: encode, Store ─▶ …

A slot is the right to encode: of engines that need a new image at the same time, one encodes it and the others wait.

Embeddings have a layout of their own, in which a block is one image: all have as many embeddings, or are filled up to
the largest one's. So kvbm keeps, evicts, writes to disk and lends them as it does blocks of KV. Their layout needs an
arena of its own.

An engine attaches for one image, with a lock of its own, and waits for the answers: they take some ms, and encoding
takes seconds on a CPU. It holds no lock in between, since a kvbm that starts again grants nothing while former engines
hold one. Where something fails, the image is encoded as without a kvbm, and kvbm is left alone for a while. What it has
encoded until then is owed: a later step stores it, so that it outlives this engine too.

    encoded without a slot ─▶ owed ── a later step ─▶ Attach, Store ─▶ copy, Commit, or another one stores it
                                └── more than OWED_LIMIT are owed ─▶ the oldest is not stored
"""

from __future__ import annotations

import logging
import select
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from itertools import count
from pathlib import Path

from services.worker.contracts.messages import KvbmOperation
from services.worker.kv_connector.actions import unpack_slots
from services.worker.kv_connector.contract import KvbmAsk, KvbmDown, KvbmNews, KvbmReply, KvbmUp
from services.worker.kv_connector.pool_attachment import PoolAttachment
from services.worker.kv_connector.socket_client import SocketClient
from shared.errors import HeadraceError
from shared.hashing import content_key, root_key
from shared.messages.kvbm import (
    ABORT,
    ATTACH,
    ATTACH_REPLY,
    COMMIT,
    FETCH,
    FETCH_REPLY,
    RELEASE,
    SETTLED,
    STORE,
    STORE_REPLY,
    Abort,
    Attach,
    Commit,
    Fetch,
    Fetched,
    Granted,
    KvbmRefused,
    Release,
    Store,
    StoreBlock,
    StoreLayout,
)
from shared.pool.format import PoolUnfit

WAIT_S = 0.5
"""Most seconds for each answer of kvbm, also from its disk: the engine's streams wait as long."""
STEP_MOST_S = 8.0
"""Most seconds that an engine may wait for an image that another one encodes, and then encode it: frontends give up a
worker after 10 s without a step (`limits.frozen_s`). Within that it waits twice as long as its last image took, since
both engines may share their cores."""
LEAST_AWAIT_S = 4.0
"""The least of that wait, as far as STEP_MOST_S leaves it. If the other engine ends, so does the wait."""
RETRY_S = 5.0
"""Seconds for which kvbm is not asked after it has not answered."""
REFUSED_S = 0.5
"""Seconds for which kvbm is not asked after it has refused, or was not there: that is known at once."""
OWED_LIMIT = 16
"""The most images whose embeddings are kept until kvbm can be asked again."""
_TOKENS = bytes(4)
"""The tokens of a block of embeddings: its layout has one, which says nothing."""

_log = logging.getLogger(__name__)


class _Away(HeadraceError):
    """The kvbm cannot be used now."""


class _Late(_Away):
    """The kvbm has not answered in time."""


class KvbmEmbeddings:
    """An `EmbeddingStore` in the kvbm of a pool's directory. Belongs to one thread."""

    def __init__(
        self,
        directory: Path,
        worker: str,
        layout: StoreLayout,
        wait_s: float | None = None,
        *,
        owed_limit: int | None = None,
    ) -> None:
        """`layout` is that of embeddings: its `block_bytes` are the size of an image's. Each answer is waited for
        `wait_s` seconds. None means WAIT_S. At most `owed_limit` images are kept until kvbm can be
        asked again. None means OWED_LIMIT."""
        self._directory = directory
        self._worker = worker
        self._layout = layout
        self._wait_s = WAIT_S if wait_s is None else wait_s
        self._owed_limit = OWED_LIMIT if owed_limit is None else owed_limit
        self._retry_s = 0.0
        self._await_s = LEAST_AWAIT_S
        """Seconds for which an image is waited for that another engine encodes."""
        self._trouble = ""
        """Why kvbm could not be used at the last try. Empty if it could."""
        self._owed: OrderedDict[bytes, bytes] = OrderedDict()
        """The embeddings that were encoded while kvbm could not be used, by their names in kvbm. Oldest first."""

    def fetch_or_encode(self, key: bytes, encode: Callable[[], bytes]) -> tuple[bytes, bool]:
        """Return an image's embeddings, and whether they came from kvbm."""
        name = content_key(root_key(self._layout.model), key)
        self._owed.pop(name, None)
        with ExitStack() as opened:
            session, found = self._fetch(opened, name)
            if found is not None:
                return found, True
            began_s = time.monotonic()
            try:
                embeddings = encode()
            except Exception:
                if session is not None:
                    with suppress(HeadraceError, OSError):
                        session.abort()  # others wait for it
                raise
            took_s = time.monotonic() - began_s
            self._await_s = max(self._wait_s, min(max(LEAST_AWAIT_S, 2 * took_s), STEP_MOST_S - took_s))
            assert len(embeddings) == self._layout.kv.block_bytes
            if session is None:
                self._owe(name, embeddings)
            else:
                self._store(session, name, embeddings)
            return embeddings, False

    @property
    def owes(self) -> bool:
        """Whether `store_owed` has something to store."""
        return bool(self._owed)

    def store_owed(self) -> None:
        """Store the embeddings of one image that kvbm could not take when they were encoded, if it can take them now.
        Otherwise they are lost to other engines once this one has ended."""
        if not self._owed or time.monotonic() < self._retry_s:
            return
        name, embeddings = self._owed.popitem(last=False)
        with ExitStack() as opened:
            try:
                session = _Session(opened, self._directory, self._worker, self._layout, self._wait_s)
                if not session.claim(name):
                    return  # another engine stores them, or there is no room for them
            except (HeadraceError, OSError) as wrong:
                self._note(wrong)
                self._owe(name, embeddings)
                return
            self._trouble = ""
            self._store(session, name, embeddings)

    def _store(self, session: _Session, name: bytes, embeddings: bytes) -> None:
        try:
            session.store(name, embeddings)
        except (HeadraceError, OSError) as wrong:
            self._note(wrong)
            self._owe(name, embeddings)

    def _owe(self, name: bytes, embeddings: bytes) -> None:
        self._owed[name] = embeddings
        while len(self._owed) > self._owed_limit:
            self._owed.popitem(last=False)

    def _fetch(self, opened: ExitStack, name: bytes) -> tuple[_Session | None, bytes | None]:
        """Attach until `opened` is closed. Return the session, and the embeddings if they are there or come."""
        if time.monotonic() < self._retry_s:
            return None, None
        try:
            session = _Session(opened, self._directory, self._worker, self._layout, self._wait_s)
            found = session.fetch(name)
            if found is None and not session.claim(name):
                found = session.await_other(name, self._await_s)
        except (HeadraceError, OSError) as wrong:
            self._note(wrong)
            return None, None
        self._trouble = ""
        return session, found

    def _note(self, wrong: Exception) -> None:
        trouble = str(wrong)
        self._retry_s = time.monotonic() + (RETRY_S if isinstance(wrong, _Late) else REFUSED_S)
        if trouble != self._trouble:
            _log.warning("embeddings of images are not kept in the kvbm (kvbm.embeddings): %s", trouble)
        self._trouble = trouble


class _Session:
    """An engine process at its kvbm, for one image."""

    def __init__(self, opened: ExitStack, directory: Path, worker: str, layout: StoreLayout, wait_s: float) -> None:
        """Attach, until `opened` is closed. Raise HeadraceError, OSError."""
        self._wait_s = wait_s
        self._client = opened.enter_context(closing(SocketClient(directory)))
        attachment = opened.enter_context(closing(PoolAttachment(directory, worker)))
        self._numbers = count(1)
        self._heard: deque[KvbmNews] = deque()
        self._size_bytes = layout.kv.block_bytes
        self._granted: Granted | None = None
        """The slot for what this engine encodes. None if it has none."""
        self._write_until_s = 0.0
        if not isinstance(self._hear(wait_s), KvbmUp):
            raise _Away("it does not begin with its name")
        self._owner = attachment.hold()
        attached = ATTACH_REPLY.decode(self._ask("attach", ATTACH.encode(Attach(worker, self._owner, layout, wait_s))))
        if isinstance(attached, KvbmRefused):
            raise _Away(f"{attached.reason} ({attached.code})")
        self._slots = attachment.map(attached)
        if self._slots.arena.slot_bytes < self._size_bytes:
            raise PoolUnfit(f"slots of {self._slots.arena.slot_bytes} bytes for {self._size_bytes} of an image")

    def fetch(self, name: bytes, *, await_s: float = 0.0) -> bytes | None:
        """Return what is stored under this name; if nothing is, what another engine stores within `await_s`, if it is
        not 0. None if there is nothing. Raise HeadraceError."""
        wait_s = await_s or self._wait_s
        until_s = time.monotonic() + wait_s
        ask = FETCH.encode(Fetch(self._owner, name, awaits=await_s > 0))
        fetched = FETCH_REPLY.decode(self._ask("fetch", ask, wait_s))
        while isinstance(fetched, Fetched) and fetched.found and not fetched.slots:  # it comes, from disk or an engine
            fetched = FETCH_REPLY.decode(self._answer(until_s - time.monotonic()))
        if isinstance(fetched, KvbmRefused):
            raise _Away(f"{fetched.reason} ({fetched.code})")
        if not fetched.ticket:
            return None
        found: bytes | None = None
        for slot in unpack_slots(fetched.slots, self._slots.arena.slots):
            with self._slots.slot(slot) as memory:
                found = bytes(memory[: self._size_bytes])
            if self._slots.generations(fetched.slots) != fetched.generations:
                found = None  # it became another block's meanwhile
        SETTLED.decode(self._ask("release", RELEASE.encode(Release(self._owner, fetched.ticket))))
        return found

    def await_other(self, name: bytes, wait_s: float) -> bytes | None:
        """Return what another engine stores under this name in time. None if none does. Raise HeadraceError."""
        try:
            return self.fetch(name, await_s=wait_s)
        except _Late:
            return None

    def claim(self, name: bytes) -> bool:
        """Ask for a slot under this name. Return whether there is one for this engine. Raise HeadraceError."""
        block = StoreBlock(name, None, _TOKENS)
        granted = STORE_REPLY.decode(self._ask("store", STORE.encode(Store(self._owner, [block]))))
        if isinstance(granted, KvbmRefused) or not granted.ticket:
            return False  # another engine stores it, or every slot is in use
        self._granted, self._write_until_s = granted, time.monotonic() + granted.time_left_s
        return True

    def store(self, name: bytes, embeddings: bytes) -> None:
        """Store under this name, if this engine has a slot or gets one now. Raise HeadraceError."""
        if time.monotonic() >= self._write_until_s:  # to encode took too long, or another engine had the slot before
            self.abort()
            self.claim(name)
        granted = self._granted
        if granted is None:
            return
        for slot in unpack_slots(granted.slots, self._slots.arena.slots):
            with self._slots.slot(slot) as memory:
                memory[: self._size_bytes] = embeddings
        commit = Commit(self._owner, granted.ticket, granted.slots)
        settled = SETTLED.decode(self._ask("commit", COMMIT.encode(commit)))
        if isinstance(settled, KvbmRefused):
            raise _Away(f"{settled.reason} ({settled.code})")

    def abort(self) -> None:
        """Give the slot back, if this engine has one. Raise HeadraceError."""
        if self._granted is not None:
            SETTLED.decode(self._ask("abort", ABORT.encode(Abort(self._owner, self._granted.ticket))))
            self._granted = None

    def _ask(self, operation: KvbmOperation, payload: bytes, wait_s: float = 0.0) -> bytes:
        """Return the first answer, within `wait_s`, or as long as any other if that is 0. Raise _Away."""
        wait_s = wait_s or self._wait_s
        ask = KvbmAsk(next(self._numbers), operation, payload, wait_s + self._wait_s)
        self._heard.extend(self._client.send(ask, time.monotonic()))
        return self._answer(wait_s)

    def _answer(self, wait_s: float) -> bytes:
        """Return the next answer to the one request that is under way. Raise _Away."""
        reply = self._hear(wait_s)
        if not isinstance(reply, KvbmReply) or reply.failed:
            raise _Away(reply.failed if isinstance(reply, KvbmReply) else "another kvbm has come")
        return reply.payload

    def _hear(self, wait_s: float) -> KvbmUp | KvbmReply:
        """Wait for what the kvbm says next. Raise _Away."""
        until_s = time.monotonic() + wait_s
        while not self._heard:
            self._heard.extend(self._client.poll(time.monotonic()))
            left_s = until_s - time.monotonic()
            if not self._heard and left_s <= 0:
                raise _Late(f"no answer in {wait_s:g} s")
            if not self._heard:
                select.select([self._client], [], [], left_s)
        news = self._heard.popleft()
        if isinstance(news, KvbmDown):
            raise _Away(news.reason)
        return news
