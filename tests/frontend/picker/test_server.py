"""The picker's port with a gateway of the tests' own; the router says what a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.frontend.config import FrontendConfig, HttpConfig, LimitsConfig, PickerConfig
from services.frontend.picker.exchange import BODY_LIMIT_BYTES
from services.frontend.picker.messages import (
    REASON,
)
from shared.errors import ConfigError
from shared.hashing import pack_hashes, sequence_hashes
from shared.messages.select import (
    Candidate,
    Finished,
    Overlap,
    Prefilled,
    Select,
    Selected,
    SelectRefused,
    SelectReply,
)
from tests.frontend.peers import BLOCK_SIZE, DEADLINE_S, MODEL, World, card_entry, instance_entry, world
from tests.frontend.picker.recorded_frames import END_STREAM, GOAWAY, HEADERS, frames_of, recorded
from tests.picker.gateway import Gateway, GatewayStream, connected, destination, refusal
from tests.servers import free_port

ONE, TWO = "127.0.0.1:8001", "127.0.0.1:8002"
ENDPOINTS = {"w1": ONE, "w2": TWO}
SERVED = f"org/{MODEL}"
"""The name that the servers have for the model."""
CHAT = {":path": "/v1/chat/completions", ":method": "POST", "x-request-id": "mine"}
STREAM = {":status": "200", "content-type": "text/event-stream"}
BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "once upon a time " * 20}]}).encode()


@asynccontextmanager
async def frontend(directory: Path, limits: LimitsConfig | None = None, **settings: Any) -> AsyncIterator[World]:
    """A frontend with a picker at `w.picker`, and workers that stand for servers."""
    config = FrontendConfig(picker=PickerConfig(port=free_port(), **settings))
    limits = limits or LimitsConfig(drain_s=0.0, deadline_s=60.0)
    async with asyncio.timeout(DEADLINE_S), world(directory, settings=config, limits=limits, announced=False) as w:
        await w.announce_router()
        for name, address in ENDPOINTS.items():
            card = card_entry(name, directory, address=address, alias=SERVED)
            await w.announce(name, instance_entry("worker", name) | card)
        await w.ready()
        w.picker = f"127.0.0.1:{config.picker.port}"
        yield w


@asynccontextmanager
async def picking(
    directory: Path, limits: LimitsConfig | None = None, **settings: Any
) -> AsyncIterator[tuple[World, Gateway]]:
    """Such a frontend, and a gateway's connection to it."""
    async with frontend(directory, limits, **settings) as w, connected(w.picker) as gateway:
        yield w, gateway


async def chosen(stream: GatewayStream, body: bytes = BODY, **more: Any) -> Any:
    """Ask, and return the picker's first reply."""
    await stream.headers(CHAT, **more)
    await stream.body(body)
    return await stream.read()


async def finished(w: World) -> list[Finished]:
    """Wait for the end of a reservation, and return all."""
    async with asyncio.timeout(DEADLINE_S):
        while not (found := [event for event in w.router.told.all if isinstance(event, Finished)]):
            await w.router.told.at_least(len(w.router.told.all) + 1)
    return found


def rows(*instances: str) -> Any:
    """Make a router answer with these candidates, best first."""

    def answer(select: Select) -> SelectReply:
        left = [each for each in instances if each not in select.excluded]
        found = tuple(Candidate(each, 0, Overlap(), 1.0, 0, 0, "") for each in left if select.explain)
        return Selected(select.request, select.attempt, left[0], 0, "r1", Overlap(), "best", found)

    return answer


async def test_a_request_is_asked_about_with_its_blocks_and_its_answer_is_an_address(directory: Path) -> None:
    async with picking(directory) as (w, gateway):
        stream = gateway.ask()
        reply = await chosen(stream)
        assert destination(reply) == (ONE, ONE)
        [select] = w.router.asked.all
        assert select.request.startswith("mine-")
        assert (select.model, select.attempt, select.whole, select.unreported) == (MODEL, 1, True, True)
        assert len(select.hashes) // 8 == select.prompt_tokens // BLOCK_SIZE > 1
        await stream.answer(STREAM, served=ONE)
        assert (await _next(stream)).HasField("response_headers")
        assert not w.router.told.all, "the text of a stream is not there with its headers"
        await stream.end()
        assert await finished(w) == [Finished(select.request, 1)]


async def test_the_name_that_servers_have_for_a_model_is_routed_by_its_blocks_too(directory: Path) -> None:
    async with picking(directory) as (w, gateway):
        for body in (BODY, BODY.replace(MODEL.encode(), SERVED.encode())):
            stream = gateway.ask()
            assert destination(await chosen(stream, body)) == (ONE, ONE)
            await stream.end()
        one, two = w.router.asked.all
        assert one.hashes == two.hashes != b""
        assert (one.model, two.model) == (MODEL, MODEL)


async def _next(stream: GatewayStream) -> Any:
    """Return the first reply that is none to a body of the request."""
    while (reply := await stream.read()) is not None and reply.HasField("request_body"):
        pass
    return reply


async def test_prompts_of_all_apis_have_the_blocks_that_a_request_to_the_frontend_has(directory: Path) -> None:
    text = "once upon a time " * 20
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}]},
        "/v1/completions": {"prompt": text},
        "/v1/responses": {"input": text},
        "/v1/messages": {"max_tokens": 5, "messages": [{"role": "user", "content": text}]},
    }
    async with picking(directory) as (w, gateway):
        for path, body in bodies.items():
            stream = gateway.ask()
            await stream.headers(CHAT | {":path": path + "?x=1"}, request_mode="BUFFERED")
            assert (await stream.read()).HasField("request_headers")
            await stream.body(json.dumps({"model": MODEL, **body}).encode())
            assert destination(await stream.read()) == (ONE, ONE)
            await stream.end()
        chat, completion, response, message = w.router.asked.all
        assert chat.hashes == response.hashes == message.hashes != completion.hashes
        tokens = w.ids(text)
        packed = b"".join(token.to_bytes(4, "little") for token in tokens)
        assert completion.hashes == pack_hashes(sequence_hashes(packed, BLOCK_SIZE))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", b"{"),
        ("/v1/chat/completions", b""),
        ("/v1/chat/completions", b'{"model":"\xff","messages":[]}'),
        (
            "/v1/chat/completions",
            json.dumps({"model": "other", "messages": [{"role": "user", "content": "x"}]}).encode(),
        ),
        ("/v1/embeddings", json.dumps({"model": MODEL, "input": "x"}).encode()),
        ("/v1/responses", json.dumps({"model": MODEL, "input": "x", "previous_response_id": "resp_1"}).encode()),
        ("/rerank", b"\x00" * 5_000_000),
    ],
)
async def test_what_is_not_read_here_goes_to_a_server_by_load_alone(directory: Path, path: str, body: bytes) -> None:
    async with picking(directory) as (w, gateway):
        stream = gateway.ask()
        await stream.headers(CHAT | {":path": path})
        await stream.body(body)
        assert destination(await stream.read()) == (ONE, ONE)
        [select] = w.router.asked.all
        assert (select.model, select.hashes, select.prompt_tokens) == (MODEL, b"", max(1, len(body) // 4))
        assert w.metric("headrace_picker_choice_seconds_count", by="load") == 1


async def test_a_request_without_a_body_is_chosen_for_by_its_headers(directory: Path) -> None:
    async with picking(directory) as (_, gateway):
        stream = gateway.ask()
        await stream.headers(CHAT | {":path": "/v1/models", ":method": "GET"}, ended=True, request_mode="BUFFERED")
        assert destination(await stream.read()) == (ONE, ONE)


async def test_neither_the_body_nor_the_tokens_of_an_open_answer_count_against_limits(directory: Path) -> None:
    limits = LimitsConfig(drain_s=0.0, body_bytes=len(BODY) + 1, tokens=1)
    async with picking(directory, limits) as (_, gateway):
        streams = [gateway.ask() for _ in range(3)]
        for stream in streams:
            assert destination(await chosen(stream)) == (ONE, ONE)
            await stream.answer(STREAM, served=ONE)
            assert (await _next(stream)).HasField("response_headers")
        for stream in streams:
            await stream.end()


async def test_a_subset_is_kept_to_and_without_an_endpoint_in_it_the_client_gets_503(directory: Path) -> None:
    async with picking(directory) as (w, gateway):
        assert destination(await chosen(gateway.ask(), subset=[TWO, "9.9.9.9:1"])) == (TWO, TWO)
        assert w.router.asked.all[-1].excluded == ("w1",)
        for subset in ([], ["9.9.9.9:1"]):
            stream = gateway.ask()
            status, headers = refusal(await chosen(stream, subset=subset))
            assert (status, headers["x-request-id"]) == (503, "mine")
            assert headers[REASON] == (
                f"no endpoint serves the model '{MODEL}' among the {len(subset)} that the gateway allows"
            )
            assert await stream.read() is None
        assert len(w.router.asked.all) == 1


async def test_as_many_endpoints_as_are_set_are_given_best_first(directory: Path) -> None:
    async with picking(directory, endpoints=2) as (w, gateway):
        w.router.answer = rows("w2", "w1")
        assert destination(await chosen(gateway.ask())) == (f"{TWO},{ONE}", f"{TWO},{ONE}")
        assert w.router.asked.all[-1].explain


async def test_a_worker_that_stands_for_no_server_is_never_chosen(directory: Path) -> None:
    async with picking(directory) as (w, gateway):
        w.router.workers.insert(0, "w0")
        await w.announce("w0", instance_entry("worker", "w0") | card_entry("w0", directory))
        await w.until("/health", lambda health: health["ready"])
        async with asyncio.timeout(DEADLINE_S):
            while True:
                assert destination(await chosen(gateway.ask())) == (ONE, ONE)
                if w.router.asked.all[-1].excluded == ("w0",):
                    break
        # A router may know a worker first.
        w.router.workers.insert(0, "w00")
        assert destination(await chosen(gateway.ask())) == (ONE, ONE)
        first, second = w.router.asked.all[-2:]
        assert (first.request, first.attempt, second.excluded) == (second.request, second.attempt - 1, ("w0", "w00"))
        await w.router.told.until(Finished(first.request, first.attempt))


async def test_a_refusal_of_routers_is_429_or_503_with_its_reason(directory: Path) -> None:
    async with picking(directory) as (w, gateway):
        for code, expected in (("overloaded", 429), ("all_excluded", 503), ("bad_request", 400)):
            w.router.answer = partial(_refused, code)
            status, headers = refusal(await chosen(gateway.ask()))
            assert (status, headers[REASON]) == (expected, f"it is {code}")
            assert headers.get("Retry-After") == (None if status == 400 else "7")


def _refused(code: Any, select: Select) -> SelectRefused:
    return SelectRefused(select.request, select.attempt, code, f"it is {code}", retry_after_s=7.0)


async def test_without_a_router_the_client_gets_503_and_the_picker_is_not_ready(directory: Path) -> None:
    async with picking(directory) as (w, gateway):
        await w.leave("r1")
        w.router.answer = lambda _: None
        w.router.instance = "gone"
        status, headers = refusal(await chosen(gateway.ask()))
        assert (status, headers[REASON]) == (503, "no router answered")
        assert [await gateway.health(name) for name in ("liveness", "readiness")] == [1, 2]


async def test_what_this_process_has_no_room_for_is_429_with_its_limit(directory: Path) -> None:
    async with picking(directory, LimitsConfig(requests=1, drain_s=0.0)) as (_, gateway):
        first = gateway.ask()
        await chosen(first)
        status, headers = refusal(await gateway.ask().read())  # it reads nothing before
        assert status == 429
        assert "requests" in headers[REASON]
        await first.end()
    async with picking(directory, streams=1) as (_, gateway):
        first = gateway.ask()
        await chosen(first)
        status, headers = refusal(await gateway.ask().read())
        assert (status, headers[REASON]) == (429, "picker.streams: 1 open, no more are taken")


async def test_a_body_beyond_10_mib_is_413_and_one_at_the_limit_is_passed_on(directory: Path) -> None:
    async with picking(directory) as (_, gateway):
        for mode in ("BUFFERED", "FULL_DUPLEX_STREAMED"):
            for more, expected in ((0, 0), (1, 413)):
                stream = gateway.ask()
                await stream.headers(CHAT, request_mode=mode)
                if mode == "BUFFERED":
                    await stream.read()
                await stream.body(bytes(BODY_LIMIT_BYTES + more))
                assert refusal(await stream.read())[0] == expected
                stream.call.cancel()


async def test_another_endpoint_than_the_first_moves_the_reservation(directory: Path) -> None:
    async with picking(directory) as (w, gateway):
        stream = gateway.ask()
        await chosen(stream)
        await stream.answer({":status": "200", "content-type": "application/json"}, served=TWO)
        first, second = await w.router.asked.at_least(2)
        assert (second.attempt, second.excluded, second.hashes) == (2, ("w1",), first.hashes)
        await w.router.told.until(Finished(first.request, 1))
        prefilled = [event for event in w.router.told.all if isinstance(event, Prefilled)]
        assert [(event.attempt, event.instance, event.cached_tokens) for event in prefilled][-1] == (2, "w2", -1)
        assert w.metric("headrace_picker_moves_total") == 1
        await stream.end()
        await w.router.told.until(Finished(first.request, 2))


async def test_an_endpoint_that_is_unknown_frees_the_reservation(directory: Path) -> None:
    async with picking(directory) as (w, gateway):
        stream = gateway.ask()
        await chosen(stream)
        await stream.answer(STREAM, served="9.9.9.9:1")
        [ended] = await finished(w)
        assert ended.attempt == 1
        await stream.end()
        assert len(w.router.asked.all) == 1


async def test_the_first_text_ends_the_load_of_the_prompt_shown_or_assumed(directory: Path) -> None:
    for unseen_s, mode in ((60.0, "FULL_DUPLEX_STREAMED"), (0.0, "NONE")):
        async with picking(directory, unseen_s=unseen_s) as (w, gateway):
            stream = gateway.ask()
            await chosen(stream, response_mode=mode)
            await stream.answer(STREAM, served=ONE)
            await _next(stream)
            if mode != "NONE":
                await stream.body(b"data: {}\n\n", ended=False, phase="response")
                assert (await stream.read()).response_body.response.body_mutation.streamed_response.body
            [told] = await w.router.told.at_least(1)
            assert isinstance(told, Prefilled)
            await stream.end()


async def test_a_gateway_that_ends_its_stream_with_the_answers_headers_has_its_load_kept_a_little(
    directory: Path,
) -> None:
    for unseen_s in (60.0, 0.1):
        async with picking(directory, unseen_s=unseen_s) as (w, gateway):
            stream = gateway.ask()
            await chosen(stream)
            await stream.answer(STREAM, served=ONE)
            await stream.end()
            await w.counted("headrace_picker_streams", 0)
            if unseen_s < 1:
                assert await finished(w)
            else:
                assert w.router.told.all == []


@pytest.mark.parametrize("phase", ["headers", "body", "choosing", "sent", "answering"])
async def test_a_gateway_that_is_gone_frees_everything_whenever_it_goes(directory: Path, phase: str) -> None:
    async with picking(directory) as (w, gateway):
        if phase == "choosing":
            w.router.answer = lambda _: None
        stream = gateway.ask()
        if phase != "headers":
            await stream.headers(CHAT)
        if phase not in ("headers", "body"):
            await stream.body(BODY)
            await w.router.asked.at_least(1)
        if phase in ("sent", "answering"):
            await stream.read()
        if phase == "answering":
            await stream.answer(STREAM, served=ONE)
            await _next(stream)
        await w.counted("headrace_picker_streams", 1)
        stream.call.cancel()
        await w.counted("headrace_picker_streams", 0)
        await w.counted("headrace_inflight_requests", 0)
        if phase not in ("headers", "body"):
            [select, *_] = w.router.asked.all
            await w.router.told.until(Finished(select.request, 1))


async def test_a_gateway_that_never_says_the_end_frees_its_reservation_at_the_deadline(directory: Path) -> None:
    async with picking(directory) as (w, gateway):
        stream = gateway.ask()
        await stream.headers(CHAT | {"headrace-deadline-s": "0.5"})
        await stream.body(BODY)
        await stream.read()
        [ended] = await finished(w)
        assert ended.attempt == 1
        assert await _next(stream) is None
        assert (await stream.status())[0] == "OK"


async def test_a_gateway_that_sends_no_whole_body_is_ended_with_408(directory: Path) -> None:
    async with picking(directory, body_s=0.2) as (_, gateway):
        stream = gateway.ask()
        await stream.headers(CHAT)
        await stream.body(b"{", ended=False)
        assert refusal(await stream.read())[0] == 408
        assert await stream.read() is None


async def test_a_message_out_of_order_or_unreadable_ends_the_stream_with_a_line(directory: Path) -> None:
    async with picking(directory) as (w, gateway):
        stream = gateway.ask()
        await stream.body(b"{}")
        assert await stream.read() is None
        assert await stream.status() == (
            "INVALID_ARGUMENT",
            "the gateway sent request body out of order, in the state headers",
        )
        stream = gateway.ask()
        await stream.call.write(type("Bytes", (), {"SerializeToString": lambda _: b"\xff"})())
        code, details = await stream.status()
        assert (code, details[:9]) == ("INVALID_ARGUMENT", "ext_proc:")
        assert w.metric("headrace_picker_faults_total") == 2


async def test_a_picker_without_endpoints_is_alive_and_not_ready(directory: Path) -> None:
    config = FrontendConfig(picker=PickerConfig(port=free_port()))
    address = f"127.0.0.1:{config.picker.port}"
    async with asyncio.timeout(DEADLINE_S), world(directory, settings=config), connected(address) as gateway:
        assert [await gateway.health(name) for name in ("liveness", "readiness")] == [1, 2]
        assert refusal(await chosen(gateway.ask()))[0] == 503


async def test_a_frontend_that_drains_ends_the_streams_that_need_it_no_more(directory: Path) -> None:
    async with AsyncExitStack() as serving:
        w = await serving.enter_async_context(frontend(directory, LimitsConfig(drain_s=DEADLINE_S)))
        async with connected(w.picker) as gateway:
            answering, sent = gateway.ask(), gateway.ask()
            for stream in (answering, sent):
                await chosen(stream)
            await answering.answer(STREAM, served=ONE)
            assert (await _next(answering)).HasField("response_headers")
            drained = asyncio.create_task(serving.aclose())
            for stream in (answering, sent):
                assert await _next(stream) is None
                assert (await stream.status())[0] == "OK"
            await drained


@asynccontextmanager
async def draining(directory: Path, drain_s: float = DEADLINE_S) -> AsyncIterator[tuple[World, AsyncExitStack]]:
    """A frontend with a picker, which begins to drain when the stack is closed."""
    async with AsyncExitStack() as serving:
        yield await serving.enter_async_context(frontend(directory, LimitsConfig(drain_s=drain_s))), serving


async def _health_is(gateway: Gateway, status: int) -> None:
    while await gateway.health("readiness") != status:  # noqa: ASYNC110 - it is the picker's own
        await asyncio.sleep(0.01)


async def test_the_ends_of_all_streams_are_sent_before_gateways_learn_that_the_picker_goes(directory: Path) -> None:
    async with draining(directory) as (w, serving), recorded(w.picker) as (address, sent):
        async with connected(address) as gateway:
            streams = [gateway.ask() for _ in range(32)]
            await asyncio.gather(*map(chosen, streams))
            drained = asyncio.create_task(serving.aclose())
            assert {await stream.read_end() for stream in streams} == {"OK"}
            await drained
        found = frames_of(bytes(sent))
        ends = [at for at, (kind, flags) in enumerate(found) if kind == HEADERS and flags & END_STREAM]
        assert len(ends) >= len(streams)
        assert max(ends) < [kind for kind, _ in found].index(GOAWAY)


async def test_a_picker_that_drains_chooses_for_each_stream_that_comes_while_one_has_no_choice(directory: Path) -> None:
    async with draining(directory) as (w, serving), connected(w.picker) as gateway:
        first = gateway.ask()
        await first.headers(CHAT, request_mode="BUFFERED")
        assert (await first.read()).HasField("request_headers")
        drained = asyncio.create_task(serving.aclose())
        await _health_is(gateway, 2)
        for _ in range(3):
            later = gateway.ask()
            assert destination(await chosen(later)) == (ONE, ONE)
            assert await later.read_end() == "OK"
        await first.body(BODY)
        assert destination(await first.read()) == (ONE, ONE)
        assert await first.read_end() == "OK"
        await drained


async def test_an_answer_that_passes_through_a_picker_that_drains_ends_by_its_gateway(directory: Path) -> None:
    async with draining(directory) as (w, serving), connected(w.picker) as gateway:
        stream = gateway.ask()
        await chosen(stream, response_mode="FULL_DUPLEX_STREAMED")
        drained = asyncio.create_task(serving.aclose())
        await stream.answer(STREAM, served=ONE)
        assert (await _next(stream)).HasField("response_headers")
        await stream.body(b"data: [DONE]", phase="response")
        assert (await stream.read()).response_body.response.body_mutation.streamed_response.end_of_stream
        await stream.end()
        await drained


async def test_a_stream_whose_gateway_never_asks_ends_with_the_drain(directory: Path) -> None:
    async with draining(directory, drain_s=0.2) as (w, serving), connected(w.picker) as gateway:
        stream = gateway.ask()
        await stream.headers(CHAT, request_mode="BUFFERED")
        assert (await stream.read()).HasField("request_headers")
        await serving.aclose()
        assert await stream.read_end() != "OK"


async def test_a_port_that_is_taken_is_one_line(directory: Path) -> None:
    async with picking(directory) as (w, _):
        taken = FrontendConfig(picker=PickerConfig(port=int(w.url.rpartition(":")[2])), http=HttpConfig())
        with pytest.raises(ConfigError, match=r"picker.port: Failed to bind to address 127.0.0.1:\d+$"):
            async with world(directory, settings=taken):
                pass
