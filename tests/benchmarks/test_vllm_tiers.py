"""Tests of what `benchmarks/vllm_tiers.py` makes of answers, logs and rows."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from benchmarks.vllm_tiers import (
    BLOCK,
    Answer,
    cached_of,
    drawn,
    expected,
    first_row,
    goals_of,
    rate_of,
    reason_of,
)

LOG = """WARNING found: `OSError: [Errno 24] Too many open files`. Consider increasing with ulimit -n
(EngineCore pid=7) ERROR 11-24 12:10:00 [core.py:12] Exception: CPU Offloading is not supported here
RuntimeError: Engine core initialization failed. See root cause above.
"""


def answer(first_s: float, cached: int) -> Answer:
    return Answer(first_s, [1.0], [5], cached)


def rows_of(side: str, first_ms: float, rate: float) -> list[dict[str, Any]]:
    shared = {"model": "tiny", "side": side}
    moved = {"stayed_tokens": 100, "moved_tokens": 100 if side == "headrace" else 50}
    return [
        {"what": "first token", **shared, "first_ms": first_ms},
        {"what": "decode", **shared, "tok_s": rate, "rounds": [rate, rate / 2, rate]},
        {"what": "moved", **shared, **moved},
        {"what": "killed", **shared, "before_tokens": 100, "after_tokens": 90},
    ]


def test_the_last_token_of_a_prompt_is_computed_and_with_it_its_block() -> None:
    assert expected(4 * BLOCK + 1) == 4 * BLOCK
    assert expected(4 * BLOCK) == 3 * BLOCK


def test_drawn_prompts_share_nothing() -> None:
    random = Random(1)
    assert drawn(random, 100) != drawn(random, 100)


def test_usage_without_details_is_a_prompt_that_was_computed() -> None:
    assert [cached_of(usage) for usage in (None, {}, {"prompt_tokens_details": None})] == [0, 0, 0]
    assert cached_of({"prompt_tokens_details": {"cached_tokens": 64}}) == 64


def test_a_rate_counts_from_the_first_token_to_the_last_even_where_streams_come_one_after_the_other() -> None:
    assert rate_of([[0.0, 1.0, 2.0, 3.0], [1.0, 1.5, 2.0]]) == pytest.approx(2.0)
    assert rate_of([[0.0, 1.0], [2.0, 3.0]]) == pytest.approx(1.0)


def test_the_reason_of_a_failed_start_is_the_first_error_and_no_warning() -> None:
    assert reason_of(LOG) == "CPU Offloading is not supported here"
    assert reason_of("nothing") == "it did not start"


def test_hits_that_lack_a_part_of_the_prompt_are_counted_at_sides_with_a_store() -> None:
    answers = [answer(0.02, 4096), answer(0.03, 4096), answer(0.1, 0)]
    row = first_row("tiny", 4097, "headrace", answers)
    assert (row["first_ms"], row["spread"], row["short"]) == (30.0, [20.0, 100.0], 1)
    assert first_row("tiny", 4097, "recompute", answers)["short"] == 0


def test_goals_compare_with_each_side_and_a_missing_yardstick_misses() -> None:
    rows = rows_of("headrace", 20.0, 98.0) + rows_of("recompute", 100.0, 100.0)
    found = {goal.name: goal for goal in goals_of(rows)}
    first = found["first token of 4096 tokens (tiny), headrace to recompute"]
    assert (first.value, first.met) == (0.2, True)
    rate = found["tokens a second while blocks are stored (tiny), headrace to recompute"]
    assert (rate.value, rate.met) == (0.98, True)
    assert (found["hits, moved"].value, found["hits, moved"].met) == (1.0, True)
    assert (found["hits, killed"].value, found["hits, killed"].met) == (0.9, False)
    lmcache = found["first token of 4096 tokens (tiny), headrace to lmcache"]
    assert (lmcache.value, lmcache.met) == (None, False)


def test_parts_that_were_not_measured_have_no_goals() -> None:
    rows = [row for row in rows_of("headrace", 20.0, 98.0) if row["what"] == "decode"]
    assert [goal.name for goal in goals_of(rows)] == [
        "tokens a second while blocks are stored (tiny), headrace to idle",
        "tokens a second while blocks are stored (tiny), headrace to empty",
        "tokens a second while blocks are stored (tiny), headrace to recompute",
    ]
