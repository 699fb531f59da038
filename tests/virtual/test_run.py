"""One fleet of a plan, through the program that runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec

from shared.messages.virtual import OUTCOME, VirtualFailure, VirtualResult, VirtualRun
from tests.integration.stack import eventually
from tests.processes import has_ended

TIMES = {"prefill": [[64, 0, 0.006], [4096, 0, 0.12]], "decode": [[1, 64, 0.0045], [64, 64, 0.005]]}


def asked(*runs: VirtualRun) -> list[VirtualResult | VirtualFailure]:
    lines = b"".join(msgspec.json.encode(run) + b"\n" for run in runs)
    program = [sys.executable, "-m", "services.virtual"]
    answered = subprocess.run(program, input=lines, capture_output=True, check=True, timeout=300)
    return [OUTCOME.decode(line) for line in answered.stdout.splitlines()]


def wanted(folder: Path, **changes: int | float | str) -> VirtualRun:
    times, load = folder / "times.json", folder / "load.jsonl"
    times.write_text(json.dumps(TIMES), encoding="utf-8")
    rows = [
        {
            "timestamp": 250 * number,
            "input_length": 640,
            "output_length": 20,
            "hash_ids": [*range(5), *range(10 * number + 10, 10 * number + 15)],
        }
        for number in range(40)
    ]
    load.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    run = VirtualRun(trace=str(load), block_size=64, times=str(times), workers=1, kv_tokens=50_000)
    return msgspec.structs.replace(run, **changes)


def test_the_same_run_has_the_same_figures_and_more_workers_are_no_slower(tmp_path: Path) -> None:
    one, again, more = asked(wanted(tmp_path), wanted(tmp_path), wanted(tmp_path, workers=3))
    assert one == again
    assert isinstance(one, VirtualResult)
    assert isinstance(more, VirtualResult)
    assert 0.0045 <= one.itl_s.p50 <= one.itl_s.p90 <= one.itl_s.p99
    assert more.ttft_s.p99 <= one.ttft_s.p99
    assert one.hit_rate > 0.4
    assert not one.given_up


def test_roles_hand_prompts_over(tmp_path: Path) -> None:
    (split,) = asked(wanted(tmp_path, workers=0, prefill=1, decode=1, store_tokens=50_000))
    assert isinstance(split, VirtualResult)
    assert split.failed == 0
    assert split.ttft_s.p50 > 0


def test_a_run_that_is_hopeless_is_given_up(tmp_path: Path) -> None:
    late, patient = asked(wanted(tmp_path, late_s=0.001, late_most=3), wanted(tmp_path, late_s=0.001, late_most=40))
    assert isinstance(late, VirtualResult)
    assert isinstance(patient, VirtualResult)
    assert late.given_up
    assert not patient.given_up


def test_a_run_that_cannot_be_made_says_why_and_the_next_one_is_made(tmp_path: Path) -> None:
    missing, unknown, made = asked(
        wanted(tmp_path, times="none.json"), wanted(tmp_path, policy="worst"), wanted(tmp_path)
    )
    assert isinstance(missing, VirtualFailure)
    assert "none.json" in missing.reason
    assert isinstance(unknown, VirtualFailure)
    assert "worst" in unknown.reason
    assert isinstance(made, VirtualResult)


def test_a_run_ends_with_the_plan_that_asked_for_it(tmp_path: Path) -> None:
    load = tmp_path / "pipe"
    os.mkfifo(load)  # so that the run is still at its beginning
    line = msgspec.json.encode(wanted(tmp_path, trace=str(load))).decode()
    asking = (
        "import subprocess, sys\n"
        "program = subprocess.Popen([sys.executable, '-m', 'services.virtual'], stdin=subprocess.PIPE, text=True)\n"
        "print(program.pid, flush=True)\n"
        "program.stdin.write(sys.argv[1] + '\\n')\n"
        "program.stdin.flush()\n"
        "program.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", asking, line], stdout=subprocess.PIPE, text=True) as plan:
        assert plan.stdout is not None
        pid = int(plan.stdout.readline())
        with load.open("w", encoding="utf-8"):  # waits until the run reads it
            plan.kill()
            eventually(lambda: has_ended(pid), limit_s=120.0, what="the simulation has ended")
