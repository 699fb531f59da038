"""A stream whose worker is killed, frozen or loses its engine reads as if nothing had happened.

Real processes and a small model's real arithmetic. What is sampled is compared as well as what is greedy: draws are
numbered by token, so that the attempt that goes on draws what the lost one would have drawn.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import CompletionUsage
from openai.types.completion_choice import Logprobs

from tests.integration.fleet import Fleet, Service, fleet
from tests.integration.stack import eventually
from tests.process_tree import children
from tests.tiny_model import write_tiny_model

LIMIT_S = 180.0
TOKENS = 2000
"""Seconds of them, on any machine: a worker shows what it runs every 250 ms."""
READ_BEFORE = 100
"""Chunks until it happens; those that come after it are far more than is on its way."""
LONG = 5000
"""Tokens of a prompt of several steps."""
PROMPT = "The mill at the river turns"
GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 7, "top_p": 0.95, "presence_penalty": 0.6}
PENALISED: dict[str, Any] = {**SAMPLED, "frequency_penalty": 0.4}
WORKERS = ("worker 1", "worker 2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", context_length=8192)


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory, nats_url: str, model: Path) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("migration")
    where = ("--namespace", "migration", "--discovery-backend", "file", "--discovery-path", str(folder / "where"))
    with fleet(folder, nats_url, *where) as one:
        one.start("router", "router")
        for name in WORKERS:
            start_worker(one, name, model)
        # A busy machine that makes workers look frozen costs attempts, and no request.
        # An engine may take long to start.
        limits = ("--limits-frozen-s", "2.5", "--limits-quiet-s", "0.5", "--limits-attempts", "20")
        one.start("frontend", "frontend", *limits, "--limits-rescue-s", "120")
        one.wait_ready()
        router = one.services["router"]  # it sees the workers later than the frontend does, now and then
        eventually(
            lambda: router.metric("headrace_kv_sources") >= len(WORKERS),
            limit_s=LIMIT_S,
            what="the router knows the workers",
        )
        yield one


def start_worker(services: Fleet, name: str, model: Path) -> None:
    services.start("worker", name, "--model", str(model), "--threads", "1")


@pytest.fixture
def client(services: Fleet) -> Iterator[openai.OpenAI]:
    url = f"{services.services['frontend'].url}/v1"
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        yield client


def ask(
    client: openai.OpenAI, sampling: dict[str, Any], then: Callable[[], None] = lambda: None
) -> tuple[str, CompletionUsage]:
    """The text and the usage of a stream; `then` happens in the middle of it."""
    stream = client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "repetition_penalty": 1.1 if sampling else 1.0},
        **sampling,
    )
    text, usage, finish = "", None, None
    for number, chunk in enumerate(stream):
        if number == READ_BEFORE:
            then()
        for choice in chunk.choices:
            text += choice.text
            finish = choice.finish_reason or finish
        usage = chunk.usage or usage
    assert finish == "length"
    assert usage is not None
    return text, usage


def running(worker: Service) -> float:
    return worker.metric("headrace_inflight_requests")


def migrations(services: Fleet) -> float:
    return services.services["frontend"].metric("headrace_model_migration_total")


def lost(services: Fleet) -> float:
    return services.services["frontend"].metric("headrace_attempts_lost_total")


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
def test_a_killed_worker_changes_no_token_and_no_count(
    services: Fleet, client: openai.OpenAI, sampling: dict[str, Any], model: Path
) -> None:
    text, usage = ask(client, sampling)
    before = migrations(services)
    services.wait_idle(*WORKERS)
    killed: list[Service] = []

    def kill() -> None:
        with services.busiest(*WORKERS) as worker:
            worker.kill()
        killed.append(worker)

    again, counted = ask(client, sampling, kill)
    assert again == text
    assert (counted.prompt_tokens, counted.completion_tokens) == (usage.prompt_tokens, TOKENS)
    assert counted.total_tokens == usage.total_tokens
    assert migrations(services) > before
    start_worker(services, killed[0].name, model)
    services.wait_ready(*WORKERS)


def test_log_probabilities_of_a_prompt_come_once_though_its_worker_is_killed(
    services: Fleet, client: openai.OpenAI, model: Path
) -> None:
    killed: list[Service] = []

    def kill() -> None:
        with services.busiest(*WORKERS) as worker:
            worker.kill()
        killed.append(worker)

    before = migrations(services)
    whole = scores(client)
    services.wait_idle(*WORKERS)
    joined = scores(client, kill)
    assert migrations(services) > before
    assert len(whole.tokens or ()) == LONG + TOKENS
    assert (joined.tokens, joined.text_offset) == (whole.tokens, whole.text_offset)
    assert (joined.token_logprobs or [])[1:] == pytest.approx((whole.token_logprobs or [])[1:], abs=1e-3)
    start_worker(services, killed[0].name, model)
    services.wait_ready(*WORKERS)


def scores(client: openai.OpenAI, then: Callable[[], None] = lambda: None) -> Logprobs:
    """The log-probabilities of a long prompt and its answer; `then` happens when the first of them have come."""
    found = Logprobs(tokens=[], token_logprobs=[], text_offset=[])
    for chunk in client.completions.create(
        model="tiny",
        prompt=[3 + (index * index + index // 7) % 317 for index in range(LONG)],
        max_tokens=TOKENS,
        echo=True,
        logprobs=1,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    ):
        for given in (choice.logprobs for choice in chunk.choices if choice.logprobs is not None):
            if not found.tokens:
                then()
            for name in ("tokens", "token_logprobs", "text_offset"):
                getattr(found, name).extend(getattr(given, name))
    return found


def test_a_worker_that_is_thawed_after_its_requests_went_elsewhere_mixes_into_nothing(
    services: Fleet, client: openai.OpenAI
) -> None:
    text, _ = ask(client, SAMPLED)
    before = lost(services)
    services.wait_idle(*WORKERS)
    frozen: list[Service] = []

    def freeze() -> None:
        with services.busiest(*WORKERS) as worker:
            worker.process.send_signal(signal.SIGSTOP)
        frozen.append(worker)

    def thaw() -> None:
        frozen[0].process.send_signal(signal.SIGCONT)

    assert ask(client, SAMPLED, freeze)[0] == text
    assert lost(services) > before
    assert ask(client, SAMPLED, thaw)[0] == text
    eventually(lambda: not running(frozen[0]), limit_s=LIMIT_S, what="the lost attempt was cancelled")
    services.wait_ready(*WORKERS)
    assert ask(client, SAMPLED)[0] == text


def test_the_only_worker_loses_its_engine_and_its_stream_goes_on(services: Fleet, client: openai.OpenAI) -> None:
    text, usage = ask(client, PENALISED)
    services.services[WORKERS[1]].stop()
    only = services.services[WORKERS[0]]

    def kill_engine() -> None:
        for child in children(only.process.pid):
            os.kill(child, signal.SIGKILL)

    before = lost(services)
    services.wait_idle(*WORKERS)
    again, counted = ask(client, PENALISED, kill_engine)
    assert again == text
    assert counted.completion_tokens == usage.completion_tokens
    assert lost(services) > before
