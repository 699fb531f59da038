"""benchmarks/gpu_peer.py and benchmarks/gpu_hand_over.py, as far as they run without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from benchmarks.gpu_hand_over import ALONE, PAIR, BetweenRow, HandOverRow, goals
from tests.gpu.device import missing
from tests.integration.stack import ROOT

LIMIT_S = 600.0


def run(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.{module}", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_blocks_of_another_process_are_copied_compared_and_held_against_one_plain_copy() -> None:
    told = json.loads(run("gpu_peer", "--device", "cpu", "--quick", "--json").stdout)
    rows = {(row["fragments"], row["blocks"], row["how"]) for row in told["rows"]}
    assert rows == {
        (fragments, blocks, how)
        for fragments in ("2 MiB x 1", "32 KiB x 64")
        for blocks in (64, 512)
        for how in ("once", "in a row")
    }
    assert [goal["goal"] for goal in told["goals"]] == [0.9, 0.9]


@pytest.mark.skipif(not missing(), reason="a GPU is here")
@pytest.mark.parametrize("module", ["gpu_peer", "gpu_hand_over"])
def test_without_a_gpu_it_says_so_in_one_line(module: str) -> None:
    ended = run(module)
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
    assert "this needs an NVIDIA GPU" in ended.stderr


def row(model: str, second_ms: float, *, handed_over: bool = True) -> HandOverRow:
    return HandOverRow(model, handed_over, 300.0, second_ms, 5.0, 8192)


def test_what_was_not_handed_over_does_not_count() -> None:
    rows = [row(ALONE, 5.0), row(PAIR, 14.0), row(PAIR, 15.0), row(PAIR, 16.0), row(PAIR, 1.0, handed_over=False)]
    [goal] = goals(rows, [], gpus=1)
    assert (goal.value, goal.met) == (10.0, True)
    with pytest.raises(AssertionError, match="no prompt was handed over"):
        goals(rows[:1] + rows[-1:], [], gpus=1)


@pytest.mark.parametrize(("beside_ms", "met"), [(11.0, True), (11.5, False)])
def test_with_two_gpus_streams_during_prompts_are_compared_with_streams_alone(beside_ms: float, met: bool) -> None:
    between = [
        BetweenRow(ALONE, 0, 0, 0, 100, 9.0, 12.0),
        BetweenRow(PAIR, 0, 0, 0, 100, 9.18, 10.0),
        BetweenRow(PAIR, 1, 40, 40, 100, 9.0, beside_ms),
    ]
    _, beside, alone = goals([row(ALONE, 5.0), row(PAIR, 6.0)], between, gpus=2)
    assert beside.met == met
    assert alone.value == pytest.approx(1.02)
    assert not alone.met
