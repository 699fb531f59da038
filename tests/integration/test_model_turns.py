"""`headrace up --models`: three models take turns, while clients stream and processes are killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from openai import APIConnectionError, APIError, OpenAI

from tests.integration.stack import ONE_EACH, ROOT, Up, eventually, running
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.timeout(900)

LIMIT_S = 180.0
MODELS = ("one", "two", "three")
TOKENS = 24
QUICK = ("--set", "turns.turn_s=1", "--set", "turns.least_awake_s=0.2", "--set", "turns.change_s=20")


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


def engine_of(up: Up, model: str) -> int:
    """The process of the engine that the model's worker started last."""
    log = (up.state / "logs" / f"{worker_of(model)}.log").read_text()
    return int(re.findall(r"engine \d+ started, process (\d+)", log)[-1])


class EnginesKilled:
    """Kills each engine of a model's worker as soon as it has started, while it is open."""

    def __init__(self, up: Up, model: str) -> None:
        self._up, self._model = up, model
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._kill, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(LIMIT_S)

    def _kill(self) -> None:
        while not self._over.wait(0.02):
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine_of(self._up, self._model), signal.SIGKILL)


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


def test_the_first_requests_after_ready_find_their_models(up: Up, client: OpenAI) -> None:
    with ThreadPoolExecutor(len(MODELS)) as pool:
        assert all(pool.map(lambda model: ask(client, model), MODELS))


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
def test_no_request_fails_because_its_model_falls_asleep_or_wakes(up: Up, client: OpenAI) -> None:
    def stream(model: str) -> None:
        for _ in range(40):
            ask(client, model, tokens=4)

    with ThreadPoolExecutor(4 * len(MODELS)) as pool:
        list(pool.map(stream, 4 * MODELS))


@pytest.mark.tier("long")
def test_a_model_whose_engines_end_at_once_fails_and_the_others_have_their_turns(
    up: Up, client: OpenAI, texts: dict[str, str]
) -> None:
    assert ask(client, "one") == texts["one"]
    with EnginesKilled(up, "one"), ThreadPoolExecutor(len(MODELS)) as pool:
        one, two, three = (pool.submit(ask, client, model) for model in MODELS)
        with pytest.raises(APIError, match="could not wake: the engine has ended"):
            one.result(LIMIT_S)
        assert (two.result(LIMIT_S), three.result(LIMIT_S)) == (texts["two"], texts["three"])

    def answered() -> bool:
        try:
            return ask(client, "one") == texts["one"]
        except APIError:  # until the pause after the last try is over
            return False

    eventually(answered, limit_s=LIMIT_S, what="one wakes again")


@pytest.mark.tier("long")
def test_a_model_whose_engine_is_frozen_as_it_wakes_gives_its_turn_to_others(
    up: Up, client: OpenAI, texts: dict[str, str]
) -> None:
    assert ask(client, "two") == texts["two"]
    eventually(lambda: stages(up).get("one") == "asleep", limit_s=LIMIT_S, what="one sleeps")
    os.kill(engine_of(up, "one"), signal.SIGSTOP)
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(ask, client, "one")
        eventually(lambda: stages(up).get("one") == "waking", limit_s=LIMIT_S, what="one is to wake")
        three = pool.submit(ask, client, "three")
        with pytest.raises(APIError, match="the engine did not answer in 20 s"):
            one.result(LIMIT_S)
        assert three.result(LIMIT_S) == texts["three"]


@pytest.mark.tier("long")
def test_a_model_whose_worker_is_frozen_fails_by_name_and_wakes_once_that_goes_on(
    up: Up, client: OpenAI, texts: dict[str, str]
) -> None:
    assert ask(client, "two") == texts["two"]
    eventually(lambda: stages(up).get("one") == "asleep", limit_s=LIMIT_S, what="one sleeps")
    eventually(lambda: not turns(up)["one"]["failed"], limit_s=LIMIT_S, what="nothing is left of earlier wakes")
    frozen = up.pid(worker_of("one"))
    os.kill(frozen, signal.SIGSTOP)
    try:
        with pytest.raises(APIError, match=r"its worker \w+ has been silent for"):
            ask(client, "one")
        assert ask(client, "three") == texts["three"]
    finally:
        os.kill(frozen, signal.SIGCONT)
    eventually(
        lambda: not turns(up)["one"]["failed"],
        limit_s=LIMIT_S,
        what="its worker is heard again",
    )
    assert ask(client, "one") == texts["one"]


@pytest.mark.tier("long")
def test_requests_through_two_frontends_are_answered_while_one_of_them_is_killed(
    tmp_path: Path, models: str, texts: dict[str, str]
) -> None:
    flags = (*QUICK, "--models", models, "--discovery", "file", "--kvbm-bytes", "0", "--frontends", "2")
    with running(tmp_path, *flags) as up:
        doors = [up.record["programs"][f"frontend-{number}"]["observe"] for number in range(2)]
        for door in doors:
            with urllib.request.urlopen(f"{door}/health", timeout=LIMIT_S) as health:
                assert sorted(json.load(health)["models"]) == sorted(MODELS)

        def stream(model: str) -> list[str]:
            answers = []
            for _ in range(6):  # each over a connection of its own, which the kernel gives to either frontend
                with OpenAI(base_url=up.url, api_key="any", max_retries=0, timeout=LIMIT_S) as one:
                    answers.append(ask(one, model))
            return answers

        with ThreadPoolExecutor(2 * len(MODELS)) as pool:
            for model, answers in zip(2 * MODELS, pool.map(stream, 2 * MODELS), strict=True):
                assert answers == [texts[model]] * 6
        assert all(answered_at(door) for door in doors)
        kill(up, "frontend-0")

        def answered(model: str) -> bool:
            with OpenAI(base_url=up.url, api_key="any", max_retries=0, timeout=LIMIT_S) as one:
                try:
                    return ask(one, model) == texts[model]
                except APIConnectionError:  # the kernel gave it to the socket of the frontend that was killed
                    return False

        for model in MODELS:
            eventually(partial(answered, model), limit_s=LIMIT_S, what=f"{model} is answered again")


def answered_at(door: str) -> float:
    """How many requests a frontend has answered."""
    with urllib.request.urlopen(f"{door}/metrics", timeout=LIMIT_S) as metrics:
        found = re.findall(r"^headrace_requests_total\{.*\} (\S+)", metrics.read().decode(), re.MULTILINE)
    return sum(map(float, found))


@pytest.mark.tier("long")
def test_a_client_that_leaves_is_waited_for_no_more(up: Up, client: OpenAI, texts: dict[str, str]) -> None:
    assert ask(client, "one") == texts["one"]
    hasty = client.with_options(timeout=0.02)
    with pytest.raises(Exception, match="timed out"):
        hasty.completions.create(model="two", prompt="x", max_tokens=TOKENS)
    eventually(
        lambda: all(turn["waiting"] == 0 for turn in turns(up).values()), limit_s=LIMIT_S, what="nothing is waited for"
    )
