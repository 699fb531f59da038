"""What `benchmarks/vllm_gpu.py serve` makes of the rows of its sides."""

from __future__ import annotations

from typing import Any

from benchmarks.vllm_gpu import ALONE, HEADRACE, KVBM, NATIVE, serve_goals


def row(side: str, rate: float, streams: int = 64) -> dict[str, Any]:
    return {"side": side, "streams": streams, "out_tok_s": rate, "ttft_p50_ms": 1.0, "gap_p99_ms": 1.0}


def rates(rows: list[dict[str, Any]]) -> dict[str, tuple[float | None, bool]]:
    return {goal.name: (goal.value, goal.met) for goal in serve_goals(rows) if "tokens a second" in goal.name}


def test_the_native_engine_is_compared_with_both_ways_to_run_vllm() -> None:
    sides = [row(ALONE, 100.0), row(HEADRACE, 80.0), row(KVBM, 110.0), row(NATIVE, 90.0), row(NATIVE, 1.0, streams=1)]
    assert rates(sides) == {
        "headrace, 64 streams: tokens a second": (0.8, False),
        "headrace and kvbm, 64 streams: tokens a second": (1.1, True),
        "headrace native, 64 streams: tokens a second": (0.9, False),
        "headrace native, 64 streams: tokens a second, of headrace": (1.125, True),
    }


def test_a_side_without_its_yardstick_has_no_goal() -> None:
    assert rates([row(HEADRACE, 80.0), row(KVBM, 110.0)]) == {}
    assert rates([row(HEADRACE, 80.0), row(NATIVE, 80.0)]) == {
        "headrace native, 64 streams: tokens a second, of headrace": (1.0, True)
    }


def test_a_yardstick_whose_tokens_came_together_is_not_a_divisor_of_0() -> None:
    together = row(ALONE, 100.0) | {"gap_p99_ms": 0.0}
    [gap] = [goal for goal in serve_goals([together, row(NATIVE, 90.0)]) if "gap" in goal.name]
    assert (gap.value, gap.met) == (1000.0, False)
