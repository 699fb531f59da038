"""Thinking within a budget of tokens, of a small model's real arithmetic over real processes.

The template opens thinking; a model of random weights never ends it by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

from tests.integration.fleet import Fleet, Service
from tests.integration.shared.conftest import WithWorkers
from tests.tiny_model import write_tiny_model

LIMIT_S = 180.0
BUDGET = 1500
"""A second and more of them: a worker shows what it runs every 250 ms."""
READ_BEFORE = 20
"""Chunks until a worker is killed."""
WORKERS = ("worker 1", "worker 2")
OPEN, CLOSE = "<think>", "</think>"
HELLO: Any = [{"role": "user", "content": "The mill at the river turns"}]


class Said(NamedTuple):
    """What a stream adds up to."""

    thought: str
    content: str
    tokens: list[str]
    """All of them, by their names."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_tiny_model(
        tmp_path_factory.mktemp("model") / "thinking", context_length=4096, marks=(OPEN, CLOSE)
    )
    (directory / "chat_template.jinja").write_text("{{ messages[-1].content }}<think>\n")
    return directory


@pytest.fixture(scope="module")
def services(model: Path, with_workers: WithWorkers) -> Iterator[Fleet]:
    def start(one: Fleet) -> None:
        for name in WORKERS:
            start_worker(one, name, model)

    with with_workers(start) as one:
        yield one


def start_worker(services: Fleet, name: str, model: Path) -> None:
    services.start("worker", name, "--model", str(model), "--threads", "1")


@pytest.fixture
def client(services: Fleet) -> Iterator[openai.OpenAI]:
    url = f"{services.services['frontend'].url}/v1"
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        yield client


def ask(client: openai.OpenAI, then: Callable[[], None] = lambda: None, **more: Any) -> Said:
    """Greedily, streamed; `then` happens in the middle of it."""
    thought, content, tokens = "", "", list[str]()
    stream = client.chat.completions.create(
        model="thinking", messages=HELLO, temperature=0, stream=True, logprobs=True, extra_body=more
    )
    for number, chunk in enumerate(stream):
        if number == READ_BEFORE:
            then()
        for choice in chunk.choices:
            thought += getattr(choice.delta, "reasoning_content", None) or ""
            content += choice.delta.content or ""
            tokens += [one.token for one in (choice.logprobs.content if choice.logprobs else None) or ()]
    return Said(thought, content, tokens)


def thought_of(said: Said) -> list[str]:
    """Tokens before the closing tag; this model opens thinking once more, as some do."""
    assert said.tokens[0] == OPEN
    return said.tokens[1 : said.tokens.index(CLOSE)]


@pytest.mark.parametrize("budget", [0, 1, 50])
def test_thinking_takes_its_budget_and_content_follows(client: openai.OpenAI, budget: int) -> None:
    free = ask(client, max_tokens=120)
    assert CLOSE not in free.tokens
    assert not free.content
    said = ask(client, max_tokens=120, thinking_token_budget=budget)
    assert len(thought_of(said)) == budget
    assert CLOSE not in said.thought
    assert said.content


def test_what_an_answer_is_held_to_follows_thinking_of_a_budget(client: openai.OpenAI) -> None:
    said = ask(client, max_tokens=60, thinking_token_budget=20, structured_outputs={"choice": ["left", "right"]})
    assert len(thought_of(said)) == 20
    assert said.content in ("left", "right")


def test_each_of_several_answers_has_the_budget(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="thinking",
        messages=HELLO,
        max_tokens=40,
        n=3,
        seed=1,
        logprobs=True,
        extra_body={"thinking_token_budget": 10},
    )
    for choice in answer.choices:
        assert choice.logprobs is not None
        tokens = [one.token for one in choice.logprobs.content or ()]
        assert tokens.index(CLOSE) <= 10 + 1, "with a tag that opens thinking once more"
        assert choice.finish_reason == "stop" or choice.message.content
    assert len(answer.choices) == 3


def test_no_effort_is_no_thinking(client: openai.OpenAI) -> None:
    said = ask(client, max_tokens=20, reasoning_effort="none")
    assert not thought_of(said)
    assert not said.thought
    assert said.content
    # The template has no place for another effort, so it changes nothing.
    assert ask(client, max_tokens=20, reasoning_effort="low") == ask(client, max_tokens=20)


def test_a_worker_killed_within_thinking_changes_no_token_and_not_where_it_ends(
    services: Fleet, client: openai.OpenAI, model: Path
) -> None:
    more: Any = {"max_tokens": BUDGET + 50, "thinking_token_budget": BUDGET}
    said = ask(client, **more)
    assert len(thought_of(said)) == BUDGET
    services.wait_idle(*WORKERS)
    killed: list[Service] = []

    def kill() -> None:
        with services.busiest(*WORKERS) as worker:
            worker.kill()
        killed.append(worker)

    assert ask(client, kill, **more) == said
    assert services.services["frontend"].metric("headrace_model_migration_total") >= 1
    start_worker(services, killed[0].name, model)
    services.wait_ready(*WORKERS)
