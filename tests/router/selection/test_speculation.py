"""Expected blocks are found by any prompt with the same prefix until they expire."""

from __future__ import annotations

import tracemalloc
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.router.index.index import CandidateId, Index, Slot
from services.router.selection.speculation import MOST_ATTEMPTS, RUN_BYTES, Speculation
from shared.hashing import pack_hashes
from shared.messages.select import Overlap

A, B = ("a", 0), ("b", 0)


def expected(
    entries: Speculation, hashes: list[int], now_s: float = 0.0, **known: Overlap
) -> dict[CandidateId, Overlap]:
    """The overlaps of a prompt by instance, if the index finds `known`."""
    found: dict[CandidateId, Overlap] = {(name, 0): overlap for name, overlap in known.items()}
    entries.extend_overlaps(found, hashes, pack_hashes(hashes), now_s)
    return found


@pytest.fixture
def slots() -> list[Slot]:
    index = Index(limit_bytes=1 << 30)
    return [index.open_slot(A), index.open_slot(B)]


def test_expected_blocks_are_found_until_they_expire(slots: list[Slot]) -> None:
    entries = Speculation(ttl_s=5, limit_bytes=10_000)
    entries.add(slots[0], pack_hashes([1, 2]), 0.0)
    assert expected(entries, [1, 2], 4.9) == {A: Overlap(2)}
    assert expected(entries, [1, 2], 5.0) == {}
    entries.expire(5.0, runs=10)
    assert entries.bytes == 0
    entries.validate()


def test_the_blocks_of_a_prompt_that_waits_are_expected_until_it_is_computed(slots: list[Slot]) -> None:
    entries, waiting = Speculation(ttl_s=5, limit_bytes=10_000), {("waits", 1)}
    entries.add(slots[0], pack_hashes([1, 2]), 0.0, ("waits", 1))
    entries.add(slots[0], pack_hashes([8, 9]), 0.0, ("computed", 1))
    for tenths in range(300):
        entries.expire(tenths / 10, runs=10, waits=waiting.__contains__)
        entries.validate()
    assert expected(entries, [1, 2], 30.0) == {A: Overlap(2)}
    assert expected(entries, [8, 9], 30.0) == {}
    waiting.clear()
    entries.expire(35.0, runs=10, waits=waiting.__contains__)
    assert entries.bytes == 0


def test_the_same_prompt_again_keeps_its_blocks_expected_while_the_later_one_waits(slots: list[Slot]) -> None:
    entries = Speculation(ttl_s=5, limit_bytes=10_000)
    entries.add(slots[0], pack_hashes([1, 2]), 0.0, ("first", 1))
    entries.add(slots[0], pack_hashes([1, 2]), 1.0, ("second", 1))
    entries.expire(4.9, runs=10, waits={("second", 1)}.__contains__)
    assert expected(entries, [1, 2], 9.0) == {A: Overlap(2)}


@pytest.mark.parametrize("cancelled", ["first", "second"])
@pytest.mark.parametrize("longer", [False, True])
def test_of_attempts_with_the_same_prompt_any_that_waits_keeps_its_blocks_expected(
    cancelled: str, longer: bool, slots: list[Slot]
) -> None:
    entries = Speculation(ttl_s=5, limit_bytes=10_000)
    entries.add(slots[0], pack_hashes([1, 2]), 0.0, ("first", 1))
    entries.add(slots[0], pack_hashes([1, 2, 3] if longer else [1, 2]), 1.0, ("second", 1))
    entries.expire(5.9, runs=10, waits=lambda attempt: attempt[0] != cancelled)
    assert expected(entries, [1, 2], 9.0) == {A: Overlap(2)}
    entries.validate()


def test_few_attempts_are_remembered_of_a_prompt_that_many_ask_for(slots: list[Slot]) -> None:
    entries = Speculation(ttl_s=5, limit_bytes=10_000)
    for number in range(3 * MOST_ATTEMPTS):
        entries.add(slots[0], pack_hashes([1, 2]), 0.0, (str(number), 1))
    asked: list[tuple[str, int]] = []

    def waits(attempt: tuple[str, int]) -> bool:
        asked.append(attempt)
        return False

    entries.expire(5.0, runs=10, waits=waits)
    assert asked == [(str(number), 1) for number in range(2 * MOST_ATTEMPTS, 3 * MOST_ATTEMPTS)]
    assert entries.bytes == 0


def test_a_prompt_that_differs_from_the_run_finds_the_blocks_they_share(slots: list[Slot]) -> None:
    entries = Speculation(ttl_s=5, limit_bytes=10_000)
    entries.add(slots[0], pack_hashes([1, 2, 3, 4]), 0.0)
    assert expected(entries, [1, 2, 3, 9]) == {A: Overlap(3)}
    assert expected(entries, [1, 2]) == {A: Overlap(2)}
    assert expected(entries, [1, 2, 3, 4, 5]) == {A: Overlap(4)}
    assert expected(entries, [9, 2, 3]) == {}


def test_a_run_extends_the_overlap_of_its_own_candidate_only(slots: list[Slot]) -> None:
    entries = Speculation(ttl_s=5, limit_bytes=10_000)
    entries.add(slots[0], pack_hashes([3, 4]), 0.0)
    assert expected(entries, [1, 2, 3, 4], a=Overlap(1, 1), b=Overlap(2)) == {A: Overlap(3, 1), B: Overlap(2)}
    assert expected(entries, [1, 2, 3, 4], a=Overlap(1)) == {A: Overlap(1)}, "a block between them is gone"
    assert expected(entries, [1, 2, 3, 4], a=Overlap(3)) == {A: Overlap(4)}, "half of it has come"
    assert expected(entries, [1, 2, 3, 4], a=Overlap(4)) == {A: Overlap(4)}, "confirmed"
    assert expected(entries, [1, 2, 3, 4, 5], a=Overlap(5)) == {A: Overlap(5)}


def test_runs_extend_runs(slots: list[Slot]) -> None:
    entries = Speculation(ttl_s=5, limit_bytes=10_000)
    entries.add(slots[0], pack_hashes([1, 2]), 0.0)
    entries.add(slots[0], pack_hashes([3, 4]), 0.0)
    entries.add(slots[0], pack_hashes([9, 8]), 0.0)
    assert expected(entries, [1, 2, 3, 4, 5]) == {A: Overlap(4)}
    assert expected(entries, [1, 2, 9, 8]) == {A: Overlap(4)}


def test_the_same_blocks_may_be_expected_at_two_candidates(slots: list[Slot]) -> None:
    entries = Speculation(ttl_s=5, limit_bytes=10_000)
    entries.add(slots[0], pack_hashes([1, 2]), 0.0)
    entries.add(slots[1], pack_hashes([1, 2, 3]), 0.0)
    assert expected(entries, [1, 2, 3]) == {A: Overlap(2), B: Overlap(3)}
    entries.validate()


def test_the_longer_run_of_a_repeated_prompt_is_kept(slots: list[Slot]) -> None:
    entries = Speculation(ttl_s=5, limit_bytes=10_000)
    entries.add(slots[0], pack_hashes([1, 2, 3]), 0.0)
    entries.add(slots[0], pack_hashes([1]), 1.0)
    assert expected(entries, [1, 2, 3], 1.0) == {A: Overlap(3)}
    entries.add(slots[0], pack_hashes([1, 2, 3, 4]), 2.0)
    entries.validate()
    assert expected(entries, [1, 2, 3, 4], 6.9) == {A: Overlap(4)}
    entries.add(slots[0], pack_hashes([1]), 7.0)
    assert expected(entries, [1, 2, 3, 4], 7.0) == {A: Overlap(1)}, "an expired run is no reason to keep it"


def test_no_block_is_expected_in_a_retired_slot() -> None:
    index = Index(limit_bytes=1 << 30)
    slot = index.open_slot(A)
    entries = Speculation(ttl_s=5, limit_bytes=10_000)
    entries.add(slot, pack_hashes([1]), 0.0)
    index.retire_slot(slot)
    assert expected(entries, [1]) == {}


def test_at_the_limit_the_oldest_run_is_dropped_early_and_a_run_over_the_limit_is_not_kept(slots: list[Slot]) -> None:
    entries = Speculation(ttl_s=5, limit_bytes=2 * RUN_BYTES + 8 * 5)
    entries.add(slots[0], pack_hashes([1, 2, 3]), 0.0)
    entries.add(slots[0], pack_hashes([4, 5]), 1.0)
    entries.add(slots[0], pack_hashes(range(1000, 2000)), 2.0)
    assert expected(entries, [1]) == {A: Overlap(1)}
    entries.add(slots[0], pack_hashes([6]), 2.0)
    entries.validate()
    assert expected(entries, [1]) == {}
    assert expected(entries, [4]) == expected(entries, [6]) == {A: Overlap(1)}
    assert expected(entries, [1000]) == {}


def test_used_runs_are_renewed_and_the_beginning_of_a_chain_outlives_its_end(slots: list[Slot]) -> None:
    entries = Speculation(ttl_s=5, limit_bytes=3 * RUN_BYTES)
    entries.add(slots[0], pack_hashes([1, 2]), 0.0)
    entries.add(slots[0], pack_hashes([3, 4]), 0.0)
    found: dict[CandidateId, Overlap] = {}
    used = entries.extend_overlaps(found, [1, 2, 3, 4], pack_hashes([1, 2, 3, 4]), 4.0)
    entries.renew(used, 4.0)
    entries.validate()
    assert expected(entries, [1, 2, 3, 4], 8.9) == {A: Overlap(4)}
    entries.add(slots[0], pack_hashes([9]), 9.5)
    assert expected(entries, [1, 2, 3, 4], 8.9) == {A: Overlap(2)}


def test_runs_that_come_and_go_are_no_larger_than_their_estimate(slots: list[Slot]) -> None:
    draw = Random(1)
    entries = Speculation(ttl_s=1400, limit_bytes=1 << 30)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for second in range(4 * 1400):
        entries.add(slots[second % len(slots)], draw.randbytes(80), float(second))
        entries.expire(float(second), runs=10)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < entries.bytes


def test_expiring_stops_after_a_slice(slots: list[Slot]) -> None:
    entries = Speculation(ttl_s=5, limit_bytes=10_000)
    for number in range(4):
        entries.add(slots[0], pack_hashes([number]), 0.0)
    entries.expire(9.0, runs=3)
    assert entries.bytes == RUN_BYTES + 8
    entries.expire(9.0, runs=3)
    assert entries.bytes == 0


def test_with_a_time_to_live_of_zero_no_block_is_expected(slots: list[Slot]) -> None:
    entries = Speculation(ttl_s=0, limit_bytes=10_000)
    entries.add(slots[0], pack_hashes([1]), 0.0)
    assert entries.bytes == 0


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 40), st.integers(0, 40), st.integers(0, 1000))
def test_the_overlap_equals_a_block_by_block_comparison(
    run: int, prompt: int, shared: int, known: int, seed: int
) -> None:
    draw = Random(seed)
    chain = draw.sample(range(10_000), 80)
    routed, asked = chain[:run], [*chain[: min(shared, run)], *chain[40 : 40 + prompt]][:prompt]
    agreed = next((place for place, (one, two) in enumerate(zip(routed, asked, strict=False)) if one != two), None)
    agreed = min(len(routed), len(asked)) if agreed is None else agreed
    index = Index(limit_bytes=1 << 30)
    entries = Speculation(ttl_s=5, limit_bytes=10_000)
    entries.add(index.open_slot(A), pack_hashes(routed), 0.0)
    known = min(known, len(asked))
    found = expected(entries, asked, a=Overlap(known)) if known else expected(entries, asked)
    reached = max(known, agreed)
    assert found == ({A: Overlap(reached)} if reached else {})


class SpeculationMachine(RuleBasedStateMachine):
    """A few chains with common prefixes, sent to two slots, one of which is retired at times."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(limit_bytes=1 << 30)
        self.entries = Speculation(ttl_s=5, limit_bytes=6 * RUN_BYTES)
        self.slots = {A: self.index.open_slot(A), B: self.index.open_slot(B)}
        self.now_s = 0.0

    @rule(to=st.sampled_from([A, B]), fork=st.integers(1, 6), branch=st.integers(0, 2), length=st.integers(1, 9))
    def ask(self, to: CandidateId, fork: int, branch: int, length: int) -> None:
        prompt = [block if block < fork else 100 * branch + 1000 * fork + block for block in range(length)]
        found: dict[CandidateId, Overlap] = {}
        used = self.entries.extend_overlaps(found, prompt, pack_hashes(prompt), self.now_s)
        assert all(0 < overlap.blocks <= length for overlap in found.values())
        assert all(self.slots[candidate].state == "open" for candidate in found)
        self.entries.renew([run for run in used if run.slot is self.slots[to]], self.now_s)
        known = found.get(to, Overlap()).blocks
        self.entries.add(self.slots[to], pack_hashes(prompt)[8 * known :], self.now_s)
        assert expected(self.entries, prompt, self.now_s)[to].blocks == length, "what was just sent is expected"

    @rule(which=st.sampled_from([A, B]))
    def clear(self, which: CandidateId) -> None:
        self.index.retire_slot(self.slots[which])
        self.slots[which] = self.index.open_slot(which)

    @rule(later_s=st.floats(0, 4))
    def wait(self, later_s: float) -> None:
        self.now_s += later_s
        self.entries.expire(self.now_s, runs=2)

    @invariant()
    def valid(self) -> None:
        self.entries.validate()

    def teardown(self) -> None:
        self.entries.expire(self.now_s + 100, runs=100)
        assert self.entries.bytes == 0


TestSpeculation = SpeculationMachine.TestCase
TestSpeculation.settings = settings(max_examples=60, stateful_step_count=25)
