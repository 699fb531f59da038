from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.router.config import IndexConfig
from services.router.index.chains import SlotCleanup
from services.router.index.index import Index
from services.router.index.inheritance import store_id_of
from services.router.selection.caches import FleetCaches
from shared.messages.cards import KvLayout, ModelCard
from shared.messages.kvbm import KvbmReport, PeerRates
from shared.messages.select import Overlap

LAYOUT = KvLayout("float32", 1, 1, 4, 4)
HASHES = list(range(1, 9))
INSTANCES, KVBMS = st.sampled_from("abc"), st.sampled_from(["", "k1", "k2"])


def card(instance: str, kvbm: str = "", ranks: int = 1) -> ModelCard:
    return ModelCard(
        "m", instance, "/m", "0", "0", 4096, 1000, 4, 1000, LAYOUT, kvbm=kvbm, kvbm_layout="l", ranks=ranks
    )


class Fleet:
    """Caches, with the cards that their owner keeps."""

    def __init__(self, *cards: ModelCard) -> None:
        self.index = Index(limit_bytes=1 << 20)
        self.cards: dict[str, ModelCard] = {}
        self.caches = FleetCaches(self.index, IndexConfig(), self.cards)
        self.cleanups: list[SlotCleanup] = []
        for each in cards:
            self.add(each)

    def add(self, new: ModelCard) -> None:
        before = self.cards.get(new.instance)
        self.cards[new.instance] = new
        if before is None:
            self.caches.add_instance(new)
        else:
            self.caches.link_store(new.instance, store_id_of(before), store_id_of(new))

    def remove(self, instance: str) -> None:
        self.cleanups += self.caches.remove_instance(self.cards[instance])
        del self.cards[instance]

    def finders(self) -> set[str]:
        """Return the instances that are credited for blocks."""
        return {instance for instance, _ in self.index.find(HASHES) if instance in self.cards}

    def hold(self, store: str, blocks: int) -> None:
        """Have a store hold the first blocks in memory."""
        self.index.add_blocks(self.caches.stores[store].slot, 1, HASHES[:blocks])


def report(kvbm: str, *others: str) -> KvbmReport:
    return KvbmReport(kvbm, [], PeerRates(1.0, 1, dict.fromkeys(others, 1e9)))


def test_the_blocks_of_a_store_count_for_each_rank_of_the_instances_attached_to_it() -> None:
    fleet = Fleet(card("a", "k1", ranks=2), card("b"))
    fleet.caches.add_store("k1/l")
    fleet.hold("k1/l", 3)
    assert fleet.index.find(HASHES) == {("a", 0): Overlap(host=3), ("a", 1): Overlap(host=3)}
    fleet.add(card("a", ranks=2))
    assert not fleet.finders(), "it is attached to none"


def test_other_stores_are_searched_only_while_a_followed_one_reads_another() -> None:
    fleet = Fleet(card("a", "k1"), card("b", "k2"))
    fleet.caches.apply_kvbm_report(report("k1", "k2"))
    assert fleet.caches.remote_search(HASHES, 1000) is None, "no store is followed"
    fleet.caches.add_store("k1/l")
    fleet.caches.add_store("k2/l")
    fleet.caches.apply_kvbm_report(report("k1", "k2"))
    fleet.hold("k2/l", 5)
    search = fleet.caches.remote_search(HASHES, 1000)
    assert search is not None
    assert search.rest("k1/l", 0).blocks == 5
    fleet.caches.remove_store("k1/l")
    assert fleet.caches.remote_search(HASHES, 1000) is None


class CachesMachine(RuleBasedStateMachine):
    """Instances come, go and change their store; stores are followed and left."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet()

    @rule(instance=INSTANCES, kvbm=KVBMS, ranks=st.integers(0, 2))
    def come(self, instance: str, kvbm: str, ranks: int) -> None:
        before = self.fleet.cards.get(instance)
        self.fleet.add(card(instance, kvbm, ranks if before is None else before.ranks))

    @rule(instance=INSTANCES)
    def go(self, instance: str) -> None:
        if instance in self.fleet.cards:
            self.fleet.remove(instance)

    @rule(kvbm=KVBMS, blocks=st.integers(0, 8))
    def follow(self, kvbm: str, blocks: int) -> None:
        name = f"{kvbm}/l"
        if name in self.fleet.caches.instances_of_store and name not in self.fleet.caches.stores:
            self.fleet.caches.add_store(name)
            self.fleet.caches.apply_kvbm_report(report(kvbm, "k1", "k2"))
            self.fleet.hold(name, blocks)

    @rule(kvbm=KVBMS)
    def leave(self, kvbm: str) -> None:
        if f"{kvbm}/l" in self.fleet.caches.stores:
            self.fleet.cleanups.append(self.fleet.caches.remove_store(f"{kvbm}/l"))

    @invariant()
    def valid(self) -> None:
        self.fleet.caches.validate()

    @invariant()
    def only_attached_instances_find_the_blocks_of_a_followed_store(self) -> None:
        attached = {
            each.instance for each in self.fleet.cards.values() if store_id_of(each) in self.fleet.caches.stores
        }
        assert self.fleet.finders() <= attached

    def teardown(self) -> None:
        for instance in list(self.fleet.cards):
            self.fleet.remove(instance)
        for name in list(self.fleet.caches.stores):
            self.fleet.caches.remove_store(name)
        assert not self.fleet.caches.instances_of_store
        assert not self.fleet.caches.links


TestCaches = CachesMachine.TestCase
TestCaches.settings = settings(max_examples=60, stateful_step_count=25)
