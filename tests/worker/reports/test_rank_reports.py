"""RankReports: the last report of each rank, sums over them, and where their events are."""

from __future__ import annotations

from services.worker.contracts.messages import EngineLoad, Stepped
from services.worker.reports.rank_reports import RankReports
from shared.messages.load import EncoderState, KvState, RankLoad


def stepped(rank: int, load: EngineLoad, *, progress: int = 1, sequence: int = 0, digest: int = 0) -> Stepped:
    return Stepped(progress, {}, [], [], b"", sequence, digest, load, rank=rank)


def test_one_rank_is_the_worker() -> None:
    reports = RankReports()
    assert (reports.load, reports.rank_loads, reports.progress) == (EngineLoad(), [], 0)
    assert reports.kv_states(3, 1) == [KvState(0, 3, -1, 0)]
    load = EngineLoad(waiting=1, running=2, step_s=0.5)
    reports.record_step(stepped(0, load, progress=9, sequence=4, digest=77))
    assert (reports.load, reports.rank_loads, reports.progress) == (load, [], 9)
    assert reports.kv_states(3, 1) == [KvState(0, 3, 4, 77)]


def test_counts_of_ranks_are_summed_and_speeds_are_means_of_the_measured() -> None:
    reports = RankReports()
    first = EngineLoad(waiting=1, running=2, waiting_tokens=30, held_blocks=4, step_s=0.5, preemptions=1)
    second = EngineLoad(waiting=3, waiting_tokens=5, held_blocks=1, prefill_tokens_per_s=100.0, step_s=0.1)
    reports.record_step(stepped(1, second, progress=1, sequence=0, digest=5))
    reports.record_step(stepped(0, first, progress=2, sequence=1, digest=6))
    assert reports.load == EngineLoad(
        waiting=4, running=2, waiting_tokens=35, held_blocks=5, prefill_tokens_per_s=100.0, step_s=0.3, preemptions=1
    )
    assert reports.rank_loads == [RankLoad(0, 1, 2, 30, 4), RankLoad(1, 3, 0, 5, 1)]
    assert reports.kv_states(1, 2) == [KvState(0, 1, 1, 6), KvState(1, 1, 1, 5)]
    reports.record_step(stepped(0, first, progress=3, sequence=2, digest=8))
    assert reports.kv_states(1, 3) == [KvState(0, 1, 2, 8), KvState(1, 1, 2, 5), KvState(2, 1, 2, 0)]


def test_an_encoder_cache_is_reported_once_an_image_has_come() -> None:
    reports = RankReports()
    reports.record_step(stepped(0, EngineLoad(running=1)))
    assert reports.encoder is None
    reports.record_step(
        stepped(
            0,
            EngineLoad(encoder_entries=2, encoder_bytes=300, encoder_hits=5, encoded_images=4, fetched_images=1),
            progress=2,
        )
    )
    assert reports.encoder == EncoderState(images=2, size_bytes=300, hits=5, encoded=4, fetched=1)
