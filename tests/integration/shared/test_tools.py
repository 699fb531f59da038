"""Calls of tools over real servers and processes, read by the official client; a worker is killed in the middle of one.

The engine is the echo: it says the prompt back, and the template makes the prompt of the last message alone. So a
message is what the model says.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.fleet import Fleet
from tests.integration.shared.conftest import WithWorkers
from tests.integration.stack import eventually
from tests.process_tree import children
from tests.tiny_model import write_tiny_model

LIMIT_S = 180.0
WORKERS = ("worker 1", "worker 2")
READ_BEFORE = 30
"""Chunks until a worker is killed; far more than that are to come."""
ACCEPTED = "headrace_prompt_tokens_total"
TEMPLATE = "{{ messages[-1].content }}{{ messages[-1].tool_calls }}{% if tools %}{% endif %}"
TOOLS: Any = [
    {"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "get_time"}},
]
TEXT = "the mill at the river turns — Mühle 🚰 "
LONG = {"path": "river.txt", "text": TEXT * 800}
"""Half a second of tokens and more."""


def said(*calls: tuple[str, dict[str, Any]]) -> str:
    bodies = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls]
    return "I write.\n" + "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_tiny_model(tmp_path_factory.mktemp("model") / "tools", context_length=65536)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def services(model: Path, with_workers: WithWorkers) -> Iterator[Fleet]:
    def start(services: Fleet) -> None:
        for name in WORKERS:
            # A stopped engine must outlive the search for the worker that has the request.
            services.start("worker", name, "--model", str(model), "--engine", "echo", "--stall-s", "3600")

    with with_workers(start) as one:
        yield one


@pytest.fixture
def client(services: Fleet) -> Iterator[openai.OpenAI]:
    url = f"{services.services['frontend'].url}/v1"
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        yield client


def streamed(client: openai.OpenAI, text: str) -> Any:
    """The message that the client makes of a stream."""
    messages: Any = [{"role": "user", "content": text}]
    with client.chat.completions.stream(model="tools", messages=messages, tools=TOOLS) as stream:
        return message_of(stream)


def message_of(stream: Any) -> Any:
    [choice] = stream.get_final_completion().choices
    assert choice.finish_reason == "tool_calls"
    return choice.message


def called(message: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]


def test_the_official_client_reads_calls_streamed_and_not(client: openai.OpenAI) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [("write", {"text": TEXT}), ("get_time", {})]
    messages: Any = [{"role": "user", "content": said(*calls)}]
    answer = client.chat.completions.create(model="tools", messages=messages, tools=TOOLS)
    for message in (answer.choices[0].message, streamed(client, said(*calls))):
        assert called(message) == calls
        assert message.content == "I write.\n"


def test_a_worker_killed_in_the_middle_of_a_call_changes_nothing_of_it(services: Fleet, client: openai.OpenAI) -> None:
    workers = [services.services[name] for name in WORKERS]
    before = {worker.name: worker.metric(ACCEPTED) for worker in workers}
    engines = [engine for worker in workers for engine in children(worker.process.pid)]
    for engine in engines:  # until it is known whose the answer is; on a slow machine it would be over by then
        os.kill(engine, signal.SIGSTOP)
    messages: Any = [{"role": "user", "content": said(("write", LONG))}]
    with client.chat.completions.stream(model="tools", messages=messages, tools=TOOLS) as stream:
        [busy] = eventually(
            lambda: [worker for worker in workers if worker.metric(ACCEPTED) > before[worker.name]],
            limit_s=LIMIT_S,
            what="a worker has accepted the request",
        )
        for engine in engines:
            os.kill(engine, signal.SIGCONT)
        for number, _ in enumerate(stream):
            if number == READ_BEFORE:
                busy.kill()
        assert called(message_of(stream)) == [("write", LONG)]
    assert services.services["frontend"].metric("headrace_model_migration_total") >= 1
