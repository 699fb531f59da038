"""EmbeddingExchange: asks the kvbm for images while vLLM computes, in a thread each.

    ask ──▶ KvbmEmbeddings.fetch_or_encode ─┬─ there ───────────────────────────────▶ an answer: the embeddings
                                            └─ encode ─▶ an answer: none … deliver ──▶ stored, as they come

A thread that has the right to encode an image holds it until vLLM has done so. Then it stores one image that its store
owes, if there is one. The threads share nothing but a queue.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

import numpy as np

from services.worker.contracts.runner import EmbeddingStore
from services.worker.vllm.encoder_cache.wanted import ANSWER_S, ENCODE_S, ImageQuestion
from shared.errors import HeadraceError

END_S = 1.0
"""Most seconds for which `close` waits for all threads: each waits for the kvbm, at most some half a second a time."""

_log = logging.getLogger(__name__)


class _GivenUp(HeadraceError):
    """Nothing waits for this image any longer."""


class _Question:
    def __init__(self, asked: ImageQuestion) -> None:
        self.asked = asked
        self.ended = threading.Event()
        """Set once the image was encoded, or given up."""
        self.embeddings = b""
        self.answered = False


class EmbeddingExchange:
    """The questions of one engine. One thread calls it."""

    def __init__(self, make_store: Callable[[], EmbeddingStore], dtype: str, most: int) -> None:
        """At most `most` questions are under way, each with a store of its own. `dtype` is that of embeddings."""
        self._make_store = make_store
        self._dtype = dtype
        self._most = most
        self._idle: list[EmbeddingStore] = []
        """Stores without a question, the one that was used last at the end: it knows best whether its kvbm fails."""
        self._questions: dict[int, _Question] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._answers: SimpleQueue[tuple[int, bytes]] = SimpleQueue()
        self._returned: SimpleQueue[tuple[int, EmbeddingStore]] = SimpleQueue()

    def ask(self, asked: ImageQuestion) -> None:
        """Begin a question. Its answer is to encode, if too many are under way."""
        self._tidy()
        if len(self._threads) >= self._most:
            self._answers.put((asked.number, b""))
            return
        store = self._idle.pop() if self._idle else self._make_store()
        question = self._questions[asked.number] = _Question(asked)
        thread = threading.Thread(target=self._run, args=(question, store), name="encoder cache", daemon=True)
        self._threads[asked.number] = thread
        thread.start()

    def answers(self) -> list[tuple[int, bytes]]:
        """Return the answers since the last call: the question's number, and the embeddings. Empty if the image is to
        be encoded."""
        return _drain(self._answers)

    def deliver(self, number: int, embeddings: bytes) -> None:
        """An image was encoded. Without embeddings, it was given up."""
        question = self._questions.pop(number, None)
        if question is not None:
            question.embeddings = embeddings
            question.ended.set()

    def close(self) -> None:
        """Give up all questions."""
        for number in list(self._questions):
            self.deliver(number, b"")
        for thread in self._threads.values():
            thread.join(END_S / len(self._threads))

    def _tidy(self) -> None:
        for number, store in _drain(self._returned):
            self._idle.append(store)
            self._questions.pop(number, None)
            self._threads.pop(number).join()

    # --- in a thread of its own

    def _run(self, question: _Question, store: EmbeddingStore) -> None:
        number = question.asked.number
        try:
            embeddings, fetched = store.fetch_or_encode(question.asked.key, lambda: self._encoded(question))
            if fetched:
                self._answer(question, embeddings if is_finite(embeddings, self._dtype) else b"")
            store.store_owed()
        except _GivenUp:
            pass
        except Exception as wrong:  # noqa: BLE001 - whatever fails here costs a computation, not the engine
            _log.warning("an image's embeddings are not exchanged: %s", wrong)
        finally:
            self._answer(question, b"")
            self._returned.put((number, store))

    def _encoded(self, question: _Question) -> bytes:
        """Have vLLM encode an image, and return its embeddings. Raise _GivenUp."""
        self._answer(question, b"")
        question.ended.wait(ANSWER_S + ENCODE_S)
        if not question.embeddings:
            raise _GivenUp("it was not encoded")
        return question.embeddings

    def _answer(self, question: _Question, embeddings: bytes) -> None:
        if not question.answered:
            question.answered = True
            self._answers.put((question.asked.number, embeddings))


def is_finite(embeddings: bytes, dtype: str) -> bool:
    """Return whether all numbers are finite: others were damaged where they lay. *Pure.*"""
    if dtype == "bfloat16":
        return not bool(((np.frombuffer(embeddings, np.uint16) & 0x7F80) == 0x7F80).any())
    return bool(np.isfinite(np.frombuffer(embeddings, np.dtype(dtype))).all())


def _drain(queue: SimpleQueue) -> list:  # type: ignore[type-arg]
    found = []
    try:
        while True:
            found.append(queue.get_nowait())
    except Empty:
        return found
