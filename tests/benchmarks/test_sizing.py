"""benchmarks/sizing.py: the same figures are predicted and measured, and prompts share what their names share."""

from __future__ import annotations

import threading

import aiohttp
import pytest

from benchmarks.sizing import GOALS, machine_speeds, measurement_of, prompt_of, rows_of, traffic_of
from deploy.local.size.token_client import TimedAnswer, TokenClient
from shared.messages.virtual import Percentiles, VirtualResult


def test_each_figure_with_a_goal_is_predicted_and_measured() -> None:
    answers = [TimedAnswer(10.0, 10.2, 10.5, 4, None, (0.1, 0.1, 0.1)), TimedAnswer(11.0, 11.4, 11.6, 2, None, (0.2,))]
    seen = measurement_of(answers, 2.0)
    assert seen.tokens_per_s == 3.0
    assert seen.itl_s.p50 == 0.1
    spread = Percentiles(0.3, 0.4, 0.4)
    planned = VirtualResult(
        ttft_s=spread,
        itl_s=spread,
        requests_per_s=1,
        output_tokens_per_s=3.3,
        hit_rate=0,
        failed=0,
        given_up=False,
    )
    off = {row.figure: row.off for row in rows_of(0.5, traffic_of(2.0, 10), planned, seen)}
    assert off.keys() >= GOALS.keys()
    assert off["ttft_p50"] == pytest.approx(0.3 / 0.2 - 1)
    assert off["tokens_per_s"] == pytest.approx(0.1)


def test_the_machine_is_timed_until_the_block_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.sizing._YARDSTICK_EVERY_S", 0.001)
    with machine_speeds() as speeds:
        while len(speeds) < 3:
            pass
    assert min(speeds) > 0
    assert not any(thread.name == "machine-speeds" for thread in threading.enumerate())


async def test_prompts_share_the_blocks_whose_names_they_share_and_no_load_has_anothers() -> None:
    async with aiohttp.ClientSession() as http:
        asked = TokenClient(http, "http://127.0.0.1:1/v1", "none")
        first, second = (prompt_of(row, asked, "a") for row in traffic_of(1.0, 2).rows)
        assert first[:64] == second[:64]
        assert first[64:128] != second[64:128]
        assert prompt_of(traffic_of(1.0, 2).rows[0], asked, "b")[:64] != first[:64]
        assert [len(first), len(second)] == [row.input_length for row in traffic_of(1.0, 2).rows]
