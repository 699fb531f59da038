"""services/worker/vllm/encoder_cache/wanted.py: whatever comes of images, each step's loads were found, each save is
delivered to the question that it answers, and nothing stays."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.worker.vllm.encoder_cache.wanted import (
    ANSWER_S,
    ENCODE_S,
    SeenImage,
    StepTransfers,
    WantedImages,
)
from services.worker.vllm.kv_transfer import ImageCounts

MOST = 2
A, B, C = (SeenImage(name, name.encode(), start, start + 4) for name, start in (("a", 2), ("b", 8), ("c", 14)))


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def made(most: int = MOST) -> tuple[WantedImages, Clock]:
    clock = Clock()
    return WantedImages(clock, most), clock


def step(wanted: WantedImages, *computed: tuple[str, int, int], evicted: tuple[str, ...] = ()) -> StepTransfers:
    done = wanted.take_step(computed, evicted)
    wanted.validate()
    return done


def test_a_request_waits_for_an_answer_and_what_the_kvbm_has_is_loaded() -> None:
    wanted, _ = made()
    assert not wanted.want("r", [A], 0)
    [asked] = wanted.take_asked()
    assert (asked.key, wanted.has("a")) == (b"a", False)
    wanted.answer(asked.number, b"embeddings")
    assert wanted.want("r", [A], 0)
    assert wanted.has("a")
    wanted.place("r", "a")
    assert step(wanted, ("r", 0, 16)) == StepTransfers([("a", b"embeddings")], [])
    assert wanted.counts == ImageCounts(hits=0, encoded=0, fetched=1)
    assert wanted.want("other", [A], 0), "vLLM has it"
    assert step(wanted, ("other", 0, 16)) == StepTransfers([], [])
    assert wanted.counts == ImageCounts(hits=1, encoded=0, fetched=1)
    assert (wanted.take_asked(), wanted.take_given_up()) == ([], [])


def test_what_the_kvbm_lacks_is_encoded_and_given_to_the_question() -> None:
    wanted, _ = made()
    wanted.want("r", [A], 0)
    [asked] = wanted.take_asked()
    wanted.answer(asked.number, b"")
    assert wanted.want("r", [A], 0)
    assert not wanted.has("a")
    wanted.place("r", "a")
    assert step(wanted, ("r", 0, 2)) == StepTransfers([], ["a"])
    wanted.forget("r")
    assert wanted.deliver("a") == asked.number, "also where its request has ended"
    assert wanted.deliver("a") == 0
    assert wanted.counts == ImageCounts(hits=0, encoded=1, fetched=0)
    assert wanted.take_given_up() == []


def test_an_answer_that_is_late_is_waited_for_no_longer_and_changes_nothing() -> None:
    wanted, clock = made()
    assert not wanted.want("r", [A], 0)
    [asked] = wanted.take_asked()
    clock.now_s = ANSWER_S
    assert wanted.want("r", [A], 0)
    wanted.answer(asked.number, b"late")
    assert not wanted.has("a")
    wanted.place("r", "a")
    assert step(wanted).saves == ["a"]
    clock.now_s += ENCODE_S
    step(wanted)
    assert wanted.take_given_up() == [asked.number]
    assert wanted.deliver("a") == 0


def test_more_images_than_may_be_asked_for_are_encoded_and_not_stored() -> None:
    wanted, _ = made()
    assert not wanted.want("r", [A, B, C], 0)
    for asked in wanted.take_asked():
        wanted.answer(asked.number, b"")
    assert wanted.want("r", [A, B, C], 0)
    for each in (A, B, C):
        wanted.place("r", each.name)
    assert step(wanted, ("r", 0, 20)).saves == ["a", "b"]
    assert wanted.counts.encoded == 3


def test_nothing_is_asked_for_images_that_are_computed_or_have_no_key() -> None:
    wanted, _ = made()
    foreign = SeenImage("uuid", b"", 0, 4)
    assert wanted.want("r", [foreign, A, B], 12)
    assert wanted.take_asked() == []


def test_what_no_request_needs_any_longer_is_given_up_and_asked_for_again() -> None:
    wanted, _ = made()
    assert not wanted.want("r", [A], 0)
    assert not wanted.want("other", [A, B], 0)
    first, second = wanted.take_asked()
    wanted.forget("other")
    assert wanted.take_given_up() == [second.number]
    wanted.forget("r")
    assert wanted.take_given_up() == [first.number]
    assert not wanted.want("r", [A], 0)
    assert wanted.take_asked()[0].number > second.number


def test_what_vllm_has_evicted_or_forgotten_is_asked_for_again() -> None:
    wanted, _ = made(most=3)
    wanted.want("r", [A, B], 0)
    for asked in wanted.take_asked():
        wanted.answer(asked.number, b"e")
    for name in ("a", "b"):
        wanted.place("r", name)
    step(wanted)
    step(wanted, evicted=("a",))
    assert not wanted.want("other", [A, B], 0)
    [asked] = wanted.take_asked()
    assert asked.key == b"a"
    wanted.place("other", "b")  # as after a sleep, at which vLLM says nothing
    step(wanted)
    assert wanted.want("third", [B], 0)


class WantedMachine(RuleBasedStateMachine):
    """vLLM and the kvbm as they may behave; vLLM keeps some images, and evicts them."""

    images = (A, B, C)

    def __init__(self) -> None:
        super().__init__()
        self.wanted, self.clock = made()
        self.living: dict[str, list[SeenImage]] = {}
        self.open: dict[int, bytes] = {}
        """Question → key, of those without an answer."""
        self.pending: set[int] = set()
        """Questions that wait for embeddings."""
        self.kept: set[str] = set()
        self.saves: list[str] = []
        self.requests = 0

    @rule(images=st.lists(st.sampled_from([A, B, C]), min_size=1, max_size=3, unique=True))
    def come(self, images: list[SeenImage]) -> None:
        self.requests += 1
        self.living[f"r{self.requests}"] = sorted(images, key=lambda each: each.start)

    @precondition(lambda self: self.living)
    @rule(evict=st.booleans(), room=st.integers(0, 3))
    def step(self, evict: bool, room: int) -> None:
        """One step of vLLM, which has room for `room` new images."""
        evicted = set(list(self.kept)[:1]) if evict else set()
        self.kept -= evicted
        computed, loads, placed = [], set(), []
        for request, images in self.living.items():
            if not self.wanted.want(request, images, 0):
                continue
            for image in images:
                if image.name not in self.kept and room:
                    room -= 1
                    if self.wanted.has(image.name):
                        loads.add(image.name)
                    self.wanted.place(request, image.name)
                    placed.append(image.name)
                    self.kept.add(image.name)
            if all(image.name in self.kept for image in images):
                computed.append((request, 0, 20))
        self.take_asked()
        done = self.wanted.take_step(computed, evicted - set(placed))
        assert {name for name, _ in done.loads} == loads
        assert all(embeddings == name.encode() for name, embeddings in done.loads), "those of another image"
        assert set(done.saves) <= set(placed) - loads
        self.saves += done.saves

    def take_asked(self) -> None:
        for asked in self.wanted.take_asked():
            self.open[asked.number] = asked.key
            self.pending.add(asked.number)
        self.pending.difference_update(self.wanted.take_given_up())

    @precondition(lambda self: self.open)
    @rule(pick=st.integers(0, 9), there=st.booleans())
    def answer(self, pick: int, there: bool) -> None:
        number = list(self.open)[pick % len(self.open)]
        key = self.open.pop(number)
        self.wanted.answer(number, key if there else b"")

    @precondition(lambda self: self.saves)
    @rule()
    def deliver(self) -> None:
        number = self.wanted.deliver(self.saves.pop(0))
        assert not number or number in self.pending
        self.pending.discard(number)

    @precondition(lambda self: self.living)
    @rule(pick=st.integers(0, 9))
    def end(self, pick: int) -> None:
        request = list(self.living)[pick % len(self.living)]
        del self.living[request]
        self.wanted.forget(request)
        self.take_asked()

    @rule(span_s=st.sampled_from([0.1, ANSWER_S, ENCODE_S]))
    def wait(self, span_s: float) -> None:
        self.clock.now_s += span_s

    @invariant()
    def is_valid(self) -> None:
        self.wanted.validate()

    def teardown(self) -> None:
        for request in list(self.living):
            self.wanted.forget(request)
        self.clock.now_s += 2 * ENCODE_S
        self.wanted.take_step([], [])
        assert self.wanted.want("last", [A, B], 20)
        self.wanted.forget("last")
        assert not self.wanted._entries, "nothing is left"
        assert not self.wanted._fresh


TestWantedMachine = WantedMachine.TestCase
