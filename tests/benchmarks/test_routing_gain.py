"""One timing for the engines of two systems."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.routing_gain import DECODE_S, FAR, TOKEN_S, Gain, Lone, apart, goals_of, our_timing, peer_timing
from services.worker.config import SimulatedConfig
from services.worker.contracts.runner import Work
from services.worker.simulated.timing import Table, Timing
from shared.messages.generate import Sampling


def test_both_systems_get_the_same_times(tmp_path: Path) -> None:
    our_timing(tmp_path / "ours")
    peer_timing(tmp_path / "peer.npz")
    timing = Timing(SimulatedConfig(), Table.parse((tmp_path / "ours").read_bytes(), "ours"))
    theirs = np.load(tmp_path / "peer.npz")
    slope_ms = np.diff(theirs["prefill_ttft_ms"]) / np.diff(theirs["prefill_isl"])
    assert slope_ms == pytest.approx(TOKEN_S * 1e3)
    assert set(theirs["decode_itl"].flat) == {DECODE_S * 1e3}
    sampling = Sampling(32)
    prompt = Work(0, (), 1000, 3048, (), sampling, 3048)
    decodes = [Work(number, (), 2000, 2001, (), sampling, 1990) for number in range(1, 5)]
    assert timing.step_s([prompt]) == pytest.approx(2048 * TOKEN_S)
    assert timing.step_s(decodes) == pytest.approx(DECODE_S)
    assert timing.step_s([prompt, *decodes]) == pytest.approx(2048 * TOKEN_S + DECODE_S)
    assert FAR > 256 * 2048


def test_engines_of_other_times_are_seen() -> None:
    assert apart([Lone("a", 0.4, 0.012), Lone("b", 0.42, 0.012)]) == pytest.approx(0.05)
    assert apart([Lone("a", 0.4, 0.012), Lone("b", 0.4, 0.018)]) == pytest.approx(0.5)


def test_the_goal_is_the_others_gain() -> None:
    gains = [Gain("ours", "8", 1, 1.5, 2.0), Gain("peer", "8", 1, 1.4, 2.5)]
    assert [(goal.value, goal.goal, goal.met) for goal in goals_of(gains)] == [(1.5, 1.4, True), (2.0, 2.5, False)]
