"""The properties of each policy."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.selection.candidates import CandidateState, RoutingRequest, ScoredCandidate
from services.router.selection.load import IDLE, CandidateLoad
from services.router.selection.policy import BUILT_IN, Policy, load_policy
from shared.errors import ConfigError
from shared.messages.select import Overlap

BLOCK = 16


def facts(
    name: str, overlap: Overlap | None = None, load: CandidateLoad = IDLE, *, total_blocks: int = 10_000
) -> CandidateState:
    return CandidateState((name, 0), overlap or Overlap(), load, total_blocks)


def choose(
    policy: Policy, candidates: list[CandidateState], tokens: int = 320, *, session: str = "", seed: int = 0
) -> str:
    request = RoutingRequest(tokens, BLOCK, session)
    scored = [ScoredCandidate(each, policy.score(request, each)) for each in policy.filter(request, candidates)]
    return policy.pick(request, scored, Random(seed)).candidate.id[0]


CANDIDATES = st.lists(
    st.builds(
        CandidateState,
        st.tuples(st.text("abcdef", min_size=1, max_size=4), st.integers(0, 1)),
        st.builds(Overlap, st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)),
        st.builds(CandidateLoad, st.integers(0, 50), st.integers(0, 10**6), st.integers(0, 10**5)),
        st.integers(0, 10**5),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda each: each.id,
)


@given(st.sampled_from(sorted(BUILT_IN)), CANDIDATES, st.integers(0, 3), st.sampled_from(["", "s"]))
def test_every_policy_picks_a_candidate_and_the_same_one_for_the_same_draw(
    name: str, candidates: list[CandidateState], seed: int, session: str
) -> None:
    picked = {choose(BUILT_IN[name](), candidates, session=session, seed=seed) for _ in range(2)}
    assert len(picked) == 1
    assert picked <= {each.id[0] for each in candidates}


@pytest.mark.parametrize("name", ["kv", "least-loaded", "power-of-two", "random"])
def test_ties_are_spread_over_the_candidates(name: str) -> None:
    idle = [facts(letter) for letter in "abcd"]
    policy = BUILT_IN[name]()
    picks = Counter(choose(policy, idle, seed=seed) for seed in range(400))
    assert len(picks) == 4
    assert min(picks.values()) > 50


def test_a_session_stays_at_its_candidate_and_only_the_sessions_of_a_leaving_candidate_move() -> None:
    kv = BUILT_IN["kv"]()
    idle = [facts(letter) for letter in "abcd"]
    homes = {f"s{number}": choose(kv, idle, session=f"s{number}") for number in range(50)}
    assert len(set(homes.values())) == 4
    for session, home in homes.items():
        assert choose(kv, idle, session=session, seed=7) == home
        left = [each for each in idle if each.id[0] != "a"]
        assert home == "a" or choose(kv, left, session=session) == home


def test_a_session_keeps_its_candidate_unless_that_costs_more_than_one_more_neighbour() -> None:
    kv = BUILT_IN["kv"]()
    home = choose(kv, [facts("a"), facts("b")], session="s")
    away = "b" if home == "a" else "a"
    a_little = CandidateLoad(requests=0, queued_tokens=200)
    assert choose(kv, [facts(home, None, a_little), facts(away)], session="s") == home
    assert choose(kv, [facts(home, None, a_little), facts(away)]) == away
    a_lot = CandidateLoad(requests=3, queued_tokens=200)
    assert choose(kv, [facts(home, None, a_lot), facts(away)], session="s") == away


def test_round_robin_takes_turns_and_keeps_the_order_when_candidates_join_or_leave() -> None:
    policy = BUILT_IN["round-robin"]()
    assert [choose(policy, [facts("a"), facts("b"), facts("c")]) for _ in range(4)] == ["a", "b", "c", "a"]
    assert [choose(policy, [facts("a"), facts("c")]) for _ in range(3)] == ["c", "a", "c"]


def test_least_loaded_and_power_of_two_compare_tokens_queued_or_in_use() -> None:
    busy, calm = CandidateLoad(1, 1000, 0), CandidateLoad(3, 10, 2)
    for name in ("least-loaded", "power-of-two"):
        assert choose(BUILT_IN[name](), [facts("busy", Overlap(19), busy), facts("calm", None, calm)]) == "calm"


def test_a_policy_is_found_by_name_or_by_module_and_attribute() -> None:
    assert load_policy("kv") is BUILT_IN["kv"]
    assert load_policy("services.router.selection.policies.baselines:UniformPolicy") is BUILT_IN["random"]


@pytest.mark.parametrize(
    "name",
    [
        *(
            "",
            "best",
            "no.such.module:P",
            "services.router.selection.policy:nothing",
            "services.router.selection.candidates:ScoredCandidate",
            ":x",
        ),
        *("tests.router.broken_policy:ConstructorArgumentPolicy", "tests.router.module_that_fails:P"),
    ],
)
def test_an_invalid_policy_is_a_config_error(name: str) -> None:
    assert ScoredCandidate is not None
    with pytest.raises(ConfigError, match="policy"):
        load_policy(name)
