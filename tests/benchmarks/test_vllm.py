"""What `benchmarks/vllm.py` makes of the rounds of two sides."""

from __future__ import annotations

from typing import Any

from benchmarks.vllm import STREAMS, goals_of, row_of


def runs_of(rates: list[float]) -> list[dict[str, Any]]:
    """Return a run for each rate, in which a token takes as long as its rate says."""
    still = {"ttft_p50_ms": 1.0, "gap_p50_ms": 1.0, "cpu_us": 1.0, "cpu_us_by": {"nats-server": 1.0}, "errors": {}}
    return [{"out_tok_s": rate, "tpot_p50_ms": 1e3 / rate, **still} for rate in rates]


def test_sides_are_compared_round_by_round() -> None:
    rows = [row_of("vllm serve", streams, runs_of([100.0, 200.0, 400.0])) for streams in STREAMS]
    rows += [row_of("headrace", streams, runs_of([300.0, 100.0, 200.0])) for streams in STREAMS]
    found = {goal.name: goal for goal in goals_of(rows)}
    rate, gap = found["tokens a second, 16 streams"], found["time between tokens, 16 streams"]
    assert (rate.value, rate.met, gap.value, gap.met) == (0.5, False, 2.0, False), "both medians are equal"
