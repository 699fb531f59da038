from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random

from services.router.selection.pairs import SplitCosts
from services.router.selection.policies.kv import split_costs
from services.virtual.fleet import SimulatedFleet
from services.virtual.journeys import TokenGaps
from services.virtual.loads import LoadTrace, TraceRequest, chats, ideal
from services.virtual.store import StoreSizes
from services.worker.contracts.messages import Snapshot, TakeEngineSnapshot
from services.worker.contracts.runner import Work
from shared.messages.cards import Role

REQUESTS = 150
ONE_ROLE: tuple[Role, ...] = ("aggregated", "decode")


def slow(works: Sequence[Work]) -> float:
    """Return a step time of 20 ms and a millisecond a token, so that some requests wait."""
    return 0.02 + 0.001 * sum(len(work.tokens) for work in works)


def busy(load: LoadTrace, *, workers: int = 2, capacity_blocks: int = 400) -> SimulatedFleet:
    fleet = SimulatedFleet(load, "kv", capacity_blocks=capacity_blocks)
    for _ in range(workers):
        fleet.join(slow)
    return fleet


def always(*_: object) -> tuple[float, float]:
    """Compare so that a pair always costs less."""
    return 0.0, 1.0


def split(load: LoadTrace, *roles: Role, gaps: TokenGaps | None = None) -> SimulatedFleet:
    """Return a fleet with these roles that hands every prompt over."""
    sizes = StoreSizes(slots=4000, records=0)
    fleet = SimulatedFleet(load, "kv", capacity_blocks=400, sizes=sizes, compare=always, gaps=gaps)
    for role in roles:
        fleet.join(slow, role)
    return fleet


def settle(fleet: SimulatedFleet) -> None:
    """Run until all sent messages have arrived."""
    until_s = fleet.clock.now_s + 1.0
    while fleet.clock.now_s < until_s:
        fleet.clock.step()


def check(fleet: SimulatedFleet) -> None:
    """Check that every request ended and that the router's state is right."""
    settle(fleet)
    assert all(journey.end_s >= journey.first_token_s > journey.request.arrival_s for journey in fleet.journeys)
    assert not any(journey.failed for journey in fleet.journeys)
    fleet.router.validate()
    held = 0
    for worker in fleet.workers.values():
        worker.core.validate()
        (snapshot,) = worker.core.handle(TakeEngineSnapshot(0), fleet.clock.now_s)
        assert isinstance(snapshot, Snapshot)
        held += len(snapshot.blocks)
    assert fleet.router.index.statistics().pairs["device"] == held
    assert fleet.router.load.statistics().reservations == 0


def test_every_request_ends_and_the_routers_index_is_what_the_workers_hold() -> None:
    fleet = busy(chats(REQUESTS, Random(1)))
    fleet.run()
    check(fleet)
    assert sum(fleet.prefilled.values()) > 0


def test_no_fleet_finds_more_than_the_ideal_cache_and_one_unbounded_worker_nearly_as_much() -> None:
    load = chats(REQUESTS, Random(2))
    alone = busy(load, workers=1, capacity_blocks=1 << 14)
    alone.run()
    found = sum(journey.cached_tokens for journey in alone.journeys)
    assert 0.98 * ideal(load).cached_tokens <= found <= ideal(load).cached_tokens  # siblings in one step find nothing
    many = busy(load, workers=3)
    many.run()
    assert sum(journey.cached_tokens for journey in many.journeys) <= ideal(load).cached_tokens


def test_questions_about_a_document_that_still_waits_go_where_it_waits() -> None:
    blocks, documents = 40, 12
    asked = [(0.1 * each, each, 0) for each in range(documents)]
    asked += [(6.5 + 0.1 * each, each, number) for each in range(documents) for number in (1, 2)]
    requests = [
        TraceRequest(
            number,
            arrival_s,
            [*range(100 * document, 100 * document + blocks), *[10_000 + number] * bool(question)],
            64 * (blocks + bool(question)),
            3,
        )
        for number, (arrival_s, document, question) in enumerate(sorted(asked))
    ]
    fleet = busy(LoadTrace("documents", 64, requests), workers=3, capacity_blocks=1000)
    fleet.run()
    check(fleet)
    first_s = [journey.ttft_s for journey in fleet.journeys[:documents]]
    assert max(first_s) > 9.0, "some waited for longer than blocks are expected without a prompt that waits"
    found = sum(journey.cached_tokens for journey in fleet.journeys)
    assert found >= 0.95 * ideal(fleet.load).cached_tokens


def test_the_same_load_gives_the_same_result_again() -> None:
    load = chats(REQUESTS, Random(3))
    runs = [busy(load), busy(load)]
    for fleet in runs:
        fleet.run()
    first, second = ([journey.end_s for journey in fleet.journeys] for fleet in runs)
    assert first == second


def test_requests_of_a_dying_worker_continue_elsewhere_and_end_with_as_many_tokens() -> None:
    load = chats(REQUESTS, Random(4))
    fleet = busy(load, workers=3)
    middle_s = load.requests[REQUESTS // 2].arrival_s
    fleet.clock.at(middle_s, lambda: fleet.leave(next(iter(fleet.workers))))
    fleet.run()
    check(fleet)
    assert any(journey.attempt > 0 for journey in fleet.journeys)


def test_a_closed_loop_keeps_its_number_of_requests_in_flight_until_the_end() -> None:
    fleet = busy(chats(REQUESTS, Random(5)), workers=1)
    fleet.run_closed(4)
    settle(fleet)
    assert all(journey.end_s > 0 for journey in fleet.journeys)
    assert fleet.router.load.statistics().reservations == 0


def test_with_a_block_store_everything_ends_and_the_router_knows_what_the_store_holds() -> None:
    load = chats(REQUESTS, Random(6))
    sizes = StoreSizes(slots=300, records=900, read_bytes_per_s=2e9, write_bytes_per_s=1e9)
    fleet = SimulatedFleet(load, "kv", capacity_blocks=200, sizes=sizes)
    for _ in range(2):
        fleet.join(slow)
    fleet.run()
    check(fleet)
    assert fleet.store is not None
    fleet.store.tickets.validate()
    tiers, pairs = fleet.store.tiers.statistics(), fleet.router.index.statistics().pairs
    assert (pairs["host"], pairs["disk"]) == (tiers.host.ready, tiers.disk.ready)
    tickets = fleet.store.tickets.statistics()
    assert (tickets.owners, tickets.stores, tickets.fetches, tickets.expired) == (2, 0, 0, 0)
    assert sum(journey.cached_host_tokens for journey in fleet.journeys) > 0
    assert sum(journey.cached_disk_tokens for journey in fleet.journeys) > 0


def test_a_fleet_with_a_large_block_store_finds_nearly_what_the_ideal_cache_finds() -> None:
    load = chats(REQUESTS, Random(7))
    found = []
    for sizes in (None, StoreSizes(slots=4000, records=0)):
        fleet = SimulatedFleet(load.at(load.rate / 4), "kv", capacity_blocks=200, sizes=sizes)
        for _ in range(2):
            fleet.join(slow)
        fleet.run()
        found.append(sum(journey.cached_tokens for journey in fleet.journeys) / ideal(load).cached_tokens)
    alone, shared = found
    assert alone < 0.6
    assert 0.98 < shared <= 1


def test_prompts_are_handed_over_and_end_with_as_many_tokens_and_both_reservations_end() -> None:
    load, gaps = chats(REQUESTS, Random(8)), TokenGaps()
    fleet = split(load, "prefill", "decode", "decode", gaps=gaps)
    fleet.run()
    check(fleet)
    assert fleet.store is not None
    fleet.store.tickets.validate()
    assert all(journey.hand_overs == 1 and journey.attempt == 1 for journey in fleet.journeys)
    assert len(gaps.handed_over_s) == REQUESTS
    assert len(gaps.all_s) == sum(request.output_tokens - 1 for request in load.requests)
    assert min(gaps.all_s) > 0


def test_a_worker_that_decodes_finds_what_was_handed_over_and_computes_the_rest() -> None:
    load = chats(REQUESTS, Random(9))
    fleet = split(load.at(load.rate / 4), "prefill", "decode")
    fleet.run()
    check(fleet)
    (prefill, decode), computed = fleet.workers, dict.fromkeys(fleet.workers, 0)
    for (_, worker), tokens in fleet.prefilled.items():
        computed[worker] += tokens
    rests = sum(request.prompt_tokens % load.block_size + 1 for request in load.requests)
    assert 0.95 * rests < computed[decode] < 1.05 * rests
    assert computed[prefill] > 3 * computed[decode]


def test_requests_go_on_after_either_worker_of_a_pair_is_gone() -> None:
    load = chats(REQUESTS, Random(10))
    load = load.at(4 * load.rate)  # so many that each worker has some at any time
    for leaver in (0, 2):
        fleet = split(load, "prefill", "prefill", "decode", "decode")
        leave = [*fleet.workers][leaver]
        fleet.clock.at(load.requests[REQUESTS // 2].arrival_s, partial(fleet.leave, leave))
        fleet.run()
        check(fleet)
        assert any(journey.attempt > 1 for journey in fleet.journeys)


def test_with_one_role_the_comparison_of_pairs_changes_nothing() -> None:
    load, ends = chats(REQUESTS, Random(11)), []
    cases: list[tuple[Role, SplitCosts]] = [(role, how) for role in ONE_ROLE for how in (always, split_costs)]
    for role, compare in cases:
        fleet = SimulatedFleet(load, "kv", capacity_blocks=200, sizes=StoreSizes(300, 0), compare=compare)
        for _ in range(2):
            fleet.join(slow, role)
        fleet.run()
        check(fleet)
        ends.append([journey.end_s for journey in fleet.journeys])
    assert ends[0] == ends[1]
    assert ends[2] == ends[3]


def test_gaps_are_the_times_between_the_tokens_of_one_answer() -> None:
    load, gaps = chats(REQUESTS, Random(12)), TokenGaps()
    fleet = SimulatedFleet(load, "kv", capacity_blocks=400, gaps=gaps)
    for _ in range(2):
        fleet.join(slow)
    fleet.run()
    assert len(gaps.all_s) == sum(request.output_tokens - 1 for request in load.requests)
    assert not gaps.handed_over_s
    decoding_s = sum(journey.end_s - journey.first_token_s for journey in fleet.journeys)
    assert abs(sum(gaps.all_s) - decoding_s) < 1e-6 * decoding_s


def test_a_worker_that_decodes_loads_blocks_while_the_rest_of_the_prompt_is_computed() -> None:
    load = chats(REQUESTS, Random(13))
    fleet = split(load.at(load.rate / 4), "prefill", "decode")
    fleet.run()
    check(fleet)
    _, decode = fleet.workers.values()
    handed_over = sum((request.prompt_tokens - 1) // load.block_size for request in load.requests)
    assert decode.last.load.prefetched_blocks > 0.1 * handed_over
    assert fleet.store is not None
    assert fleet.store.tickets.statistics().fetches == 0
