"""EngineRanks: attempts, blocks and reports of each rank, with numbers that all share."""

from __future__ import annotations

from services.worker.contracts.messages import Stepped, Submit
from services.worker.vllm.ranks import EngineRanks
from shared.hashing import pack_tokens
from shared.messages.generate import Sampling
from shared.messages.kv_events import AllBlocksCleared, BlockStored


def ranks_of(count: int = 2) -> EngineRanks:
    return EngineRanks(count, block_size=4, capacity_blocks=8, now_s=0.0)


def submit(number: int, rank: int, lora: str = "") -> Submit:
    tokens = pack_tokens([1, 2, 3, 4, 5])
    sampling = Sampling(max_tokens=5)
    return Submit(f"r{number}", 1, "front", tokens, 5, sampling, 60.0, lora=lora, rank=rank, number=number)


def stored(*hashes: int) -> BlockStored:
    return BlockStored(list(hashes), None, [7] * 4 * len(hashes), 4, medium="GPU")


def take(ranks: EngineRanks) -> list[Stepped]:
    reports = ranks.take_reports()
    ranks.validate()
    return reports


def test_the_opening_clears_every_rank() -> None:
    ranks = ranks_of()
    reports = take(ranks)
    assert [(one.rank, one.event_sequence, one.digest, one.events) for one in reports] == [
        (0, 0, 0, [AllBlocksCleared()]),
        (1, 1, 0, [AllBlocksCleared()]),
    ]
    assert take(ranks) == []


def test_ranks_share_the_sequence_and_have_digests_of_their_own() -> None:
    ranks = ranks_of()
    take(ranks)
    first, second = ranks.all
    second.apply_events([stored(10, 11)])
    [report] = take(ranks)
    assert (report.rank, report.event_sequence, report.digest, report.load.cached_blocks) == (1, 2, 10 ^ 11, 2)
    first.apply_events([stored(10)])
    second.apply_events([stored(12)])
    assert [(one.rank, one.event_sequence, one.digest) for one in take(ranks)] == [(0, 3, 10), (1, 4, 10 ^ 11 ^ 12)]
    assert ranks.event_sequence == 4


def test_an_attempt_is_at_its_rank_alone() -> None:
    ranks = ranks_of()
    take(ranks)
    first, second = ranks.all
    key = second.add(submit(7, 1, lora="l@1"), 0.0)
    assert ranks.find("r7", 1) == (second, key)
    assert ranks.find("r7", 2) is None
    assert ranks.living == len(second.attempts) == 1
    assert ranks.uses_lora("l@1")
    assert not first.attempts.uses_lora("l@1")
    second.attempts.record_output(key, [3], finish="stop")
    [report] = take(ranks)
    assert (report.rank, report.event_sequence, report.event_batch) == (1, 1, b"")
    assert [part.finish for part in report.parts["front"]] == ["stop"]
    assert ranks.living == 0


def test_steps_of_all_ranks_count_as_progress() -> None:
    ranks = ranks_of()
    before = take(ranks)[-1].progress
    for rank in ranks.all:
        for _ in range(3):
            rank.stats.record_step(
                1.0, running=1, waiting=0, usage=0.5, prefilled_tokens=0, decoded_tokens=1, preempted=0
            )
    assert [(one.progress - before, one.steps, one.load.held_blocks) for one in take(ranks)] == [(3, 3, 4), (6, 3, 4)]


def test_a_rank_that_stands_still_is_found_while_another_works() -> None:
    ranks = ranks_of()
    first, second = ranks.all
    first.add(submit(1, 0), 100.0)
    second.add(submit(2, 1), 100.0)
    first.active_s = 129.0
    assert ranks.stalled(129.0, 30.0) is None
    assert ranks.stalled(130.0, 30.0) is second
    second.attempts.end("2", "cancelled")
    assert ranks.stalled(130.0, 30.0) is None
    assert ranks.idle(129.0, 30.0) == []
    assert ranks.idle(130.0, 30.0) == [second]


def test_work_that_comes_after_a_pause_has_its_time() -> None:
    ranks = ranks_of()
    first, _ = ranks.all
    first.add(submit(1, 0), 1000.0)
    assert ranks.stalled(1029.0, 30.0) is None
    first.add(submit(2, 0), 1029.0)
    assert ranks.stalled(1030.0, 30.0) is first
