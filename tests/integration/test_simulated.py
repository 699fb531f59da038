"""`headrace up --engine simulated`: many workers on one machine, each with a GPU's time and no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.integration.stack import ROOT, Up, running
from tests.tiny_model import write_tiny_model

WORKERS = 3
LIMIT_S = 300.0


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    state = tmp_path_factory.mktemp("simulated")
    model = str(write_tiny_model(state / "tiny"))
    flags = ("--engine", "simulated", "--workers", str(WORKERS), "--model", model, "--discovery", "file")
    with running(state, *flags) as stack:
        yield stack


@pytest.fixture
def client(up: Up) -> Iterator[OpenAI]:
    with OpenAI(base_url=up.url, api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        yield client


def status(up: Up) -> dict[str, Any]:
    command = [sys.executable, "-m", "deploy.local.cli", "status", "--json", "--state", str(up.state)]
    shown: dict[str, Any] = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
    return shown


def test_all_workers_are_there_and_show_their_blocks(up: Up) -> None:
    (model,) = status(up)["models"]
    assert len(model["instances"]) == WORKERS
    assert model["total_blocks"] == WORKERS * 4096


def test_an_answer_is_the_prompts_text_again_and_a_second_one_finds_the_prompt_cached(client: OpenAI) -> None:
    question = "How does water get from the river to the mill? " * 4
    answers = [
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": question}],
            max_tokens=300,
            extra_body={"ignore_eos": True},
        )
        for _ in range(2)
    ]
    for answer in answers:
        assert "from the river to the mill?" in (answer.choices[0].message.content or "")
        assert answer.choices[0].finish_reason == "length"
    usages = [answer.usage for answer in answers]
    assert [usage and usage.completion_tokens for usage in usages] == [300, 300]
    first, second = usages
    assert first
    assert second
    assert second.prompt_tokens_details
    assert not first.prompt_tokens_details or not first.prompt_tokens_details.cached_tokens
    assert second.prompt_tokens_details.cached_tokens == (second.prompt_tokens - 1) // 16 * 16


def test_an_answer_without_a_limit_ends_by_itself(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Is it far?"}])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert 100 <= answer.usage.completion_tokens <= 301


def test_bench_measures_the_stack_that_up_started(up: Up) -> None:
    out = up.state / "bench"
    flags = ("--concurrency", "1,8", "--requests", "16", "--words", "40", "--output-tokens", "20", "--out", str(out))
    command = [sys.executable, "-m", "deploy.local.cli", "bench", "--state", str(up.state), *flags]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.startswith("LOAD")
    for row in json.loads(out.with_suffix(".json").read_text())["rows"]:
        assert row["outcomes"] == {"done": 16}
        assert row["tokens_by"] == "usage"
        assert row["prompt_tokens"] > 40
        assert row["tokens_per_s"] * row["seconds"] == pytest.approx(16 * 20)


def test_heat_shows_the_prefix_that_prompts_share_by_its_hash_and_never_its_text(up: Up, client: OpenAI) -> None:
    shared = "The ferry leaves at nine and comes back when the tide is low. " * 6
    for number in range(3):
        client.completions.create(model="tiny", prompt=f"{shared} {number}", max_tokens=4)
    png = up.state / "heat.png"
    command = [sys.executable, "-m", "deploy.local.cli", "heat", "--state", str(up.state), "--png", str(png)]
    shown = subprocess.run([*command, "--json"], cwd=ROOT, check=True, capture_output=True, text=True)
    hottest = max(json.loads(shown.stdout)["prefixes"], key=lambda one: one["asked"])
    assert hottest["asked"] >= 3
    assert hottest["hits"] >= 1
    assert hottest["device"]
    assert png.read_bytes().startswith(b"\x89PNG")
    table = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert hottest["block"] in table
    assert "ferry" not in shown.stdout + table
