"""Structured output and tool calls outlive two workers of one stream, and leave nothing held when clients go.

Real processes and a small model's real arithmetic. What is asked for ends further on than any answer comes.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from services.worker.native.grammars import KEPT
from tests.integration.fleet import Fleet, Service
from tests.integration.shared.conftest import WithWorkers
from tests.integration.stack import eventually
from tests.tiny_model import CHAT_TEMPLATE, write_tiny_model

LIMIT_S = 180.0
TOKENS = 2000
"""Seconds of them: a worker shows what it runs every 250 ms."""
KILLED_AT = (0.1, 0.5)
"""Shares of an answer's characters; a third worker writes the rest."""
WORKERS = ("worker 1", "worker 2", "worker 3")
GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 7, "presence_penalty": 0.6, "frequency_penalty": 0.4}
ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "of": {"enum": ["rivers", "mills"]}},
    "required": ["name", "of"],
    "additionalProperties": False,
}
LIST = {"type": "array", "items": ITEM, "minItems": 1000}
LONG = {"type": "object", "properties": {"items": LIST}, "required": ["items"], "additionalProperties": False}
WRITE = {"type": "function", "function": {"name": "write", "parameters": LONG}}
HELD: dict[str, dict[str, Any]] = {
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "items", "schema": LONG}}},
    "regex": {"structured_outputs": {"regex": "([a-f]{3}[0-9]{2}-){3000,4000}"}},
    "grammar": {"structured_outputs": {"grammar": 'start: item{5000,}\nitem: /"[a-z]{1,9}", /'}},
    "call": {"tools": [WRITE], "tool_choice": "required"},
}
BEGINS = {
    "schema": r'\{ ?"items" ?: ?\[ ?\{ ?"name" ?: ?".{0,9}" ?, ?"of" ?: ?"(rivers|mills)"',
    "regex": "([a-f]{3}[0-9]{2}-){50}",
    "grammar": '("[a-z]{1,9}", ){50}',
    "call": r'write\{ ?"items" ?: ?\[ ?\{ ?"name" ?: ?"',
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_tiny_model(tmp_path_factory.mktemp("model") / "held", context_length=8192)
    shown = "{% if tools %}{{ tools | tojson }}{% endif %}"
    (directory / "chat_template.jinja").write_text(shown + CHAT_TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def services(model: Path, with_workers: WithWorkers) -> Iterator[Fleet]:
    with with_workers(lambda one: start_workers(one, model, *WORKERS)) as one:
        yield one


def start_workers(services: Fleet, model: Path, *names: str) -> None:
    for name in names:
        services.start("worker", name, "--model", str(model), "--threads", "1")


def known(services: Fleet) -> None:
    """The router sees workers later than the frontend does, now and then."""
    router = services.services["router"]
    eventually(lambda: router.metric("headrace_kv_sources") >= 3, limit_s=LIMIT_S, what="the router knows all workers")


@pytest.fixture
def client(services: Fleet) -> Iterator[OpenAI]:
    with OpenAI(base_url=url(services), api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        yield client


def url(services: Fleet) -> str:
    return f"{services.services['frontend'].url}/v1"


def asked(held: str, sampling: dict[str, Any] = GREEDY, *, n: int = 1) -> dict[str, Any]:
    return {
        "model": "held",
        "messages": [{"role": "user", "content": "The mill at the river turns"}],
        "max_tokens": TOKENS if n == 1 else TOKENS // 2,
        "stream": True,
        "n": n,
        "extra_body": {**HELD[held], **sampling},
    }


def text_of(chunk: Any) -> str:
    """All that a chunk adds to its choice, of content and of a call."""
    said = ""
    for choice in chunk.choices:
        said += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            said += (call.function.name or "") + (call.function.arguments or "")
    return said


def read(client: OpenAI, body: dict[str, Any], at: dict[int, Callable[[], None]]) -> list[str]:
    """Return the texts of a stream's choices; `at` maps a number of characters to what happens once they came."""
    texts, coming = [""] * body["n"], sorted(at)
    for chunk in client.chat.completions.create(**body):
        for choice in chunk.choices:
            texts[choice.index] += text_of(chunk)
        if coming and sum(map(len, texts)) >= coming[0]:
            at[coming.pop(0)]()
    assert not coming, "the stream was long enough for all that was to happen"
    return texts


def alive(services: Fleet) -> list[Service]:
    return [service for name in WORKERS if (service := services.services[name]).process.poll() is None]


def migrations(services: Fleet) -> float:
    return services.services["frontend"].metric("headrace_model_migration_total")


@pytest.mark.parametrize(
    ("held", "sampling", "n"),
    [
        ("schema", GREEDY, 1),
        ("regex", GREEDY, 1),
        ("grammar", SAMPLED, 1),
        ("call", GREEDY, 1),
        ("schema", GREEDY, 3),
        ("call", SAMPLED, 3),
    ],
    ids=["schema", "regex", "grammar, sampled", "call", "three schemas", "three calls, sampled"],
)
def test_two_workers_killed_within_one_answer_change_nothing_of_it(
    services: Fleet, client: OpenAI, model: Path, held: str, sampling: dict[str, Any], n: int
) -> None:
    body = asked(held, sampling, n=n)
    texts = read(client, body, {})
    for text in texts:
        assert re.match(BEGINS[held], text), text[:200]
    before = migrations(services)
    services.wait_idle(*WORKERS)
    killed: list[str] = []

    def kill() -> None:
        with services.busiest(*WORKERS) as worker:
            worker.kill()
        killed.append(worker.name)

    characters = sum(map(len, texts))
    assert read(client, body, {int(share * characters): kill for share in KILLED_AT}) == texts
    assert migrations(services) >= before + 2
    assert len(set(killed)) == 2
    start_workers(services, model, *killed)
    services.wait_ready(*killed)
    known(services)


async def test_clients_that_go_leave_no_block_held_whatever_their_answers_were_held_to(services: Fleet) -> None:
    """More grammars than an engine keeps; afterwards it answers as it did before."""
    others = [json.loads(json.dumps(LONG).replace("1000", str(1000 + more))) for more in range(KEPT + 8)]
    async with AsyncOpenAI(base_url=url(services), api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        first = await whole(client)

        async def go(body: dict[str, Any]) -> None:
            async with await client.chat.completions.create(**body) as stream:
                async for chunk in stream:
                    if text_of(chunk):
                        return

        for held in HELD:
            await asyncio.gather(*(go(asked(held)) for _ in range(4)))
        for schema in others:
            body = asked("schema")
            body["extra_body"] = {"structured_outputs": {"json": schema}}
            await go(body)
        await asyncio.to_thread(nothing_held, services)
        assert await whole(client) == first
    await asyncio.to_thread(nothing_held, services)


async def whole(client: AsyncOpenAI) -> str:
    body = {**asked("call"), "stream": False, "max_tokens": 50}
    answer = await client.chat.completions.create(**body)
    [call] = answer.choices[0].message.tool_calls or []
    return str(call.function.arguments)


def nothing_held(services: Fleet) -> None:
    def free() -> bool:
        return all(
            not worker.metric("headrace_blocks", state="held") and not worker.metric("headrace_inflight_requests")
            for worker in alive(services)
        )

    eventually(free, limit_s=LIMIT_S, what="no worker holds a block")
