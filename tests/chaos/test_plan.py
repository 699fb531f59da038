"""The script of a run: it follows from the seed alone, and spares what must be spared."""

from __future__ import annotations

from itertools import islice

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chaos.plan import (
    ALONE,
    CLUSTERED,
    CLUSTERS_DECK,
    DECK,
    MEMBERS,
    NATS_AWAY_S,
    PARTITIONS_S,
    ROLES,
    ROLES_DECK,
    Kind,
    Target,
    asks,
    faults,
    questions,
)

SEEDS = st.integers(0, 1 << 32)
DURATIONS_S = (0.5, 4.0, 90.0)


@settings(max_examples=20)
@given(SEEDS)
def test_a_seed_always_gives_the_same_faults_and_requests(seed: int) -> None:
    for endless in (
        lambda: faults(seed, 2, DURATIONS_S),
        lambda: asks(seed, per_s=4.0, questions=24, frontends=2),
    ):
        assert list(islice(endless(), 100)) == list(islice(endless(), 100))


@settings(max_examples=20)
@given(SEEDS, st.integers(1, 4), st.sampled_from([DECK, ROLES_DECK, CLUSTERS_DECK]))
def test_every_deck_has_each_fault_once_and_befalls_who_is_there(
    seed: int, instances: int, whole: tuple[tuple[Kind, Target], ...]
) -> None:
    decks = list(islice(faults(seed, instances, DURATIONS_S, whole), 3 * len(whole)))
    for begin in range(0, len(decks), len(whole)):
        deck = decks[begin : begin + len(whole)]
        assert sorted((fault.kind, fault.target) for fault in deck) == sorted(whole)
        assert all(0 <= fault.number < (MEMBERS if fault.target in CLUSTERED else instances) for fault in deck)
        assert all(fault.number == 0 for fault in deck if fault.target in ALONE)


@settings(max_examples=20)
@given(SEEDS)
def test_nats_is_never_away_for_longer_than_requests_wait(seed: int) -> None:
    for fault in islice(faults(seed, 2, DURATIONS_S), 3 * len(DECK)):
        assert fault.for_s in DURATIONS_S
        assert fault.target != "nats" or fault.for_s <= max(NATS_AWAY_S)


def test_only_etcd_is_frozen_for_longer_than_a_lease_but_not_always() -> None:
    some = list(islice(faults(1, 2, (0.5, 4.0), lease_s=10.0), 20 * len(DECK)))
    assert {fault.for_s for fault in some if (fault.kind, fault.target) == ("freeze", "etcd")} == {0.5, 14.0}
    assert {fault.for_s for fault in some if (fault.kind, fault.target) != ("freeze", "etcd")} == {0.5, 4.0}
    usual = islice(faults(1, 2, (0.5, 4.0)), len(some))
    assert [(fault.name.partition(" for ")[0], fault.pause_s) for fault in some] == [
        (fault.name.partition(" for ")[0], fault.pause_s) for fault in usual
    ]


def test_each_server_of_a_cluster_and_a_workers_machine_is_cut_off_for_as_long_as_partitions_last() -> None:
    some = list(islice(faults(1, 2, DURATIONS_S, CLUSTERS_DECK), 40 * len(CLUSTERS_DECK)))
    cut = {(fault.target, fault.number, fault.for_s) for fault in some if fault.kind == "partition"}
    assert cut == {
        (target, number, for_s)
        for target, members in (("nats server", MEMBERS), ("etcd member", MEMBERS), ("worker", 2))
        for number in range(members)
        for for_s in PARTITIONS_S
    }
    assert {fault.for_s for fault in some if fault.kind == "kill"} == set(DURATIONS_S)


def test_asks_come_at_the_rate_wanted_by_every_door_whole_and_streamed() -> None:
    some = list(islice(asks(1, per_s=5.0, questions=24, frontends=2), 2000))
    assert sum(ask.after_s for ask in some) == pytest.approx(400, rel=0.1)
    assert {(ask.frontend, ask.streamed) for ask in some} == {
        (frontend, streamed) for frontend in (-1, 0, 1) for streamed in (False, True)
    }
    assert {ask.question for ask in some} == set(range(24))


def test_with_roles_whatever_befalls_a_worker_or_its_engine_befalls_both_halves() -> None:
    for kind, target in DECK:
        halves = {"worker": ROLES, "engine": ("prefill engine", "decode engine")}.get(target, (target,))
        assert {(kind, half) for half in halves} <= set(ROLES_DECK)
    assert not {"worker", "engine"} & {target for _, target in ROLES_DECK}


def test_salts_change_nothing_but_what_is_cached() -> None:
    plain, salted = (
        list(islice(asks(1, per_s=5.0, questions=24, frontends=2, salted=each), 90)) for each in (False, True)
    )
    assert [msgspec.structs.replace(ask, salt="") for ask in salted] == plain
    assert len({ask.salt for ask in salted}) == 61


def test_questions_are_of_every_kind() -> None:
    some = questions(24)
    assert some == questions(24)
    assert {question.chat for question in some} == {False, True}
    assert {question.temperature > 0 for question in some} == {False, True}
    assert {question.ignore_eos for question in some} == {False, True}
    assert any(question.frequency_penalty for question in some if question.temperature)
    assert len({question.prompt for question in some}) == 24
    prefixes = [question.prompt[:60] for question in some]
    assert len(set(prefixes)) < len(prefixes), "some share what a worker has cached"


def test_a_fault_is_named_as_people_read_it() -> None:
    names = {fault.name for fault in islice(faults(1, 1, (2.0,)), len(DECK))}
    assert {"kill worker 0 for 2 s", "restart nats", "wipe etcd", "sever nats of frontend 0 for 2 s"} <= names
    assert {"freeze kvbm for 2 s", "kill engine 0 and kvbm for 2 s"} <= names
    names |= {fault.name for fault in islice(faults(1, 1, (2.0,), CLUSTERS_DECK, partitions_s=(30.0,)), 9)}
    assert "partition worker 0 for 30 s" in names
    assert {"damage disk of kvbm for 2 s", "damage keys of frontend 0 for 2 s", "damage memory of kvbm"} <= names
