"""Several choices over real servers and processes: the prompt is computed once, and what befalls one befalls a request.

SMOL is SmolLM2 at one worker, whose greedy choices are all the answer of one alone. TINY is a small model at two, the
busier of which is killed: choices that are sampled, each from a seed of its own, come out as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import CompletionUsage

from deploy.local.stack.model import fetch_default
from services.worker.native.prepare import prepare
from tests.integration.fleet import Fleet, Service
from tests.integration.shared.conftest import WithWorkers
from tests.integration.stack import ROOT, eventually
from tests.tiny_model import write_tiny_model

LIMIT_S = 180.0
SMOL, TINY = "smol", "choices"
WORKERS = ("worker 1", "worker 2")
TOKENS = 1000
READ_BEFORE = 100
"""Chunks until it happens."""
BLOCK = 16
STORY = "Once upon a time there was a mill at a river, and the river was slow. " * 12
ON: dict[str, Any] = {"extra_body": {"ignore_eos": True, "repetition_penalty": 1.1}}
GREEDY: dict[str, Any] = {"temperature": 0, **ON}
SAMPLED: dict[str, Any] = {"temperature": 2, "seed": 7, "frequency_penalty": 0.4, **ON}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / TINY, context_length=8192)


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory, tiny: Path, with_workers: WithWorkers) -> Iterator[Fleet]:
    folder, models = tmp_path_factory.mktemp("choices"), ROOT / ".headrace" / "models"
    smol = folder / SMOL
    smol.mkdir()
    for file in prepare(fetch_default(models, lambda what, share: None), models, lambda loading: None).iterdir():
        (smol / file.name).symlink_to(file)

    def start(one: Fleet) -> None:
        start_worker(one, SMOL, smol)
        for name in WORKERS:
            start_worker(one, name, tiny)

    with with_workers(start) as one:
        yield one


def start_worker(services: Fleet, name: str, model: Path) -> None:
    services.start("worker", name, "--model", str(model), "--threads", "1")


@pytest.fixture
def client(services: Fleet) -> Iterator[openai.OpenAI]:
    url = f"{services.services['frontend'].url}/v1"
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        eventually(
            lambda: {one.id for one in client.models.list()} == {SMOL, TINY}, limit_s=LIMIT_S, what="both are served"
        )
        yield client


def streamed(
    client: openai.OpenAI, sampling: dict[str, Any], n: int, then: Callable[[], None] = lambda: None
) -> tuple[list[str], CompletionUsage]:
    """The choices' texts and their usage; `then` happens in the middle."""
    texts, usage, ends = [""] * n, None, list[int]()
    stream = client.completions.create(
        model=TINY,
        prompt=STORY,
        n=n,
        max_tokens=TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        **sampling,
    )
    for number, chunk in enumerate(stream):
        if number == READ_BEFORE:
            then()
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason is not None:
                assert choice.finish_reason == "length"
                ends.append(choice.index)
        usage = chunk.usage or usage
    assert sorted(ends) == list(range(n))
    assert usage is not None
    return texts, usage


def running(services: Fleet) -> dict[str, float]:
    return {name: services.services[name].metric("headrace_inflight_requests") for name in WORKERS}


def test_greedy_choices_are_the_answer_of_one_alone_and_find_the_prompt_computed(
    services: Fleet, client: openai.OpenAI
) -> None:
    ask: dict[str, Any] = {"model": SMOL, "temperature": 0, "max_tokens": 24}
    messages: Any = [{"role": "user", "content": STORY + "How does it end?"}]
    four = client.chat.completions.create(messages=messages, n=4, **ask)
    assert four.usage is not None
    assert four.usage.prompt_tokens_details is not None
    blocks = (four.usage.prompt_tokens - 1) // BLOCK
    assert blocks > 10
    first = four.usage.prompt_tokens_details.cached_tokens
    assert first < blocks * BLOCK, "nobody has asked that before; a worker that was slow may have computed a part twice"
    cached = services.services["frontend"].metric("headrace_cached_tokens_total")
    assert cached >= first + 3 * blocks * BLOCK, "all full blocks, for each of the others"
    one = client.chat.completions.create(messages=messages, **ask)
    assert [choice.message.content for choice in four.choices] == [one.choices[0].message.content] * 4
    assert [choice.finish_reason for choice in four.choices] == [one.choices[0].finish_reason] * 4
    assert one.usage is not None
    assert four.usage.completion_tokens == 4 * one.usage.completion_tokens
    assert four.usage.prompt_tokens == one.usage.prompt_tokens


def test_prompts_are_answered_as_each_would_be_alone(client: openai.OpenAI) -> None:
    prompts = ["The mill", "The river", STORY]
    ask: dict[str, Any] = {"model": SMOL, "temperature": 0, "max_tokens": 8}
    alone = [client.completions.create(prompt=prompt, **ask).choices[0].text for prompt in prompts]
    together = client.completions.create(prompt=prompts, n=2, echo=True, **ask)
    due = [prompt + text for prompt, text in zip(prompts, alone, strict=True) for _ in (0, 1)]
    assert [choice.text for choice in together.choices] == due


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_killed_worker_changes_no_token_of_any_choice(
    services: Fleet, client: openai.OpenAI, sampling: dict[str, Any], tiny: Path
) -> None:
    texts, usage = streamed(client, sampling, 3)
    assert len(set(texts)) == (1 if sampling is GREEDY else 3)
    migrations = services.services["frontend"].metric("headrace_model_migration_total")
    services.wait_idle(*WORKERS)
    killed: list[Service] = []

    def kill() -> None:
        with services.busiest(*WORKERS) as worker:
            worker.kill()
        killed.append(worker)

    again, counted = streamed(client, sampling, 3, kill)
    assert again == texts
    assert (counted.prompt_tokens, counted.completion_tokens) == (usage.prompt_tokens, 3 * TOKENS)
    assert services.services["frontend"].metric("headrace_model_migration_total") > migrations
    start_worker(services, killed[0].name, tiny)
    services.wait_ready(*WORKERS)


def test_a_client_that_goes_leaves_no_choice_running(services: Fleet, client: openai.OpenAI) -> None:
    frontend, router = services.services["frontend"], services.services["router"]
    cancelled = frontend.metric("headrace_model_cancellation_total")
    stream = client.completions.create(
        model=TINY, prompt=["a", STORY], n=3, max_tokens=7000, stream=True, extra_body={"ignore_eos": True}
    )
    seen: set[int] = set()
    for chunk in stream:
        seen.add(chunk.choices[0].index)
        if len(seen) == 6:
            break
    stream.close()
    eventually(lambda: not any(running(services).values()), limit_s=LIMIT_S, what="the workers are idle")
    eventually(lambda: not frontend.metric("headrace_inflight_requests"), limit_s=LIMIT_S, what="the frontend is idle")
    assert frontend.metric("headrace_model_cancellation_total") >= cancelled + 6
    assert router.process.poll() is None
