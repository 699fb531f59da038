"""One model's routing as a whole: any sequence of questions, loads and cards leaves it valid, and nothing behind."""

from __future__ import annotations

from random import Random

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.router.chains import Clearing
from services.router.config import IndexConfig, RouterConfig
from services.router.model_router import ROWS, ModelRouter
from services.router.policy import BUILT_IN
from shared.hashing import pack_hashes
from shared.messages import (
    Finished,
    KvLayout,
    LoadReport,
    ModelCard,
    Prefilled,
    Reserved,
    Select,
    Selected,
    SelectRefused,
)

CONFIG = RouterConfig(explained=5, index=IndexConfig(limit_bytes=20_000, speculation_limit_blocks=40))


def card(instance: str, *, ranks: int = 1) -> ModelCard:
    return ModelCard("m", instance, "/m", "0", "0", 4096, 1000, 4, 1000, KvLayout("float32", 1, 1, 4, 4), ranks=ranks)


def model(policy: str = "kv", config: RouterConfig = CONFIG) -> ModelRouter:
    return ModelRouter("m", "r1", config, BUILT_IN[policy](), Random(1))


def select(request: str, blocks: list[int]) -> Select:
    return Select(request, 1, "f", "m", pack_hashes(blocks), 4 * len(blocks) + 1, 10)


def report(instance: str, *requests: str) -> LoadReport:
    attempts = [(request, 1) for request in requests]
    return LoadReport(instance, 1, 1, 0, len(requests), 0, 1000, 0, 0, attempts=attempts)


def test_every_rank_of_an_instance_is_a_candidate() -> None:
    router = model("round-robin")
    router.card_up(card("a", ranks=2))
    router.card_up(card("b"))
    replies = [router.select(select(f"r{number}", [number + 1]), 0.0).reply for number in range(3)]
    assert [(reply.instance, reply.rank) for reply in replies if isinstance(reply, Selected)] == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
    ]


def test_an_answer_tells_at_most_its_rows_the_best_first() -> None:
    router = model()
    for number in range(ROWS + 4):
        router.card_up(card(f"w{number}"))
    router.select(select("first", [1, 2, 3]), 0.0)
    reply = router.select(select("second", [1, 2, 3]), 0.0).reply
    assert isinstance(reply, Selected)
    assert len(reply.candidates) == ROWS
    scores = [row.score for row in reply.candidates]
    assert scores == sorted(scores)


def test_only_the_last_decisions_are_kept() -> None:
    router = model()
    router.card_up(card("a"))
    for number in range(8):
        router.select(select(f"r{number}", [number + 1]), 0.0)
    assert [decision.selected.request for decision in router.explain("")] == ["r3", "r4", "r5", "r6", "r7"]
    assert router.explain("r0") == []
    assert len(router.explain("r7")) == 1


def test_the_same_question_again_reserves_once() -> None:
    router = model()
    router.card_up(card("a"))
    router.select(select("r", [1]), 0.0)
    router.select(select("r", [1]), 0.0)
    assert router.load.statistics().reservations == 1


class RouterMachine(RuleBasedStateMachine):
    """Workers come and go while few requests are asked for, told of and reported; the index is small enough to drop."""

    def __init__(self) -> None:
        super().__init__()
        self.router = model()
        self.now_s = 0.0
        self.clearings: list[Clearing] = []

    @rule(instance=st.sampled_from("abc"), ranks=st.integers(1, 2))
    def come(self, instance: str, ranks: int) -> None:
        self.clearings += self.router.card_up(card(instance, ranks=ranks))

    @rule(instance=st.sampled_from("abc"))
    def go(self, instance: str) -> None:
        self.clearings += self.router.card_down(instance)

    @rule(request=st.sampled_from("pqrstuv"), first=st.integers(1, 200), blocks=st.integers(0, 60))
    def ask(self, request: str, first: int, blocks: int) -> None:
        choice = self.router.select(select(request, list(range(first, first + blocks))), self.now_s)
        if self.router.cards:
            assert isinstance(choice.reply, Selected)
            assert choice.reply.instance in self.router.cards
            assert choice.reserved is not None
            assert choice.reserved.uncached_tokens >= 1
        else:
            assert isinstance(choice.reply, SelectRefused)

    @rule(request=st.sampled_from("pqrstuv"), instance=st.sampled_from("abc"), own=st.booleans())
    def hear_reserved(self, request: str, instance: str, own: bool) -> None:
        self.router.told(Reserved(request, 1, "g", instance, 0, 50, 5, "r1" if own else "r2"), self.now_s)

    @rule(request=st.sampled_from("pqrstuv"), cached=st.integers(-5, 500))
    def hear_prefilled(self, request: str, cached: int) -> None:
        prediction = self.router.told(Prefilled(request, 1, cached), self.now_s)
        assert prediction is None or 0 <= prediction.actual_tokens <= prediction.prompt_tokens

    @rule(request=st.sampled_from("pqrstuv"))
    def hear_finished(self, request: str) -> None:
        self.router.told(Finished(request, 1), self.now_s)

    @rule(instance=st.sampled_from("abc"), requests=st.sets(st.sampled_from("pqrstuv")))
    def hear_report(self, instance: str, requests: set[str]) -> None:
        self.router.reported(report(instance, *requests), self.now_s)

    @rule(later_s=st.floats(0, 8))
    def wait(self, later_s: float) -> None:
        self.now_s += later_s
        self.router.speculation.expire(self.now_s, blocks=20)

    @invariant()
    def valid(self) -> None:
        self.router.validate()

    def teardown(self) -> None:
        for instance in "abc":
            self.clearings += self.router.card_down(instance)
        for request in "pqrstuv":
            self.router.told(Finished(request, 1), self.now_s)
        for clearing in self.clearings:
            while clearing.step(10):
                pass
        while self.router.speculation.expire(self.now_s + 1000, blocks=20):
            pass
        assert self.router.index.bytes == 0
        assert self.router.load.statistics().reservations == 0


TestModelRouter = RouterMachine.TestCase
TestModelRouter.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_what_another_router_reserved_at_an_instance_that_is_gone_is_not_kept() -> None:
    router = model()
    router.card_up(card("a"))
    for request, instance in (("r", "a"), ("s", "gone")):
        router.told(Reserved(request, 1, "f", instance, 0, 8, 2, router="r2"), 0.0)
    assert [one.reserved.instance for one in router.load.living()] == ["a"]


def test_a_decision_is_plain_json() -> None:
    router = model()
    router.card_up(card("a"))
    router.select(select("r", [1]), 0.0)
    assert msgspec.json.decode(msgspec.json.encode(router.explain("r")))[0]["selected"]["instance"] == "a"
