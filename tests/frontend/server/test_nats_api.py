from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from services.frontend.config import LimitsConfig
from services.frontend.protocol.ignored_fields import IGNORED_HEADER
from services.frontend.server.nats_api import ACTIVE_REFUSALS_LIMIT, PROBE_HEADER, WAITING_LIMIT
from shared import subjects
from shared.bus.contract import LAST_HEADER, Message
from shared.bus.memory_bus import MemoryBus
from shared.config import NatsConfig
from shared.discovery.memory import MemoryDiscovery
from shared.messages.generate import Cancel, Generate
from shared.messages.select import Finished
from tests.frontend.bad_bodies import BAD_BODIES, EMBEDDING_SIZE, STRICT
from tests.frontend.peers import DEADLINE_S, MODEL, NAMESPACE, ScriptedWorker, World, world

CHAT = subjects.client(NAMESPACE, "chat")


def body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **fields}).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "hello", **fields}).encode()


async def ask(w: World, operation: str, payload: bytes) -> tuple[Any, Mapping[str, str]]:
    bus = MemoryBus(w.broker, payload_limit_bytes=1 << 25)
    message = await bus.request(subjects.client(NAMESPACE, operation), payload, timeout_s=DEADLINE_S)
    return json.loads(message.payload), message.headers


async def test_a_chat_is_answered_whole_and_marked_last(directory: Path) -> None:
    async with world(directory) as w:
        w.say("grüße from the wheel")
        answer, headers = await ask(w, "chat", body())
        assert answer["choices"][0]["message"]["content"] == "grüße from the wheel"
        assert headers[LAST_HEADER] == "true"
        assert headers["Content-Type"] == "application/json"


async def test_a_stream_is_one_chunk_a_message_and_only_the_last_is_marked(directory: Path) -> None:
    async with world(directory) as w:
        w.say("grüße 🚰")
        w.workers[0].cached_tokens, w.workers[0].cached_disk_tokens = 8, 5
        for fields in ({}, {"stream_options": {"include_usage": True}}):
            bus = MemoryBus(w.broker)
            async with bus.stream(CHAT, body(stream=True, **fields), idle_timeout_s=DEADLINE_S) as messages:
                got = [message async for message in messages]
            chunks = [json.loads(message.payload) for message in got]
            assert [LAST_HEADER in message.headers for message in got] == [False] * (len(got) - 1) + [True]
            text = "".join(c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"])
            assert text == "grüße 🚰"
            usage = chunks[-1].get("usage")
            assert bool(usage) == bool(fields)
        by_tier = {"device": 3, "host": 0, "disk": 5}
        assert usage["prompt_tokens_details"] == {"cached_tokens": 8, "cached_tokens_by_tier": by_tier}


async def test_a_completion_and_the_models_are_served_too(directory: Path) -> None:
    async with world(directory) as w:
        w.say("turning")
        answer, _ = await ask(w, "completions", json.dumps({"model": MODEL, "prompt": "x"}).encode())
        assert answer["choices"][0]["text"] == "turning"
        models, headers = await ask(w, "models", b"")
        assert [model["id"] for model in models["data"]] == [MODEL]
        assert headers[LAST_HEADER] == "true"


async def test_every_bad_body_gets_its_error_object_and_nothing_else_notices(directory: Path) -> None:
    async with world(directory, embedding_size=EMBEDDING_SIZE, settings=STRICT) as w:
        for bad in BAD_BODIES:
            answer, headers = await ask(w, bad.operation, bad.body)
            error = answer["error"]
            assert (bad.name, error["param"], error["code"]) == (bad.name, bad.param, bad.code)
            assert (bad.name, headers["Headrace-Status"]) == (bad.name, str(bad.status))
            assert headers[LAST_HEADER] == "true"
        assert w.router.asked.all == []
        w.say("still here")
        answer, _ = await ask(w, "chat", body())
        assert answer["choices"][0]["message"]["content"] == "still here"


@pytest.mark.parametrize("more", [{}, {"stream": True}])
async def test_the_last_message_names_the_fields_without_effect(directory: Path, more: dict[str, Any]) -> None:
    async with world(directory) as w:
        w.say("fine")
        request = body(verbosity="low", frobnicate=1, **more)
        async with MemoryBus(w.broker).stream(CHAT, request, idle_timeout_s=DEADLINE_S) as messages:
            *_, last = [message async for message in messages]
        assert last.headers[IGNORED_HEADER] == "frobnicate, verbosity"


async def test_without_workers_the_error_says_when_to_come_back(directory: Path) -> None:
    async with world(directory, announced=False) as w:
        answer, headers = await ask(w, "chat", body())
        assert answer["error"]["code"] == "unavailable"
        assert (headers["Headrace-Status"], headers["Retry-After"]) == ("503", "1")


async def test_more_requests_than_the_bound_are_refused(directory: Path) -> None:
    async with world(directory, limits=LimitsConfig(requests=0, drain_s=0.0)) as w:
        _, headers = await ask(w, "chat", body())
        assert headers["Headrace-Status"] == "429"


async def test_a_request_without_a_reply_subject_is_counted_and_costs_nothing(directory: Path) -> None:
    async with world(directory) as w:
        await MemoryBus(w.broker).publish(CHAT, body())
        w.say("next")
        await ask(w, "chat", body())
        assert w.metric("headrace_unanswerable_requests_total") == 1
        assert len(w.router.asked.all) == 1


async def test_a_reply_subject_that_nats_would_not_accept_affects_no_other_request(directory: Path) -> None:
    async with world(directory) as w:
        w.say("next")
        client = MemoryBus(w.broker)
        unusable = ["foo..bar", "foo.*", ">", ".", "foo."]
        for reply in unusable:
            for operation in ("chat", "completions", "models"):
                subject = subjects.client(NAMESPACE, operation)
                w.broker.publish(Message(subject, body(), reply, {}), client)
                w.broker.publish(Message(subject, b"{", reply, {}), client)
        answer, _ = await ask(w, "chat", body())
        assert answer["choices"][0]["message"]["content"] == "next"
        assert w.metric("headrace_unanswerable_requests_total") == 6 * len(unusable)
        assert len(w.router.asked.all) == 1


async def test_requests_without_a_usable_reply_subject_are_one_line_in_the_log(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(directory) as w:
        client = MemoryBus(w.broker)
        for reply in ("", "headrace.test.worker.w1.cancel", "$JS.API.STREAM.DELETE.orders", "a..b") * 20:
            w.broker.publish(Message(CHAT, body(), reply, {}), client)
        await w.counted("headrace_unanswerable_requests_total", 80)
        assert caplog.text.count("its reply subject") == 1


async def test_an_inbox_of_the_services_is_no_reply_subject(directory: Path) -> None:
    async with world(directory, nats=NatsConfig(inbox="_INBOX_services")) as w:
        heard: list[str] = []

        async def hear(message: Message) -> None:
            heard.append(message.subject)

        await w.serving.subscribe("_INBOX_services.>", hear)
        w.broker.publish(Message(CHAT, b"{", "_INBOX_services.known", {}), MemoryBus(w.broker))
        answer, _ = await ask(w, "chat", b"{")
        assert "error" in answer
        assert (w.metric("headrace_unanswerable_requests_total"), heard) == (1, [])


async def test_requests_that_wait_to_be_read_are_bounded_and_those_beyond_get_429(directory: Path) -> None:
    over = 2 * ACTIVE_REFUSALS_LIMIT
    async with world(directory) as w:
        statuses: Counter[str] = Counter()
        client = MemoryBus(w.broker)

        async def hear(message: Message) -> None:
            statuses[message.headers["Headrace-Status"]] += 1

        await client.subscribe("_INBOX.mine", hear)
        for _ in range(WAITING_LIMIT + over):
            w.broker.publish(Message(CHAT, b"{", "_INBOX.mine", {}), client)
        answer, _ = await ask(w, "models", b"")
        assert answer["data"], "another operation has its own queue"
        async with asyncio.timeout(DEADLINE_S):
            while statuses.total() < WAITING_LIMIT + ACTIVE_REFUSALS_LIMIT:  # noqa: ASYNC110 - nothing is called for it
                await asyncio.sleep(0)
        assert statuses == {"400": WAITING_LIMIT, "429": ACTIVE_REFUSALS_LIMIT}
        assert w.metric("headrace_model_rejection_total", bound="nats_waiting") == over
        w.say("next")
        answer, _ = await ask(w, "chat", body())
        assert answer["choices"][0]["message"]["content"] == "next"


async def test_requests_whose_clients_cannot_be_probed_have_a_bound_of_their_own(
    directory: Path,
) -> None:
    async with world(directory, limits=LimitsConfig(drain_s=0.0, unasked=2)) as w:
        worker = w.workers[0]
        worker.output = None
        stranger = MemoryBus(w.broker)
        for number in range(10):
            w.broker.publish(Message(CHAT, body(), f"_INBOX.nobody.{number}", {}), stranger)
        await worker.generates.at_least(2)
        refused, headers = await ask(w, "chat", body(stream=None))
        assert (headers["Headrace-Status"], "Headrace-Probe" in refused["error"]["message"]) == ("429", True)
        assert len(worker.generates.all) == 2
        assert w.metric("headrace_model_rejection_total", bound="unasked") == 9
        asking = asyncio.create_task(MemoryBus(w.broker).request(CHAT, b"{", timeout_s=DEADLINE_S))
        assert (await asking).headers["Headrace-Status"] == "400"
        clients = [await vanishing(w, body(stream=True)), await vanishing(w, body(), {PROBE_HEADER: "1"})]
        [first, _, *others] = await worker.generates.at_least(4)
        for client in clients:
            client.disconnect()
        for generate in others:
            await worker.cancels.until(Cancel(generate.request, 1))
        await worker.send(first, 0, w.ids("done"), "length")
        await w.counted("headrace_inflight_requests", 1)
        w.say("next")
        answer, _ = await ask(w, "chat", body())
        assert answer["choices"][0]["message"]["content"] == "next"


async def test_a_client_that_vanishes_cancels_its_stream(directory: Path) -> None:
    async with world(directory) as w:
        worker = w.workers[0]
        worker.output = None
        w.broker.publish(Message(CHAT, body(stream=True), "_INBOX.nobody", {}), MemoryBus(w.broker))
        [generate] = await worker.generates.at_least(1)
        async with asyncio.timeout(DEADLINE_S):
            first = 0
            while not worker.cancels.all:
                await worker.send(generate, first, w.ids("a"))
                first += 1
                await asyncio.sleep(0)
        await w.router.told.until(Finished(generate.request, 1))
        assert w.metric("headrace_disconnected_clients_total") == 1


async def vanishing(w: World, payload: bytes, headers: Mapping[str, str] | None = None) -> MemoryBus:
    """A client that has sent a request and listens; `lose` ends it."""
    client = MemoryBus(w.broker)

    async def ignore(_: Message) -> None:
        return

    await client.subscribe("_INBOX.vanishing", ignore)
    w.broker.publish(Message(CHAT, payload, "_INBOX.vanishing", headers or {}), client)
    return client


@pytest.mark.parametrize(
    ("streams", "headers"), [(True, {}), (True, {PROBE_HEADER: "1"}), (False, {PROBE_HEADER: "1"})]
)
async def test_a_client_that_vanishes_before_the_first_token_cancels_too(
    directory: Path, streams: bool, headers: dict[str, str]
) -> None:
    async with world(directory) as w:
        worker = w.workers[0]
        worker.output = None
        client = await vanishing(w, body(stream=streams), headers)
        [generate] = await worker.generates.at_least(1)
        client.disconnect()
        await w.router.told.until(Finished(generate.request, 1))
        await worker.cancels.until(Cancel(generate.request, 1))
        await worker.send(generate, 0, [], "cancelled")
        await w.counted("headrace_cancellation_seconds_count", 1)
        assert w.metric("headrace_disconnected_clients_total") == 1
        assert w.metric("headrace_unnoticed_disconnect_seconds_count") == 1


async def test_a_client_that_vanishes_while_its_request_is_routed_leaves_no_state(directory: Path) -> None:
    async with world(directory) as w:
        w.router.answer = lambda _: None
        client = await vanishing(w, body(stream=True))
        [select] = await w.router.asked.at_least(1)
        client.disconnect()
        await w.router.told.until(Finished(select.request, 1))
        assert w.workers[0].generates.all == []


async def test_a_stream_that_waits_is_given_chunks_without_text_and_a_failure_still_tells_its_status(
    directory: Path,
) -> None:
    async with world(directory, limits=LimitsConfig(drain_s=0.0, attempts=1)) as w:
        w.router.workers = ["w1"]
        worker = w.workers[0]
        worker.output = None
        requests = (("chat", body(stream=True)), ("completions", completion(stream=True)))
        for number, (operation, payload) in enumerate(requests, 1):
            subject = subjects.client(NAMESPACE, operation)
            async with MemoryBus(w.broker).stream(subject, payload, idle_timeout_s=DEADLINE_S) as messages:
                chunks = [json.loads((await anext(messages)).payload) for _ in range(2)]
                *_, generate = await worker.generates.at_least(number)
                await worker.send(generate, 0, [], "error", "it broke")
                *_, last = [message async for message in messages]
            for chunk in chunks:
                [choice] = chunk["choices"]
                assert choice["delta"] == {"content": ""} if operation == "chat" else choice["text"] == ""
                assert choice["finish_reason"] is None
            assert last.headers["Headrace-Status"] == "503"
            assert "it broke" in json.loads(last.payload)["error"]["message"]


async def test_a_plain_request_gets_its_answer_as_the_first_message(directory: Path) -> None:
    async with world(directory) as w:
        worker = w.workers[0]
        worker.output = None
        asking = asyncio.create_task(ask(w, "chat", body()))
        [plain] = await worker.generates.at_least(1)
        waiting = await vanishing(w, body(stream=True))
        [_, other] = await worker.generates.at_least(2)
        waiting.disconnect()
        await w.router.told.until(Finished(other.request, 1))  # so long that one who may be asked has been
        await worker.send(plain, 0, w.ids("late"), "length")
        answer, headers = await asking
        assert answer["choices"][0]["message"]["content"] == "late"
        assert headers[LAST_HEADER] == "true"


async def test_a_frontend_that_shuts_down_finishes_what_runs_and_fails_the_rest(directory: Path) -> None:
    for finishes in (True, False):
        limits = LimitsConfig(drain_s=DEADLINE_S if finishes else 0.0)
        async with asyncio.TaskGroup() as tasks:
            async with world(directory, limits=limits) as w:
                worker = w.workers[0]
                worker.output = None
                asking = tasks.create_task(ask(w, "chat", body()))
                [generate] = await worker.generates.at_least(1)
                if finishes:
                    tasks.create_task(finish_once_draining(w, worker, generate))
            answer, headers = await asking
        assert headers[LAST_HEADER] == "true"
        assert w.metric("headrace_requests_total", status="200" if finishes else "503") == 1
        if finishes:
            assert answer["choices"][0]["message"]["content"] == "late"
        else:
            assert headers["Headrace-Status"] == "503"


async def finish_once_draining(w: World, worker: ScriptedWorker, generate: Generate) -> None:
    await w.until("/health", lambda health: not health["ready"])
    key = subjects.instance_key(NAMESPACE, "frontend", "f1")
    assert key in await MemoryDiscovery(w.store).list(key), "workers cancel what a frontend asked for that is gone"
    await worker.send(generate, 0, w.ids("late"), "length")


async def test_a_failure_during_an_outage_of_nats_is_sent_afterwards(directory: Path) -> None:
    async with world(directory, limits=LimitsConfig(drain_s=0.0, deadline_s=1.5)) as w:
        w.workers[0].output = None
        asking = asyncio.create_task(ask(w, "chat", body()))
        await w.workers[0].generates.at_least(1)
        w.broker.disconnect(w.bus)
        await w.counted("headrace_inflight_requests", 0)
        w.broker.reconnect(w.bus)
        answer, headers = await asking
        assert "deadline" in answer["error"]["message"]
        assert headers[LAST_HEADER] == "true"


async def test_a_failure_sent_on_a_dead_connection_is_sent_again_on_a_new_one(directory: Path) -> None:
    async with world(directory, limits=LimitsConfig(drain_s=0.0, deadline_s=1.5)) as w:
        w.workers[0].output = None
        asking = asyncio.create_task(ask(w, "chat", body()))
        await w.workers[0].generates.at_least(1)
        w.broker.hang(w.bus)
        await w.counted("headrace_inflight_requests", 0)
        w.broker.disconnect(w.bus)
        w.broker.reconnect(w.bus)
        answer, headers = await asking
        assert "deadline" in answer["error"]["message"]
        assert headers[LAST_HEADER] == "true"
