"""The load of a vLLM engine from its statistics."""

from __future__ import annotations

import pytest

from services.worker.vllm.kv_transfer import ImageCounts
from services.worker.vllm.stats import EngineStats


def record(stats: EngineStats, now_s: float, **fields: float) -> None:
    given = {"running": 1, "waiting": 0, "usage": 0.0, "prefilled_tokens": 0, "decoded_tokens": 0, "preempted": 0}
    stats.record_step(now_s, **(given | fields))  # type: ignore[arg-type]


def test_speeds_of_prefill_and_decode() -> None:
    stats = EngineStats(100)
    stats.begin(10.0)
    record(stats, 11.0)
    record(stats, 12.0, prefilled_tokens=199, decoded_tokens=1)
    record(stats, 12.5, decoded_tokens=1, usage=0.25)
    load = stats.load(unbegun_tokens=7, cached_blocks=90)
    assert load.prefill_tokens_per_s == pytest.approx(100.0)
    assert load.step_s == pytest.approx(0.5)
    assert (load.waiting_tokens, load.held_blocks, load.cached_blocks) == (7, 25, 75)
    assert stats.take_step_counts() == (201, 2.5)
    assert stats.take_step_counts() == (0, 0.0)


def test_a_short_prompt_does_not_lower_the_speed() -> None:
    stats = EngineStats(100)
    stats.begin(0.0)
    record(stats, 1.0, prefilled_tokens=2000)
    for turn in range(100):
        stats.begin(40.0 * turn + 40)
        record(stats, 40.0 * turn + 41, prefilled_tokens=20, running=0)
    assert stats.load(unbegun_tokens=0, cached_blocks=0).prefill_tokens_per_s == pytest.approx(2000.0)


def test_an_idle_time_is_no_step() -> None:
    stats = EngineStats(100)
    stats.begin(0.0)
    record(stats, 1.0, decoded_tokens=1, running=0)
    stats.begin(100.0)
    record(stats, 100.5, decoded_tokens=1)
    assert stats.load(unbegun_tokens=0, cached_blocks=0).step_s < 1.01


def test_preemptions_add_up() -> None:
    stats = EngineStats(100)
    record(stats, 1.0, preempted=2)
    record(stats, 2.0, preempted=1)
    assert stats.load(unbegun_tokens=0, cached_blocks=0).preemptions == 3


def test_what_became_of_images_is_in_the_load() -> None:
    stats = EngineStats(100)
    stats.images = ImageCounts(hits=1, encoded=2, fetched=3, entries=4, size_bytes=5)
    load = stats.load(unbegun_tokens=0, cached_blocks=0)
    assert (load.encoder_hits, load.encoded_images, load.fetched_images) == (1, 2, 3)
    assert (load.encoder_entries, load.encoder_bytes) == (4, 5)
