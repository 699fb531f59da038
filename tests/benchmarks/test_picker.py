"""benchmarks/picker.py: what its figures are made of."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from benchmarks.picker import GROUPS, SHARED, SMALL_BYTES, TOKENS, PickerRow, Prompts, goals, us_a_chunk
from tests.tiny_model import write_tiny_model


def row(load: str, cpu_s: float, *, seconds: float = 10.0, requests: int = 100, chunks: int = 0) -> PickerRow:
    spent = {"frontend": cpu_s / 2, "router": cpu_s / 2, "worker": 1.0}
    return PickerRow(load, requests, seconds, 1.0, 2.0, spent, dict.fromkeys(spent, 10.0), chunks)


def test_the_price_of_a_chunk_is_a_slope_without_what_idle_processes_take() -> None:
    rows = [row("idle", 1.0), row("chunks", 2.0, chunks=1), row("chunks", 3.0, seconds=20.0, chunks=401)]
    assert us_a_chunk(rows) == pytest.approx(0.0)
    rows[-1] = row("chunks", 4.0, seconds=20.0, chunks=401)
    assert us_a_chunk(rows) == pytest.approx(1.0 / 100 / 400 * 1e6)
    assert us_a_chunk([row("text", 1.0)]) is None


def test_goals_are_those_of_the_loads_that_were_run() -> None:
    found = {goal.name: goal for goal in goals([row("4 kB", 0.05), row("4 kB", 0.2), row("4 kB", 0.06)])}
    assert [*found] == ["4 kB: CPU a request, frontend and router"]
    assert (goal := found["4 kB: CPU a request, frontend and router"]).met
    assert goal.value == pytest.approx(0.6)
    assert [goal.name for goal in goals([row("text", 1.0)])] == [
        "text: choice, p95",
        "text: CPU of all processes",
        "text: memory of all processes",
    ]


def test_prompts_have_the_size_that_is_said_and_those_of_a_group_begin_alike(tmp_path: Path) -> None:
    prompts = Prompts(write_tiny_model(tmp_path / "model", vocab=1000), Random(1))

    def tokens(load: str) -> list[int]:
        body = b"".join(message.request_body.body for message in prompts.messages(load))
        assert load == "ids" or SMALL_BYTES - 100 < len(body) <= SMALL_BYTES
        return list(json.loads(body)["prompt"])

    made = [tokens("ids") for _ in range(GROUPS + 1)]
    assert {len(each) for each in made} == {TOKENS}
    shared = int(TOKENS * SHARED)
    assert len({tuple(each[:shared]) for each in made}) <= GROUPS
    assert len({tuple(each) for each in made}) == len(made)
    tokens("4 kB")
