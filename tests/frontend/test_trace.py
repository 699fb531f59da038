"""The spans that a frontend makes of a traced request, and what it sends on; through a running frontend."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from shared import subjects
from shared.bus.contract import Message
from shared.bus.memory_bus import MemoryBus
from shared.config import TraceConfig
from shared.messages.generate import Refused
from shared.tracing.spans import SpanRecord
from shared.tracing.traceparent import carried
from tests.frontend.cards import Templated
from tests.frontend.peers import DEADLINE_S, MODEL, NAMESPACE, World, clients, world
from tests.frontend.test_tools import HELLO, TEMPLATE, TOOLS, TWO

ALL = TraceConfig(sample=1.0)
NONE = TraceConfig(sample=0.0)
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def named(w: World, name: str) -> list[SpanRecord]:
    return [span for span in w.spans if span.name == name]


def check_tree(w: World, request: SpanRecord) -> None:
    """All spans are of one trace and below the request's, each within its parent's time."""
    known = {span.span: span for span in w.spans}
    assert len(known) == len(w.spans)
    for span in w.spans:
        assert span.trace == request.trace
        assert span.start_ns <= span.end_ns
        if span is not request:
            parent = known[span.parent]
            assert parent.start_ns <= span.start_ns
            assert span.end_ns <= parent.end_ns


async def until(w: World, holds: Callable[[], object]) -> None:
    await w.until("/health", lambda _: bool(holds()))


async def test_each_tool_call_has_a_span(templated: Templated) -> None:
    async with world(templated(TEMPLATE), trace=ALL) as w, clients(w) as (client, _):
        w.say(TWO)
        await client.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS)
        [request] = named(w, f"chat {MODEL}")
        calls = named(w, "tool parsing")
        assert [call.parent for call in calls] == [request.span] * 2
        assert {call.attributes["headrace.outcome"] for call in calls} == {"complete"}
        assert request.attributes["gen_ai.response.finish_reasons"] == ("tool_calls",)
        check_tree(w, request)


async def test_the_choices_of_a_request_share_its_trace(directory: Path) -> None:
    async with world(directory, trace=ALL) as w, clients(w) as (client, _):
        said = w.say("two")
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO, n=3)
        assert answer.usage is not None
        [request] = named(w, f"chat {MODEL}")
        assert len({span.attributes["headrace.request"] for span in named(w, "attempt")}) == 3
        assert request.attributes["gen_ai.request.choice.count"] == 3
        assert request.attributes["gen_ai.usage.input_tokens"] == answer.usage.prompt_tokens
        assert request.attributes["gen_ai.usage.output_tokens"] == 3 * (len(said) + 1)
        check_tree(w, request)


async def test_a_refused_attempt_is_followed_by_a_migration(directory: Path) -> None:
    async with world(directory, trace=ALL) as w, clients(w) as (client, _):
        w.say("one")
        w.workers[0].answer = lambda one: Refused(one.request, one.attempt, "overloaded", "full")
        await client.chat.completions.create(model=MODEL, messages=HELLO)
        [request] = named(w, f"chat {MODEL}")
        first, second = named(w, "attempt")
        [migration] = named(w, "migration")
        assert (first.error, second.error) == ("the attempt was lost: refused", "")
        assert (first.attributes["headrace.instance"], second.attributes["headrace.instance"]) == ("w1", "w2")
        assert migration.attributes == {
            "headrace.request": first.attributes["headrace.request"],
            "headrace.loss": "refused",
            "headrace.lost_instance": "w1",
            "headrace.had_tokens": False,
            "headrace.attempt": 2,
            "headrace.instance": "w2",
        }
        assert [select.parent for select in named(w, "select")] == [first.span, second.span]
        check_tree(w, request)


async def test_a_client_that_leaves_ends_all_spans(directory: Path) -> None:
    async with world(directory, trace=ALL) as w, aiohttp.ClientSession(w.url) as http:
        w.workers[0].output = None
        body = {"model": MODEL, "messages": HELLO, "stream": True}
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=body))
        async with asyncio.timeout(DEADLINE_S):
            await w.workers[0].generates.at_least(1)
        asking.cancel()
        await until(w, lambda: named(w, f"chat {MODEL}"))
        [request], [attempt] = named(w, f"chat {MODEL}"), named(w, "attempt")
        assert request.attributes["http.response.status_code"] == 499
        assert attempt.error == "the client has left"
        check_tree(w, request)


@pytest.mark.parametrize(
    ("body", "name"),
    [({"model": "other", "messages": HELLO}, "chat other"), ({"messages": 7}, "chat"), ({"model": "x" * 9000}, "chat")],
)
async def test_a_request_that_is_refused_has_its_span_alone(directory: Path, body: Any, name: str) -> None:
    async with world(directory, trace=ALL) as w, aiohttp.ClientSession(w.url) as http:
        async with http.post("/v1/chat/completions", json=body) as answer:
            assert answer.status in (400, 404)
            [request] = w.spans
            assert answer.headers["traceparent"] == f"00-{request.trace}-{request.span}-01"
        assert request.name == name
        assert request.attributes["http.response.status_code"] == answer.status


async def test_only_a_traced_request_sends_a_header_to_services(directory: Path) -> None:
    async with world(directory, trace=NONE) as w, clients(w) as (client, _):
        w.say("one")
        seen: list[Message] = []

        async def see(message: Message) -> None:
            seen.append(message)

        listener = MemoryBus(w.broker)
        await listener.subscribe(subjects.select(NAMESPACE, MODEL), see)
        await listener.subscribe(subjects.worker(NAMESPACE, "w1", "generate"), see)
        await client.chat.completions.create(model=MODEL, messages=HELLO)
        assert [dict(message.headers) for message in seen] == [{}, {}]
        assert not w.spans
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
        await client.chat.completions.create(model=MODEL, messages=HELLO, extra_headers=headers)
        await until(w, lambda: len(seen) == 4)
        places = [carried(message.headers) for message in seen[2:]]
        [request] = named(w, f"chat {MODEL}")
        assert (request.trace, request.parent) == (TRACE, SPAN)
        assert [None if place is None else (place.trace, place.span) for place in places] == [
            (TRACE, named(w, "select")[0].span),
            (TRACE, named(w, "attempt")[0].span),
        ]


async def test_two_headers_are_malformed_even_if_they_agree(directory: Path) -> None:
    async with world(directory, trace=NONE) as w, aiohttp.ClientSession(w.url) as http:
        w.say("one")
        header = ("traceparent", f"00-{TRACE}-{SPAN}-01")
        body = {"model": MODEL, "messages": HELLO}
        async with http.post("/v1/chat/completions", json=body, headers=[header, header]) as answer:
            assert answer.status == 200
            assert "traceparent" not in answer.headers
        assert w.metric("headrace_malformed_traceparents_total") == 1
        assert not w.spans


async def test_embeddings_have_an_attempt_for_each_input(directory: Path) -> None:
    async with world(directory, trace=ALL, embedding_size=4) as w, clients(w) as (client, _):
        await client.embeddings.create(model=MODEL, input=["one", "two"])
        [request] = named(w, f"embeddings {MODEL}")
        assert len(named(w, "attempt")) == 2
        assert len(named(w, "tokenise")) == 1
        assert request.attributes["gen_ai.operation.name"] == "embeddings"
        check_tree(w, request)


async def test_an_error_of_the_fleet_marks_request_and_attempt(directory: Path) -> None:
    async with world(directory, trace=ALL) as w, clients(w) as (client, _):
        for worker in w.workers:
            worker.answer = lambda one: Refused(one.request, one.attempt, "overloaded", "full")
        with pytest.raises(openai.APIStatusError) as wrong:
            await client.chat.completions.create(model=MODEL, messages=HELLO)
        [request] = named(w, f"chat {MODEL}")
        status = wrong.value.status_code
        assert request.attributes["http.response.status_code"] == status
        assert all(attempt.error for attempt in named(w, "attempt"))
        check_tree(w, request)


async def test_a_header_larger_than_any_head_may_be_is_refused_before_it_is_read(directory: Path) -> None:
    async with world(directory, trace=ALL) as w, aiohttp.ClientSession(w.url) as http:
        body = {"model": MODEL, "messages": HELLO}
        async with http.post("/v1/chat/completions", json=body, headers={"traceparent": "0" * 10_000}) as answer:
            assert answer.status == 400
        assert not w.spans
