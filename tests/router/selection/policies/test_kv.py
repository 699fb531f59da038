"""The properties of the default policy; `benchmarks/trace.py` measures their effect."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.config import LoadConfig
from services.router.selection.candidates import (
    DISK_BYTES_PER_S,
    HOST_BYTES_PER_S,
    UNKNOWN_SPEED,
    CandidateState,
    FleetAverage,
    RoutingRequest,
    ScoredCandidate,
    WorkerSpeed,
)
from services.router.selection.load import IDLE, CandidateLoad, LoadTracker
from services.router.selection.policies.kv import DECODE_WEIGHT, PROMPT_WEIGHT, STORING_S, KvPolicy, split_costs
from services.worker.scheduler.throughput import Throughput
from shared.messages.load import LoadReport
from shared.messages.select import Overlap

BLOCK = 16
HOST_S, DISK_S = (BLOCK * 128 * 1024 / rate for rate in (HOST_BYTES_PER_S, DISK_BYTES_PER_S))
LOADS = st.builds(CandidateLoad, st.integers(0, 50), st.integers(0, 10**6), st.integers(0, 10**5))
OVERLAPS = st.builds(Overlap, st.integers(0, 5), st.integers(0, 5), st.integers(0, 5))
CANDIDATES = st.lists(
    st.builds(
        CandidateState,
        st.tuples(st.text("abcdef", min_size=1, max_size=4), st.integers(0, 1)),
        OVERLAPS,
        LOADS,
        st.integers(0, 10**5),
        st.builds(WorkerSpeed, st.sampled_from([0.0, 1.0, 300.0, 1e5]), st.sampled_from([0.0, 0.02]), st.booleans()),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda each: each.id,
)


def facts(
    name: str,
    overlap: Overlap | None = None,
    load: CandidateLoad = IDLE,
    *,
    total_blocks: int = 10_000,
    speed: float | None = None,
    places: int = 0,
) -> CandidateState:
    told = UNKNOWN_SPEED if speed is None else WorkerSpeed(speed, 0.02)
    return CandidateState((name, 0), overlap or Overlap(), load, total_blocks, told, places=places)


def choose(candidates: list[CandidateState], tokens: int = 320) -> str:
    policy, request = (
        KvPolicy(),
        RoutingRequest(tokens, BLOCK, fleet=FleetAverage.of(candidates), host_s=HOST_S, disk_s=DISK_S),
    )
    scored = [ScoredCandidate(each, policy.score(request, each)) for each in policy.filter(request, candidates)]
    return policy.pick(request, scored, Random(0)).candidate.id[0]


@given(CANDIDATES)
def test_it_never_picks_a_candidate_that_is_worse_in_everything(candidates: list[CandidateState]) -> None:
    best = CandidateState(("best", 0), Overlap(16), IDLE, 10**6, WorkerSpeed(1e6, 0.01))
    assert choose([*candidates, best]) == "best"


@given(CANDIDATES)
def test_its_reason_adds_up_to_its_score(candidates: list[CandidateState]) -> None:
    policy, request = (
        KvPolicy(),
        RoutingRequest(320, BLOCK, fleet=FleetAverage.of(candidates), host_s=HOST_S, disk_s=DISK_S),
    )
    for each in candidates:
        terms = [float(word) for word in policy.reason(request, each).split() if word[0].isdigit()]
        assert sum(terms) == pytest.approx(policy.score(request, each), abs=2.0)


def test_it_follows_the_cache() -> None:
    assert choose([facts("a"), facts("b", Overlap(19)), facts("c", Overlap(3))]) == "b"


@pytest.mark.parametrize("common_blocks", [2, 7])
def test_a_second_conversation_goes_to_the_idle_worker_though_the_busy_one_has_the_common_prefix(
    common_blocks: int,
) -> None:
    busy = CandidateLoad(requests=1, queued_tokens=0, active_blocks=20)
    assert choose([facts("busy", Overlap(common_blocks), busy), facts("idle")], tokens=300) == "idle"


def test_a_long_common_prefix_is_kept_together_until_the_worker_is_crowded() -> None:
    calm, crowded = CandidateLoad(requests=3, active_blocks=100), CandidateLoad(requests=40, active_blocks=100)
    idle = facts("idle", speed=20_000.0)
    assert choose([facts("home", Overlap(512), calm, speed=20_000.0), idle], tokens=8500) == "home"
    assert choose([facts("home", Overlap(512), crowded, speed=20_000.0), idle], tokens=8500) == "idle"


@pytest.mark.parametrize(("places", "where"), [(0, "home"), (64, "home"), (50, "idle"), (40, "idle")])
def test_a_common_prefix_comes_to_one_more_worker_where_requests_would_wait_for_a_place(
    places: int, where: str
) -> None:
    busy = CandidateLoad(requests=68, active_blocks=100)
    home = facts("home", Overlap(400), busy, speed=20_000.0, places=places)
    other = facts("idle", None, CandidateLoad(requests=40), speed=20_000.0, places=places)
    assert choose([home, other], tokens=6_900) == where


def test_where_many_wait_at_every_worker_a_follow_up_stays_with_its_blocks() -> None:
    home = facts("home", Overlap(400), CandidateLoad(requests=160), speed=20_000.0, places=64)
    other = facts("other", None, CandidateLoad(requests=90), speed=20_000.0, places=64)
    assert choose([home, other], tokens=6_900) == "home"


def test_a_follow_up_goes_to_its_blocks_though_other_requests_wait_there() -> None:
    waiting = CandidateLoad(requests=2, queued_tokens=10_000, active_blocks=100)
    assert choose([facts("home", Overlap(100), waiting), facts("idle")], tokens=1700) == "home"


def test_the_more_requests_are_in_flight_the_longer_a_follow_up_waits_for_its_blocks() -> None:
    home = facts("home", Overlap(250), CandidateLoad(requests=40, queued_tokens=120_000))
    busy, idle = CandidateLoad(requests=40), IDLE
    assert choose([home, *[facts(name, None, busy) for name in "abc"]], tokens=4100) == "home"
    assert choose([home, *[facts(name, None, idle) for name in "abc"]], tokens=4100) != "home"


def test_it_prefers_the_faster_tier_and_any_tier_to_computing() -> None:
    assert choose([facts("disk", Overlap(0, 0, 10)), facts("host", Overlap(0, 10))]) == "host"
    assert choose([facts("host", Overlap(0, 10)), facts("device", Overlap(10))]) == "device"
    assert choose([facts("disk", Overlap(0, 0, 10)), facts("none")]) == "disk"


def test_fetching_counts_for_less_than_its_time_and_never_for_more_than_computing() -> None:
    def fetching(overlap: Overlap, tokens_per_s: float) -> float:
        candidate = facts("a", overlap, speed=tokens_per_s)
        request = RoutingRequest(16_001, BLOCK, fleet=FleetAverage.of([candidate]), host_s=HOST_S, disk_s=DISK_S)
        return KvPolicy().score(request, candidate) - 1

    assert fetching(Overlap(0, 1000), 30_000.0) == pytest.approx(16_000 * 0.026, rel=0.01)
    assert fetching(Overlap(0, 0, 1000), 30_000.0) == pytest.approx(16_000 * 0.33, rel=0.01)
    assert fetching(Overlap(0, 0, 1000), 1000.0) == pytest.approx(16_000 * 0.011, rel=0.01)
    assert fetching(Overlap(0, 0, 1000), 1e6) == 16_000, "where computing is sooner, workers compute"


def test_a_prefix_in_host_memory_moves_to_an_idle_worker_of_the_same_store() -> None:
    busy = CandidateLoad(requests=2, active_blocks=600)
    home, idle = facts("home", Overlap(512), busy, speed=20_000.0), facts("idle", Overlap(0, 512), speed=20_000.0)
    assert choose([home, idle], tokens=8500) == "idle"
    assert choose([facts("home", Overlap(512), speed=20_000.0), idle], tokens=8500) == "home"


def test_it_avoids_a_worker_where_the_prompt_does_not_fit() -> None:
    full = CandidateLoad(requests=1, active_blocks=95)
    assert choose([facts("full", Overlap(8), full, total_blocks=100), facts("free")]) == "free"


def test_a_slow_worker_gets_only_what_it_has_cached() -> None:
    slow, fast = facts("slow", speed=1000.0), facts("fast", None, CandidateLoad(requests=1), speed=4000.0)
    assert choose([slow, fast]) == "fast"
    assert choose([facts("slow", Overlap(19), speed=1000.0), fast]) == "slow"


def test_a_worker_that_was_slow_long_ago_counts_as_the_others_unless_a_prompt_waits_there() -> None:
    def long_ago(tokens_per_s: float, load: CandidateLoad = IDLE) -> CandidateState:
        speed = WorkerSpeed(tokens_per_s, 0.02, old=True)
        return msgspec.structs.replace(facts("long ago", None, load), speed=speed)

    def score(state: CandidateState, others: list[CandidateState]) -> float:
        request = RoutingRequest(320, BLOCK, fleet=FleetAverage.of([state, *others]))
        return KvPolicy().score(request, state)

    others = [facts("other", speed=4000.0)]
    assert score(long_ago(1000.0), others) == score(facts("same", speed=4000.0), others)
    assert score(long_ago(40_000.0), others) < score(facts("same", speed=4000.0), others), "a fast one stays fast"
    waits = CandidateLoad(1, 320)
    assert score(long_ago(1000.0, waits), others) > 2 * score(facts("same", None, waits, speed=4000.0), others)
    assert choose([long_ago(1000.0), facts("other", Overlap(1), speed=4000.0)]) == "other"
    assert choose([long_ago(1000.0), facts("other", None, CandidateLoad(requests=1), speed=4000.0)]) == "long ago"


def test_a_worker_that_was_slow_in_its_first_seconds_gets_its_share_of_short_prompts_again() -> None:
    """Steps with one short prompt each raise its speed a little, and none lowers it."""
    load, sent = LoadTracker(LoadConfig()), list[str]()
    engines = {"s": Throughput(), "t": Throughput()}
    engines["s"].record_prefill(400, 8.0, 0.0, full=True)
    engines["t"].record_prefill(400, 0.4, 0.0, full=True)
    for second in range(240):
        for name, engine in engines.items():
            report = LoadReport(name, 1, second, 0, 1, 0, 1000, 0, 0, prefill_tokens_per_s=engine.tokens_per_s)
            load.apply_report(report, float(second))
        running = {name: sent[-6:].count(name) for name in engines}  # each answer streams for six seconds
        candidates = [
            CandidateState((name, 0), Overlap(), CandidateLoad(running[name]), 1000, load.speeds[name])
            for name in engines
        ]
        sent.append(choose(candidates, tokens=20))
        engines[sent[-1]].record_prefill(20, 0.02, float(second), full=False)
    assert 0 < sent[:60].count("s") < 20
    assert 20 <= sent[-60:].count("s") <= 40


def test_small_differences_in_speed_and_unknown_speeds_change_no_choice() -> None:
    home = facts("home", Overlap(10), speed=900.0)
    assert choose([home, facts("other", Overlap(9), speed=1200.0)]) == "home"
    assert choose([home, facts("other", Overlap(9))]) == "home"
    assert choose([facts("home", Overlap(10)), facts("other", Overlap(9), speed=900.0)]) == "home"


def split(
    *, queued: int = 0, requests: int = 0, tokens: int = 8_000, cached: int = 0, in_flight: float = 4.0
) -> tuple[float, float]:
    """The costs of a pair, with `queued` tokens at the worker that computes prompts, and of one worker for all that
    has `requests`; both workers that decode have these."""
    request = RoutingRequest(tokens, BLOCK, fleet=FleetAverage(in_flight, 10_000.0), host_s=HOST_S, disk_s=DISK_S)
    load = CandidateLoad(requests, 0, 0)
    blocks = (tokens - 1) // BLOCK
    whole = facts("d", Overlap(cached), load, speed=10_000)
    prefill = facts("p", None, CandidateLoad(0, queued, 0), speed=10_000)
    return split_costs(request, whole, prefill, facts("d", Overlap(cached, blocks - cached), load, speed=10_000))


@given(st.lists(st.integers(0, 10**7), min_size=2, max_size=5), st.integers(0, 50), st.integers(1, 100_000))
def test_a_pair_costs_more_the_longer_the_queue_for_prompts_and_one_worker_costs_the_same(
    queues: list[int], requests: int, tokens: int
) -> None:
    costs = [split(queued=queued, requests=requests, tokens=tokens) for queued in sorted(queues)]
    assert [pair for pair, _ in costs] == sorted(pair for pair, _ in costs)
    assert len({alone for _, alone in costs}) == 1


@given(st.lists(st.integers(0, 500), min_size=2, max_size=5), st.integers(1, 100_000))
def test_one_worker_costs_more_the_more_decode_there_and_so_does_what_a_pair_saves(
    counts: list[int], tokens: int
) -> None:
    costs = [split(requests=requests, tokens=tokens) for requests in sorted(counts)]
    alone = [cost for _, cost in costs]
    saved = [cost - pair for pair, cost in costs]
    assert alone == sorted(alone)
    assert all(later >= sooner - 1e-6 * alone[-1] for sooner, later in pairwise(saved))


@given(st.integers(0, 499), st.integers(1, 50))
def test_the_more_of_a_prompt_is_cached_where_it_would_be_decoded_the_less_a_pair_pays(
    cached: int, requests: int
) -> None:
    without, more = split(requests=requests), split(requests=requests, cached=cached)
    assert more[1] - more[0] <= without[1] - without[0] + 1e-6


@given(st.integers(1, 100_000), st.integers(0, 10**6), st.floats(0, 100))
def test_a_pair_never_pays_where_nothing_decodes(tokens: int, queued: int, in_flight: float) -> None:
    pair, alone = split(queued=queued, tokens=tokens, in_flight=in_flight)
    assert pair >= alone


def costs_of(prefill: CandidateLoad, decode: CandidateLoad) -> float:
    """The cost of a pair for 8,000 tokens, at 10,000 tokens a second."""
    request = RoutingRequest(8_000, BLOCK, fleet=FleetAverage(4.0, 10_000.0), host_s=HOST_S, disk_s=DISK_S)
    taker = facts("d", Overlap(0, 7_999 // BLOCK), decode, speed=10_000)
    return split_costs(request, facts("d", speed=10_000), facts("p", None, prefill, speed=10_000), taker)[0]


def test_a_pair_waits_for_both_queues_and_counts_seconds() -> None:
    idle = CandidateLoad(0, 0, 0)
    nothing = costs_of(idle, idle)
    assert 0.8 < nothing < 0.9, "8,000 tokens, and the copies"
    assert costs_of(CandidateLoad(0, 20_000, 0), idle) == pytest.approx(nothing + 2.0)
    assert costs_of(idle, CandidateLoad(0, 5_000, 0)) == pytest.approx(nothing + 0.5)


def test_a_busy_worker_stores_later_and_delays_the_prompts_that_come_next() -> None:
    idle = CandidateLoad(0, 0, 0)
    costs = [costs_of(CandidateLoad(requests, 0, 0), idle) for requests in range(4)]
    assert costs[1] - costs[0] == pytest.approx(STORING_S + 0.8 * PROMPT_WEIGHT)
    assert costs[3] - costs[2] == pytest.approx(0.8 * PROMPT_WEIGHT)


def test_a_worker_that_only_computes_prompts_has_no_neighbours_and_its_queue_counts_in_full() -> None:
    loads = [CandidateLoad(requests, queued, 0) for requests, queued in ((0, 0), (9, 0), (9, 10_000))]
    request = RoutingRequest(8_000, BLOCK, fleet=FleetAverage(4.0, 10_000.0), part="prompt")
    idle, many, queued = [KvPolicy().score(request, facts("p", None, load, speed=10_000)) for load in loads]
    assert idle == 8_000
    assert many == pytest.approx(8_000 * (1 + 9 * PROMPT_WEIGHT)), "it delays the prompts that come next"
    assert queued == many + 10_000


def test_where_a_pair_is_possible_a_short_prompt_does_not_wait_at_the_worker_with_the_fewest_requests() -> None:
    crowded = facts("crowded", None, CandidateLoad(11, 1_000, 0), speed=10_000)
    queued = facts("queued", None, CandidateLoad(3, 40_000, 0), speed=10_000)
    request = RoutingRequest(1_000, BLOCK, fleet=FleetAverage(20.0, 10_000.0))
    assert min(crowded, queued, key=lambda each: KvPolicy().score(request, each)) is queued, "as with one role"
    alone = msgspec.structs.replace(request, part="alone")
    assert min(crowded, queued, key=lambda each: KvPolicy().score(alone, each)) is crowded
    costs = [split_costs(alone, each, crowded, crowded)[1] for each in (crowded, queued)]
    assert costs == pytest.approx([0.1 + 0.1 * (1 + 11 * DECODE_WEIGHT), 4.0 + 0.1 * (1 + 3 * DECODE_WEIGHT)])
