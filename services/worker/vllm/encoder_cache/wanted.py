"""WantedImages: which images vLLM waits for, loads, or encodes for others. Pure.

    want ──▶ asked ─┬─ the kvbm has it ─────▶ found ── place ──▶ a load of this step ──────────────────────▶ forgotten
                    └─ it has not, or says ─▶ due ──── place ──▶ encoding, a save of this step ─ deliver ──▶ forgotten
                       nothing in time

vLLM asks before each step whether a request may go on (`want`). One that needs an image which is asked for may not,
while others compute. At most `most` images are asked for, held or encoded for others at once; others are encoded as
without a kvbm. What no living request needs is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Literal

from msgspec import Struct

from services.worker.vllm.kv_transfer import ImageCounts

MOST_IMAGES = 8
"""Most images at once that are asked for, held for a step, or encoded for others: more than a step of vLLM takes."""
ANSWER_S = 8.0
"""Most seconds that a request waits for an image: the kvbm's answers, and another engine that encodes it. Frontends
give up a worker after 10 s without a step (`limits.frozen_s`)."""
ENCODE_S = 60.0
"""Most seconds until an image that was placed has been encoded."""


class SeenImage(Struct, frozen=True):
    """An image of a request."""

    name: str
    """vLLM's name for it."""
    key: bytes
    """The key of its embeddings in the kvbm. Empty if they are not exchanged."""
    start: int
    """The index of its first token in the prompt."""
    end: int
    """The index after its last token."""


class ImageQuestion(Struct, frozen=True):
    """A question for the kvbm."""

    number: int
    key: bytes


class _Entry(Struct, eq=False):
    number: int
    since_s: float
    requests: set[str]
    state: Literal["asked", "found", "due", "encoding"] = "asked"
    embeddings: bytes = b""


class StepTransfers(Struct, frozen=True):
    """What the workers do with images in one step."""

    loads: list[tuple[str, bytes]]
    """Name and embeddings of each image that comes from the kvbm."""
    saves: list[str]
    """Names of the images whose embeddings are given back for the kvbm."""


class WantedImages:
    """The images of one engine."""

    def __init__(self, clock: Callable[[], float], most: int) -> None:
        self._clock = clock
        self._most = most
        self._numbers = count(1)
        self._entries: dict[str, _Entry] = {}
        """Name of an image → what becomes of it."""
        self._new: list[ImageQuestion] = []
        self._given_up: list[int] = []
        self._loads: list[tuple[str, bytes]] = []
        self._saves: list[str] = []
        self._placed: list[str] = []
        """Images for whose embeddings this step has made room."""
        self._requests: dict[str, Sequence[SeenImage]] = {}
        self._kept: set[str] = set()
        """Images whose embeddings vLLM has."""
        self._fresh: dict[str, set[str]] = {}
        """Request → images that were loaded or encoded for it, and whose first token is not computed."""
        self._hits = self._encoded = self._fetched = 0

    # --- for vLLM's scheduler

    def want(self, request: str, images: Sequence[SeenImage], computed: int) -> bool:
        """Return whether a request with `computed` computed tokens may go on. What is not known is asked for."""
        self._requests[request] = images
        may = True
        for image in images:
            if image.end <= computed or image.name in self._kept or not image.key:
                continue
            entry = self._entries.get(image.name)
            if entry is None:
                if len(self._entries) >= self._most:
                    continue
                entry = self._entries[image.name] = _Entry(next(self._numbers), self._clock(), set())
                self._new.append(ImageQuestion(entry.number, image.key))
            entry.requests.add(request)
            if entry.state == "asked" and self._clock() - entry.since_s >= ANSWER_S:
                entry.state = "due"
            may = may and entry.state != "asked"
        return may

    def has(self, name: str) -> bool:
        """Return whether an image's embeddings came from the kvbm, so that a step loads them."""
        entry = self._entries.get(name)
        return entry is not None and entry.state == "found"

    def place(self, request: str, name: str) -> None:
        """vLLM has made room for an image's embeddings, which this step loads if `has` holds, and encodes otherwise."""
        if name in self._kept:  # vLLM has forgotten all embeddings, as at a sleep
            self._kept.clear()
        self._kept.add(name)
        self._placed.append(name)
        self._fresh.setdefault(request, set()).add(name)
        entry = self._entries.get(name)
        if entry is None:
            self._encoded += 1
        elif entry.state == "found":
            self._fetched += 1
            self._loads.append((name, entry.embeddings))
            del self._entries[name]
        else:
            self._encoded += 1
            entry.state, entry.since_s = "encoding", self._clock()
            self._saves.append(name)

    def take_step(self, computed: Iterable[tuple[str, int, int]], evicted: Iterable[str]) -> StepTransfers:
        """Return what the step does with images. It computes each request (its name) from one token to before another
        one; before it, vLLM forgets the `evicted` images."""
        for request, first, end in computed:
            self._count_hits(request, first, end)
        self._kept.difference_update(evicted)
        self._kept.update(self._placed)
        self._placed.clear()
        now_s = self._clock()
        for name in [name for name, entry in self._entries.items() if entry.state == "encoding"]:
            if now_s - self._entries[name].since_s >= ENCODE_S:
                self._give_up(name)
        step = StepTransfers(self._loads, self._saves)
        self._loads, self._saves = [], []
        return step

    def forget(self, request: str) -> None:
        """The request has ended."""
        self._fresh.pop(request, None)
        for image in self._requests.pop(request, ()):
            entry = self._entries.get(image.name)
            if entry is not None:
                entry.requests.discard(request)
                if not entry.requests and entry.state != "encoding":
                    self._give_up(image.name)

    # --- for the exchange with the kvbm

    def take_asked(self) -> list[ImageQuestion]:
        """Return the questions since the last call."""
        new, self._new = self._new, []
        return new

    def take_given_up(self) -> list[int]:
        """Return the numbers of questions that nothing comes of, since the last call."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def answer(self, number: int, embeddings: bytes) -> None:
        """A question was answered. Without embeddings, the image is to be encoded."""
        for entry in self._entries.values():
            if entry.number == number and entry.state == "asked":
                entry.state, entry.embeddings = ("found", embeddings) if embeddings else ("due", b"")

    def deliver(self, name: str) -> int:
        """An image was encoded. Return the number of the question that waits for it. 0 if none does."""
        entry = self._entries.get(name)
        if entry is None or entry.state != "encoding":
            return 0
        del self._entries[name]
        return entry.number

    @property
    def counts(self) -> ImageCounts:
        """The counts since the start."""
        return ImageCounts(self._hits, self._encoded, self._fetched)

    # --- inside

    def _give_up(self, name: str) -> None:
        self._given_up.append(self._entries.pop(name).number)

    def _count_hits(self, request: str, first: int, end: int) -> None:
        for image in self._requests.get(request, ()):
            if first <= image.start < end:
                fresh = self._fresh.get(request, set())
                self._hits += image.name not in fresh
                fresh.discard(image.name)

    def validate(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        assert len(self._entries) <= self._most
        for entry in self._entries.values():
            assert (entry.state == "found") == bool(entry.embeddings)
            assert entry.state == "encoding" or entry.requests
            assert all(request in self._requests for request in entry.requests if entry.state != "encoding")
