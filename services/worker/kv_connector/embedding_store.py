"""KvbmEmbeddings: the embeddings of images in the machine's kvbm, so that other engines and later ones find them.

    the loop    look_up             take_found            (a step encodes)   keep
    a thread       ▼                     ▲                                     ▼
    connect ─▶ Attach ─▶ Fetch ─┬─▶ there: copy, Release ──▶ leave
                                └─▶ not there: Store ─┬─▶ a slot: tell the loop ─▶ copy, Commit ─▶ leave
                                                      └─▶ none: Fetch ─┬─▶ it comes: copy ───────▶ leave
                                                                       └─▶ late: tell the loop ──▶ leave

A slot is the right to encode: of engines that need a new image at the same time, one encodes it and the others wait.

Embeddings have a layout of their own, in which a block is one image: all images of a model have as many embeddings. So
kvbm keeps, evicts, writes to disk and lends them as it does blocks of KV. Their layout needs an arena of its own.

An engine attaches for one image, with a lock of its own. It holds no lock in between, since a kvbm that starts again
grants nothing while former engines hold one. Where something fails, the image is encoded as without a kvbm, and kvbm is
left alone for RETRY_S.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue

from msgspec import Struct

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
"""Most seconds for each answer of kvbm, also from its disk: the image's requests wait as long."""
STEP_MOST_S = 8.0
"""Most seconds that an engine may wait for an image that another one encodes, and then encode it: frontends give up a
worker after 10 s without a step (`limits.frozen_s`), and perhaps nothing else runs there. Within that it waits twice as
long as its last image took, since both engines may share their cores."""
LEAST_AWAIT_S = 4.0
"""The least of that wait, as far as STEP_MOST_S leaves it. If the other engine ends, so does the wait."""
RETRY_S = 5.0
"""Seconds for which kvbm is not asked after it has failed."""
THREADS = 8
"""Threads that speak with kvbm, each about one image."""
MOST_JOBS = 64
"""The most jobs that wait for a thread. Embeddings beyond that are not stored."""
MOST_CLAIMS = 8
"""The most slots that are held for images which a step has still to encode. Beyond that the oldest is given back."""
CLAIM_S = 5.0
"""Seconds after which such a slot is given back: its request may have ended. What is encoded later asks again."""
_TOKENS = bytes(4)
"""The tokens of a block of embeddings: its layout has one, which says nothing."""

_log = logging.getLogger(__name__)


class _Away(HeadraceError):
    """The kvbm cannot be used now."""


class _Late(_Away):
    """The kvbm has not answered in time."""


class _Job(Struct, frozen=True):
    """An image to look up, or to store if there are embeddings."""

    key: bytes
    embeddings: bytes | None = None


class _Claim(Struct, frozen=True):
    """A slot for an image that is still to be encoded, in a session that is open until then."""

    session: _Session
    opened: ExitStack
    until_s: float


class KvbmEmbeddings:
    """An `EmbeddingStore` in the kvbm of a pool's directory."""

    def __init__(self, directory: Path, worker: str, layout: StoreLayout) -> None:
        """`layout` is that of embeddings: its `block_bytes` are the size of an image's."""
        self._directory = directory
        self._worker = worker
        self._layout = layout
        self._retry_s = 0.0
        self._await_s = LEAST_AWAIT_S
        """Seconds for which an image is waited for that another engine encodes."""
        self._trouble = ""
        """Why kvbm could not be used at the last try. Empty if it could."""
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._claims: dict[bytes, _Claim] = {}
        """The oldest first."""
        self._lock = threading.Lock()
        """Held for changes of `_claims` and `_found`."""
        self._found: list[tuple[bytes, bytes | None]] = []
        """Answers that were not taken yet: while there are some, and only then, `_wake` is readable."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._threads = [
            threading.Thread(target=self._work, name=f"embeddings-{number}", daemon=True) for number in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def fileno(self) -> int:
        """A descriptor that is readable while `take_found` has something to return."""
        return self._wake

    def look_up(self, key: bytes) -> None:
        """Begin to look for an image's embeddings; `take_found` has the answer, some time later."""
        self._jobs.put(_Job(key))

    def take_found(self) -> list[tuple[bytes, bytes | None]]:
        """Return the answers since the last call: an image's key and its embeddings, or None if there are none."""
        if not self._found:
            return []
        with self._lock:
            os.eventfd_read(self._wake)
            found, self._found = self._found, []
        return found

    def keep(self, key: bytes, embeddings: bytes, took_s: float) -> None:
        """Store what was encoded in `took_s` seconds, if that can be done."""
        assert len(embeddings) == self._layout.kv.block_bytes
        self._await_s = max(WAIT_S, min(max(LEAST_AWAIT_S, 2 * took_s), STEP_MOST_S - took_s))
        if self._jobs.qsize() < MOST_JOBS:
            self._jobs.put(_Job(key, embeddings))

    def close(self) -> None:
        """End the threads, as soon as each has an answer of kvbm."""
        for _ in self._threads:
            self._jobs.put(None)

    # --- in the threads

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=CLAIM_S if self._claims else None)
                if job is None:
                    break
                if job.embeddings is None:
                    self._answer(job.key)
                else:
                    self._store(job.key, job.embeddings)
            except Empty:
                pass
            except Exception:  # noqa: BLE001 - a thread's edge: without it, images would be waited for in vain
                _log.exception("embeddings of an image are not exchanged with the kvbm")
            self._close_claims(time.monotonic())
        self._close_claims(float("inf"))

    def _answer(self, key: bytes) -> None:
        """Look an image up, and say what was found."""
        found = None
        try:
            with ExitStack() as opened:
                session, found = self._fetch(opened, self._name(key))
                if session is not None and session.claimed:
                    claim = _Claim(session, opened.pop_all(), time.monotonic() + CLAIM_S)
                    with self._lock:
                        before, self._claims[key] = self._claims.pop(key, None), claim
                    if before is not None:
                        before.opened.close()
        finally:
            with self._lock:
                self._found.append((key, found))
                os.eventfd_write(self._wake, 1)

    def _store(self, key: bytes, embeddings: bytes) -> None:
        """Store embeddings in the slot that is held for them, or in another one, if there is one."""
        with self._lock:
            claim = self._claims.pop(key, None)
        if claim is None and time.monotonic() < self._retry_s:
            return
        with ExitStack() if claim is None else claim.opened as opened:
            try:
                if claim is not None:
                    claim.session.store(self._name(key), embeddings)
                    return
                session = _Session(opened, self._directory, self._worker, self._layout)
                if session.claim(self._name(key)):
                    session.store(self._name(key), embeddings)
            except (HeadraceError, OSError) as wrong:
                self._note(str(wrong))

    def _close_claims(self, now_s: float) -> None:
        """Give back the slots that are late, or too many."""
        with self._lock:
            extra = len(self._claims) - MOST_CLAIMS
            late = [key for at, (key, claim) in enumerate(self._claims.items()) if at < extra or claim.until_s <= now_s]
            closed = [self._claims.pop(key) for key in late]
        for claim in closed:
            claim.opened.close()

    def _name(self, key: bytes) -> bytes:
        return content_key(root_key(self._layout.model), key)

    def _fetch(self, opened: ExitStack, name: bytes) -> tuple[_Session | None, bytes | None]:
        """Attach until `opened` is closed. Return the session, and the embeddings if they are there or come."""
        if time.monotonic() < self._retry_s:
            return None, None
        try:
            session = _Session(opened, self._directory, self._worker, self._layout)
            found = session.fetch(name)
            if found is None and not session.claim(name):
                found = session.await_other(name, self._await_s)
        except (HeadraceError, OSError) as wrong:
            self._note(str(wrong))
            return None, None
        self._trouble = ""
        return session, found

    def _note(self, trouble: str) -> None:
        self._retry_s = time.monotonic() + RETRY_S
        if trouble != self._trouble:
            _log.warning("embeddings of images are not kept in the kvbm (kvbm.embeddings): %s", trouble)
        self._trouble = trouble


class _Session:
    """An engine process at its kvbm, for one image."""

    def __init__(self, opened: ExitStack, directory: Path, worker: str, layout: StoreLayout) -> None:
        """Attach, until `opened` is closed. Raise HeadraceError, OSError."""
        self._client = opened.enter_context(closing(SocketClient(directory)))
        attachment = opened.enter_context(closing(PoolAttachment(directory, worker)))
        self._numbers = count(1)
        self._heard: deque[KvbmNews] = deque()
        self._size_bytes = layout.kv.block_bytes
        self._granted: Granted | None = None
        """The slot for what this engine encodes. None if it has none."""
        self._write_until_s = 0.0
        if not isinstance(self._hear(WAIT_S), KvbmUp):
            raise _Away("it does not begin with its name")
        self._owner = attachment.hold()
        attached = ATTACH_REPLY.decode(self._ask("attach", ATTACH.encode(Attach(worker, self._owner, layout, WAIT_S))))
        if isinstance(attached, KvbmRefused):
            raise _Away(f"{attached.reason} ({attached.code})")
        self._slots = attachment.map(attached)
        if self._slots.arena.slot_bytes < self._size_bytes:
            raise PoolUnfit(f"slots of {self._slots.arena.slot_bytes} bytes for {self._size_bytes} of an image")

    @property
    def claimed(self) -> bool:
        """Whether there is a slot for this engine."""
        return self._granted is not None

    def fetch(self, name: bytes, *, await_s: float = 0.0) -> bytes | None:
        """Return what is stored under this name; if nothing is, what another engine stores within `await_s`, if it is
        not 0. None if there is nothing. Raise HeadraceError."""
        wait_s = await_s or WAIT_S
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
        """Store under this name, if this engine has a slot. Raise HeadraceError."""
        if self._granted is not None and time.monotonic() >= self._write_until_s:  # to encode took too long
            SETTLED.decode(self._ask("abort", ABORT.encode(Abort(self._owner, self._granted.ticket))))
            self._granted = None
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

    def _ask(self, operation: KvbmOperation, payload: bytes, wait_s: float = 0.0) -> bytes:
        """Return the first answer, within `wait_s`, or WAIT_S if that is 0. Raise _Away."""
        wait_s = wait_s or WAIT_S
        ask = KvbmAsk(next(self._numbers), operation, payload, wait_s + WAIT_S)
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
