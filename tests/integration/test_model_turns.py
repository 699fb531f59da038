"""`headrace up --models`: three models take turns, while clients stream and processes are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import OpenAI

from tests.integration.stack import ONE_EACH, ROOT, Up, eventually, running
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.timeout(900)

LIMIT_S = 180.0
MODELS = ("one", "two", "three")
TOKENS = 24
QUICK = ("--set", "turns.turn_s=1", "--set", "turns.least_awake_s=0.2")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three models whose answers differ, as --models names them."""
    folder = tmp_path_factory.mktemp("models")
    return ",".join(str(write_tiny_model(folder / name, seed=seed)) for seed, name in enumerate(MODELS, 2))


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, models: str) -> Iterator[Up]:
    flags = (*ONE_EACH, *QUICK, "--models", models, "--discovery", "file", "--kvbm-bytes", "0")
    with running(tmp_path_factory.mktemp("up"), *flags) as stack:
        yield stack


@pytest.fixture
def client(up: Up) -> Iterator[OpenAI]:
    with OpenAI(base_url=up.url, api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        yield client


def ask(client: OpenAI, model: str, tokens: int = TOKENS) -> str:
    """The text of a stream, which must end by its length."""
    text, finish = "", None
    with client.completions.create(
        model=model,
        prompt="The mill at the river turns",
        max_tokens=tokens,
        temperature=2.0,
        seed=7,
        stream=True,
        extra_body={"ignore_eos": True},
    ) as stream:
        for chunk in stream:
            text += chunk.choices[0].text
            finish = chunk.choices[0].finish_reason or finish
    assert finish == "length"
    return text


@pytest.fixture(scope="module")
def texts(up: Up) -> dict[str, str]:
    """What each model answers when it is asked alone."""
    with OpenAI(base_url=up.url, api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        found = {model: ask(client, model) for model in MODELS}
    assert len(set(found.values())) == len(MODELS)
    return found


def turns(up: Up) -> dict[str, dict[str, Any]]:
    """The models' turns, as `status` shows them."""
    command = [sys.executable, "-m", "deploy.local.cli", "status", "--json", "--state", str(up.state)]
    shown = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=LIMIT_S).stdout
    return {each["model"]: each for state in json.loads(shown)["turns"] for each in state["models"]}


def stages(up: Up) -> dict[str, str]:
    return {model: str(turn["stage"]) for model, turn in turns(up).items()}


def kill(up: Up, program: str) -> None:
    """Kill a program; `up` starts it again."""
    before = up.pid(program)
    os.kill(before, signal.SIGKILL)
    eventually(
        lambda: up.record["programs"].get(program, {"pid": before})["pid"] != before,
        limit_s=LIMIT_S,
        what=f"{program} has started again",
    )


def worker_of(model: str) -> str:
    return f"worker-{MODELS.index(model)}"


def asked_together(client: OpenAI, texts: dict[str, str], rounds: int, then: Any = lambda: None) -> None:
    """Clients of all models stream at the same time, `then` happens meanwhile, and each gets its model's answer."""
    begun = threading.Barrier(len(MODELS) + 1)

    def stream(model: str) -> list[str]:
        begun.wait(LIMIT_S)
        return [ask(client, model) for _ in range(rounds)]

    with ThreadPoolExecutor(len(MODELS)) as pool:
        streams = {model: pool.submit(stream, model) for model in MODELS}
        begun.wait(LIMIT_S)
        then()
        for model, one in streams.items():
            assert one.result(LIMIT_S) == [texts[model]] * rounds


def test_all_models_are_listed_before_any_was_asked_and_one_is_awake_at_a_time(
    up: Up, client: OpenAI, texts: dict[str, str]
) -> None:
    assert sorted(model.id for model in client.models.list()) == sorted(MODELS)
    seen: list[dict[str, str]] = []
    asked_together(client, texts, 2, lambda: seen.extend(stages(up) for _ in range(2)))
    for each in [*seen, stages(up)]:
        assert sum(stage != "asleep" for stage in each.values()) <= 1, each


@pytest.mark.tier("long")
def test_the_process_that_decides_may_be_killed_at_any_time(up: Up, client: OpenAI, texts: dict[str, str]) -> None:
    def kill_twice() -> None:
        for _ in range(2):
            kill(up, "turns")

    asked_together(client, texts, 3, kill_twice)


@pytest.mark.tier("long")
def test_a_worker_that_is_killed_asleep_wakes_for_the_next_request(
    up: Up, client: OpenAI, texts: dict[str, str]
) -> None:
    assert ask(client, "one") == texts["one"]
    eventually(lambda: stages(up).get("two") == "asleep", limit_s=LIMIT_S, what="two sleeps")
    kill(up, worker_of("two"))
    asked_together(client, texts, 1)


@pytest.mark.tier("long")
def test_workers_that_are_killed_while_models_change_lose_no_answer(
    up: Up, client: OpenAI, texts: dict[str, str]
) -> None:
    def kill_some() -> None:
        for model in ("three", "one"):
            kill(up, worker_of(model))

    asked_together(client, texts, 3, kill_some)


@pytest.mark.tier("long")
def test_a_client_that_leaves_is_waited_for_no_more(up: Up, client: OpenAI, texts: dict[str, str]) -> None:
    assert ask(client, "one") == texts["one"]
    hasty = client.with_options(timeout=0.02)
    with pytest.raises(Exception, match="timed out"):
        hasty.completions.create(model="two", prompt="x", max_tokens=TOKENS)
    eventually(
        lambda: all(turn["waiting"] == 0 for turn in turns(up).values()), limit_s=LIMIT_S, what="nothing is waited for"
    )
