"""ThreadedLookups: looks for the embeddings of images while the engine's loop goes on, in a thread each.

    look_up ──▶ EmbeddingStore.fetch_or_encode ─┬─ there ──▶ take_found: the embeddings
                                                └─ encode ─▶ take_found: none … a step encodes … keep ──▶ stored

A thread that has the right to encode an image holds it until a step has done so, until it is given up, or for CLAIM_S:
its request may have ended. What is encoded later is stored as far as no other engine has.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

import numpy as np
from msgspec import Struct

from services.worker.contracts.runner import EmbeddingStore
from shared.errors import HeadraceError

THREADS = 8
"""Threads, each with a store of its own."""
MOST_JOBS = 64
"""The most jobs that wait for a thread. Embeddings beyond that are not stored."""
CLAIM_S = 5.0
"""Seconds for which a thread waits until an image is encoded."""
OWED_S = 1.0
"""Seconds after which a thread without a job stores what is owed."""

_log = logging.getLogger(__name__)


class _GivenUp(HeadraceError):
    """No step has encoded the image in time."""


class _Job(Struct, frozen=True):
    """An image to look up, or to store if there are embeddings."""

    key: bytes
    embeddings: bytes | None = None


class ThreadedLookups:
    """The `EmbeddingLookups` of one engine."""

    def __init__(self, make_store: Callable[[], EmbeddingStore]) -> None:
        """`make_store` makes the store of one thread."""
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._waiting: dict[bytes, SimpleQueue[bytes]] = {}
        """Image → where its thread waits for what is encoded."""
        self._lock = threading.Lock()
        """Held for changes of `_waiting` and `_found`."""
        self._found: list[tuple[bytes, bytes | None]] = []
        """Answers that were not taken yet: while there are some, and only then, `_wake` is readable."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        for number in range(THREADS):
            name = f"embeddings-{number}"
            threading.Thread(target=self._work, args=(make_store(),), name=name, daemon=True).start()

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

    def keep(self, key: bytes, embeddings: bytes) -> None:
        """Store what was encoded, if that can be done."""
        with self._lock:
            waiting = self._waiting.pop(key, None)
        if waiting is not None:
            waiting.put(embeddings)
        elif self._jobs.qsize() < MOST_JOBS:
            self._jobs.put(_Job(key, embeddings))

    def give_up(self, key: bytes) -> None:
        """No step will encode this image."""
        with self._lock:
            waiting = self._waiting.pop(key, None)
        if waiting is not None:
            waiting.put(b"")

    def close(self) -> None:
        """End the threads, each as soon as it has nothing to wait for."""
        for _ in range(THREADS):
            self._jobs.put(None)

    # --- in the threads

    def _work(self, store: EmbeddingStore) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=OWED_S if store.owes else None)
                if job is None:
                    return
                self._carry_out(job, store)
            except Empty:
                pass
            except _GivenUp:
                pass
            except Exception:  # noqa: BLE001 - a thread's edge: whatever fails here costs a computation alone
                _log.exception("embeddings of an image are not exchanged with the kvbm")
            store.store_owed()

    def _carry_out(self, job: _Job, store: EmbeddingStore) -> None:
        if job.embeddings is not None:
            encoded = job.embeddings
            store.fetch_or_encode(job.key, lambda: encoded)
            return
        told = False

        def encode() -> bytes:
            nonlocal told
            waiting: SimpleQueue[bytes] = SimpleQueue()
            with self._lock:
                before = self._waiting.get(job.key)
                self._waiting[job.key] = waiting
            if before is not None:  # without a kvbm several threads have the right
                before.put(b"")
            told = True
            self._tell(job.key, None)
            return self._encoded(job.key, waiting)

        found = None
        try:
            embeddings, fetched = store.fetch_or_encode(job.key, encode)
            found = embeddings if fetched else None
        finally:
            if not told:
                self._tell(job.key, found)

    def _encoded(self, key: bytes, waiting: SimpleQueue[bytes]) -> bytes:
        """Return what a step has encoded. Raise _GivenUp if none has in time."""
        try:
            embeddings = waiting.get(timeout=CLAIM_S)
        except Empty:
            with self._lock:
                given_up = self._waiting.get(key) is waiting
                if given_up:
                    del self._waiting[key]
            embeddings = b"" if given_up else waiting.get()  # it was taken out just now, to be filled
        if not embeddings:
            raise _GivenUp("it was not encoded")
        return embeddings

    def _tell(self, key: bytes, found: bytes | None) -> None:
        with self._lock:
            self._found.append((key, found))
            os.eventfd_write(self._wake, 1)


def is_finite(embeddings: bytes, dtype: str) -> bool:
    """Return whether all numbers are finite: others were damaged where they lay. *Pure.*"""
    if dtype == "bfloat16":
        return not bool(((np.frombuffer(embeddings, np.uint16) & 0x7F80) == 0x7F80).any())
    return bool(np.isfinite(np.frombuffer(embeddings, np.dtype(dtype))).all())
