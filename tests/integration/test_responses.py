"""/v1/responses over real servers and processes, read by the official client: two frontends that keep what they made,
a worker that is killed in the middle of an answer.

The engine is the echo: it says the prompt back. The template makes the prompt of all that was said.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall

from tests.integration.fleet import Fleet, fleet
from tests.integration.stack import eventually
from tests.tiny_model import write_tiny_model

LIMIT_S = 180.0
READ_BEFORE = 100
"""Events until a worker is killed; far more than that are to come."""
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{{ message.tool_calls }}. {% endfor %}{% if tools %}{% endif %}"
)
TEXT = "the mill at the river turns — Mühle 🚰 "
CALL = '<tool_call>\n{"name": "write", "arguments": {"text": "the mill"}}\n</tool_call>'
TOOLS: Any = [{"type": "function", "name": "write", "parameters": {"type": "object"}, "strict": False}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", context_length=65536)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory, nats_url: str, model: Path) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("responses")
    where = ("--namespace", "responses", "--discovery-backend", "file", "--discovery-path", str(folder / "where"))
    settings = folder / "frontend.toml"
    settings.write_text('[tool_parser]\ntiny = "hermes"\n')
    with fleet(folder, nats_url, *where) as one:
        one.start("router", "router")
        start_worker(one, "worker 1", model)
        for name in ("frontend 1", "frontend 2"):
            # A worker that replaces another may take long to start.
            one.start("frontend", name, "--config", str(settings), "--limits-rescue-s", "120")
        one.wait_ready()
        router = one.services["router"]  # it sees the worker later than the frontends do, now and then
        eventually(
            lambda: router.metric("headrace_kv_sources") == 1, limit_s=LIMIT_S, what="the router knows the worker"
        )
        yield one


def start_worker(services: Fleet, name: str, model: Path) -> None:
    services.start("worker", name, "--model", str(model), "--engine", "echo")


@pytest.fixture
def clients(services: Fleet) -> Iterator[list[openai.OpenAI]]:
    """Yield a client of each frontend."""
    made = [
        openai.OpenAI(base_url=f"{services.services[name].url}/v1", api_key="any", max_retries=0, timeout=LIMIT_S)
        for name in ("frontend 1", "frontend 2")
    ]
    yield made
    for client in made:
        client.close()


def test_a_conversation_goes_on_at_either_frontend_and_finds_its_blocks(clients: list[openai.OpenAI]) -> None:
    cached, previous, said = [], None, ""
    for turn in range(4):
        client = clients[turn % 2]
        answer = client.responses.create(
            model="tiny", input=f"{turn}: {TEXT * 4}", previous_response_id=previous, max_output_tokens=20
        )
        assert answer.status == "incomplete"
        assert answer.output_text.startswith("0: the mill"), "what was said first comes first"
        assert answer.usage is not None
        assert answer.usage.input_tokens > len(said)
        cached.append(answer.usage.input_tokens_details.cached_tokens)
        previous = answer.id
    assert cached[0] == 0
    assert cached == sorted(set(cached)), "each turn finds the blocks of all turns before it"
    assert previous is not None
    for client in clients:
        assert client.responses.retrieve(previous).id == previous
    clients[0].responses.delete(previous)
    for client in clients:
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(previous)


def test_the_official_client_reads_calls_streamed_and_not_and_answers_them(clients: list[openai.OpenAI]) -> None:
    asked: Any = {"model": "tiny", "input": CALL, "tools": TOOLS}
    answer = clients[0].responses.create(**asked)
    with clients[0].responses.stream(**asked) as stream:
        streamed = stream.get_final_response()
    for each in (answer, streamed):
        [call] = [item for item in each.output if isinstance(item, ResponseFunctionToolCall)]
        assert (call.name, call.arguments) == ("write", '{"text": "the mill"}')
        outputs: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "written"}]
        after = clients[1].responses.create(model="tiny", input=outputs, tools=TOOLS, previous_response_id=each.id)
        assert "written" in after.output_text


def test_a_worker_killed_in_the_middle_of_an_answer_changes_nothing_of_it(
    services: Fleet, clients: list[openai.OpenAI], model: Path
) -> None:
    text = TEXT * 800
    with clients[0].responses.stream(model="tiny", input=text) as stream:
        for number, event in enumerate(stream):
            assert event.sequence_number == number
            if number == READ_BEFORE:
                services.services["worker 1"].kill()
                start_worker(services, "worker 2", model)
        final = stream.get_final_response()
    assert final.output_text == f"{text}. "
    assert services.services["frontend 1"].metric("headrace_model_migration_total") >= 1
    assert clients[1].responses.retrieve(final.id).output_text == final.output_text


def test_what_a_frontend_kept_goes_with_it(services: Fleet, clients: list[openai.OpenAI]) -> None:
    kept = clients[0].responses.create(model="tiny", input="hello", max_output_tokens=1)
    services.services["frontend 1"].process.send_signal(signal.SIGKILL)
    services.services["frontend 1"].process.wait()

    def unknown() -> bool:
        try:
            clients[1].responses.retrieve(kept.id)
        except openai.NotFoundError:
            return True
        except openai.APIStatusError:
            return False  # NATS has not noticed yet
        return False

    eventually(unknown, limit_s=LIMIT_S, what="nobody keeps it")
