"""What a gateway needs of a picker, as cases: with a real Envoy, and with a gateway of our own where that would not say
it. Each raises AssertionError, or NotRun with what it lacks."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import grpc.aio
from msgspec import Struct

from services.frontend.picker.exchange import BODY_LIMIT_BYTES
from services.frontend.picker.messages import (
    DESTINATION,
)
from tests.picker.gateway import Gateway, GatewayStream, connected, destination, refusal
from tests.picker.servers import PAUSE, PIECES, ServerRequest, SimulatedServer

LIMIT_S = 300.0
"""Seconds of each case; none comes near it unless it hangs."""
STREAMS = 128
PATH = "/v1/chat/completions"
JSON = {PIECES: "0"}
EVENTS = {PIECES: "3"}


class NotRun(Exception):
    """A case cannot be run with this picker; the message says what it lacks."""


class PickerControl(Struct, frozen=True):
    """How a picker's process is ended and started again."""

    kill: Callable[[], Awaitable[None]]
    """At once, and it stays away."""
    start: Callable[[], Awaitable[None]]
    """Until it is ready."""
    restart: Callable[[], Awaitable[None]]
    """As an operator does, with time to drain, until it is ready."""


class Rig(Struct):
    """Everything a case reaches for."""

    picker: str
    """HOST:PORT."""
    servers: list[SimulatedServer]
    envoy: Mapping[str, str]
    """The base URL of each of Envoy's ports."""
    http: aiohttp.ClientSession
    model: str
    control: PickerControl | None = None

    def body(self, text: str = "once upon a time", size_bytes: int = 0) -> bytes:
        """Return the body of a chat, of exactly this size if one is given."""
        asked = {"model": self.model, "max_tokens": 2, "messages": [{"role": "user", "content": text}]}
        body = json.dumps(asked).encode()
        if not size_bytes:
            return body
        missing = size_bytes - len(body)
        return self.body(text + " word" * (missing // 5) + "x" * (missing % 5))

    async def post(self, port: str, body: bytes, headers: Mapping[str, str] = JSON) -> tuple[int, str, dict[str, str]]:
        """Ask through one of Envoy's ports; return the status, the answer and its headers."""
        sent = {"Content-Type": "application/json", **headers}
        async with self.http.post(self.envoy[port] + PATH, data=BytesIO(body), headers=sent) as answer:
            got = {name.lower(): value for name, value in answer.headers.items()}
            return answer.status, (await answer.read()).decode(), got

    async def served(self, port: str, body: bytes | None = None, headers: Mapping[str, str] = JSON) -> str:
        """Ask, and return which server answered."""
        status, text, _ = await self.post(port, self.body() if body is None else body, headers)
        assert status == 200, f"{port}: {status} {text[:300]}"
        first = text.removeprefix("data: ").partition("\n")[0]
        return str(json.loads(first)["server"])

    @property
    def addresses(self) -> list[str]:
        return [server.address for server in self.servers]

    @property
    def requests(self) -> list[ServerRequest]:
        """All requests that servers got."""
        return [request for server in self.servers for request in server.requests]

    @contextmanager
    def held(self) -> Iterator[Callable[[], None]]:
        """Have answers of events wait after their first event, until the end or until what this yields is called."""

        def let_go() -> None:
            for server in self.servers:
                server.goes_on.set()

        for server in self.servers:
            server.goes_on.clear()
        try:
            yield let_go
        finally:
            let_go()

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[tuple[Gateway, GatewayStream]]:
        """A gateway of our own, with a stream for one request."""
        async with connected(self.picker) as gateway:
            yield gateway, gateway.ask()

    async def choose(self, stream: GatewayStream, body: bytes | None = None, **more: Any) -> Any:
        """Ask on a stream, and return the reply that has the destination or a refusal."""
        headers = {":method": "POST", ":path": PATH, ":authority": "x", "content-type": "application/json"}
        await stream.headers(headers, **more)
        reply = await stream.read() if more.get("request_mode") == "BUFFERED" else None
        if reply is None or not (refusal(reply)[0] or destination(reply)[0]):
            await stream.body(self.body() if body is None else body)
            reply = await stream.read()
        assert reply is not None, f"the picker ended the stream: {await stream.status()}"
        return reply


Case = Callable[[Rig], Awaitable[None]]
CASES: dict[str, Case] = {}
"""The cases by what they hold a picker to, in the order in which they run."""


def case(what: str) -> Callable[[Case], Case]:
    def added(run: Case) -> Case:
        CASES[what] = run
        return run

    return added


async def until(holds: Callable[[], bool], what: str) -> None:
    """Wait until something holds that no event tells of."""
    try:
        async with asyncio.timeout(LIMIT_S / 4):
            while not holds():  # noqa: ASYNC110 - it is in other processes, or in servers' handlers
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"not in {LIMIT_S / 4:g} s: {what}") from None


@case("health: `liveness`, `readiness`, the service's own name and an empty one are SERVING")
async def health(rig: Rig) -> None:
    async with connected(rig.picker) as gateway:
        for name in ("liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor", ""):
            assert await gateway.health(name) == 1, f"{name!r} is not SERVING"


@case("modes: BUFFERED, FULL_DUPLEX_STREAMED and response NONE: JSON and events come whole, the first before the last")
async def modes(rig: Rig) -> None:
    for port in ("duplex", "none", "buffered"):
        assert await rig.served(port) in rig.addresses
        sent = {PIECES: "3", "Content-Type": "application/json"}
        with rig.held() as let_go:
            try:
                async with asyncio.timeout(LIMIT_S / 4):
                    answer = await rig.http.post(rig.envoy[port] + PATH, data=rig.body(), headers=sent)
                    assert answer.status == 200, port
                    text = await answer.content.readuntil(b"\n\n")
            except TimeoutError:
                raise AssertionError(f"{port}: the first event does not come before the last") from None
            async with answer:
                let_go()
                text += await answer.read()
        assert text.count(b"data: ") == 4, f"{port}: {text!r}"
        assert text.endswith(b"data: [DONE]\n\n"), port


@case("places: the header and the metadata have the same endpoints, and only known ones")
async def places(rig: Rig) -> None:
    for mode in ("FULL_DUPLEX_STREAMED", "BUFFERED"):
        async with rig.asking() as (_, stream):
            header, metadata = destination(await rig.choose(stream, request_mode=mode))
            assert header == metadata != "", f"{mode}: header {header!r}, metadata {metadata!r}"
            unknown = set(header.split(",")).difference(rig.addresses)
            assert not unknown, f"{mode}: unknown endpoints {unknown}"
            await stream.end()


@case("original: a cluster of the type ORIGINAL_DST goes to the one endpoint of the answer")
async def original(rig: Rig) -> None:
    assert await rig.served("original") == rig.addresses[0]


@case("client's header: a destination that the client names itself is replaced")
async def clients_header(rig: Rig) -> None:
    for port in ("duplex", "none", "buffered"):
        assert await rig.served(port, headers=JSON | {DESTINATION: "192.0.2.1:80"}) in rig.addresses


@case("subset: only endpoints of the subset are given, through Envoy and directly, as a list or as one text")
async def subset(rig: Rig) -> None:
    for _ in range(5):
        assert await rig.served("subset") == rig.addresses[1]
    for given in ([rig.addresses[1]], rig.addresses[:2]):
        async with rig.asking() as (_, stream):
            header, _ = destination(await rig.choose(stream, subset=given))
            assert header, "no destination"
            assert set(header.split(",")) <= set(given), f"{header} for the subset {given}"
            await stream.end()


@case("empty subset: an empty one, and one without a known endpoint, are 503 and reach no server")
async def empty_subset(rig: Rig) -> None:
    before = len(rig.requests)
    for port in ("empty", "strange"):
        status, text, _ = await rig.post(port, rig.body())
        assert status == 503, f"{port}: {status} {text[:300]}"
    assert len(rig.requests) == before


@case("bodies: 0 bytes, 1, 4 MiB and 10 MiB reach a server as they were sent, in each mode")
async def bodies(rig: Rig) -> None:
    for body in (b"", b"x", rig.body(size_bytes=4 << 20), rig.body(size_bytes=BODY_LIMIT_BYTES)):
        for port in ("duplex", "none", "buffered"):
            before = {id(request) for request in rig.requests}
            assert await rig.served(port, body) in rig.addresses
            [got] = [request for request in rig.requests if id(request) not in before]
            assert (got.size_bytes, got.digest) == (len(body), hashlib.sha256(body).hexdigest()), f"{port}: {len(body)}"


@case("too large: a body beyond 10 MiB is 413 or passed on whole, and the next request is served")
async def too_large(rig: Rig) -> None:
    body = bytes(BODY_LIMIT_BYTES + 1)
    for port in ("duplex", "none", "buffered"):
        status, text, _ = await rig.post(port, body)
        assert status in (200, 413), f"{port}: {status} {text[:300]}"
        assert await rig.served(port) in rig.addresses


@case("order: where the first endpoint is dead, the next of the answer is tried")
async def order(rig: Rig) -> None:
    body = rig.body("the same prompt each time, so that one server is the best for it " * 4)
    first = await rig.served("none", body)
    async with rig.asking() as (_, stream):
        header, _ = destination(await rig.choose(stream, body))
        await stream.end()
    if "," not in header:
        raise NotRun(f"it gives one endpoint only: {header}")
    assert first in rig.addresses
    dead = next(server for server in rig.servers if server.address == header.split(",")[0])
    await dead.stop()
    try:
        served = await rig.served("none", body)
        assert served != dead.address
    finally:
        await dead.start()


@case("served: an answer by another endpoint than the first is taken, and goes on")
async def served_elsewhere(rig: Rig) -> None:
    async with rig.asking() as (_, stream):
        header, _ = destination(await rig.choose(stream))
        other = next(address for address in rig.addresses if address != header.split(",")[0])
        await stream.answer({":status": "200", "content-type": "application/json"}, served=other)
        reply = await stream.read()
        while reply is not None and not reply.HasField("response_headers"):
            reply = await stream.read()
        assert reply is not None, f"the picker ended the stream: {await stream.status()}"
        await stream.end()


@case("client gone: while it sends, waits or reads; servers are let go, and the next request is served")
async def client_gone(rig: Rig) -> None:
    slow = {PIECES: "600", PAUSE: "0.1"}
    for port in ("duplex", "none", "buffered"):
        for phase in ("sending", "waiting", "reading"):
            await _leave(rig, port, phase, slow if phase == "reading" else {PIECES: "0", PAUSE: "60"})
            await until(lambda: not any(server.running for server in rig.servers), "servers are let go")
            assert await rig.served(port) in rig.addresses, f"{port}, after a client that left while {phase}"


async def _leave(rig: Rig, port: str, phase: str, headers: Mapping[str, str]) -> None:
    """Send a request by hand and close the connection in a phase."""
    url, body, before = urlsplit(rig.envoy[port]), rig.body(), len(rig.requests)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    lines = [f"POST {PATH} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    writer.write("\r\n".join([*lines, "", ""]).encode() + body[: len(body) // 2 if phase == "sending" else len(body)])
    await writer.drain()
    if phase == "sending":
        await asyncio.sleep(0.2)  # the gateway has opened its stream
    elif phase == "waiting":
        await until(lambda: len(rig.requests) > before, "a server has the request")
    else:
        assert b"data: " in await reader.readuntil(b"data: ")
    writer.transport.abort()


@case("out of order: a message that makes no sense ends its stream, and harms no other")
async def out_of_order(rig: Rig) -> None:
    async with rig.asking() as (gateway, stream):
        await stream.body(b"x", phase="response")
        async with asyncio.timeout(20):
            while await stream.read() is not None:
                pass
        other = gateway.ask()
        assert destination(await rig.choose(other))[0]
        await other.end()


@case("killed, fail-closed: without the picker the client gets a 5xx soon, and no server is asked")
async def killed_closed(rig: Rig) -> None:
    control, before = _controlled(rig), len(rig.requests)
    await control.kill()
    try:
        async with asyncio.timeout(30):
            status, _, _ = await rig.post("none", rig.body())
        assert status in (500, 502, 503, 504), status
        assert len(rig.requests) == before
    finally:
        await control.start()
    await _until_served(rig, "none")


@case("killed, fail-open: without the picker requests are served all the same")
async def killed_open(rig: Rig) -> None:
    control = _controlled(rig)
    await control.kill()
    try:
        for more in ({}, {DESTINATION: "192.0.2.1:80"}):  # a client's own destination counts for nothing
            assert await rig.served("open", headers=JSON | more) in rig.addresses
    finally:
        await control.start()
    await _until_served(rig, "open")


@case(f"restart: {STREAMS} streams run through a restart of the picker, none is lost, and new requests are served")
async def restarted(rig: Rig) -> None:
    control = _controlled(rig)
    sent = {PIECES: "100", PAUSE: "0.1"}
    with rig.held():
        streams = [asyncio.create_task(rig.post("none", rig.body(), sent)) for _ in range(STREAMS)]
        await until(lambda: sum(server.running for server in rig.servers) == STREAMS, "all streams run")
    await control.restart()
    ended = await asyncio.gather(*streams, return_exceptions=True)
    lost = [one for one in ended if isinstance(one, BaseException) or not one[1].endswith("data: [DONE]\n\n")]
    assert not lost, f"{len(lost)} of {STREAMS} streams were lost: {str(lost[0])[:300]}"
    await _until_served(rig, "none")


def _controlled(rig: Rig) -> PickerControl:
    if rig.control is None:
        raise NotRun("it needs --kill and --start, the commands that end and start the picker")
    return rig.control


async def _until_served(rig: Rig, port: str) -> None:
    """Wait until the gateway has found the picker again."""
    statuses = [0]
    async with asyncio.timeout(LIMIT_S / 4):
        while statuses[-1] != 200:
            statuses.append((await rig.post(port, rig.body()))[0])
            await asyncio.sleep(0.2)


async def run_cases(rig: Rig, wanted: Sequence[str] = ()) -> dict[str, str]:
    """Run the cases whose names begin with one of `wanted`, or all. Return what is wrong by case, in order: empty if
    nothing is, and in brackets why it was not run."""
    outcomes: dict[str, str] = {}
    for what, run in CASES.items():
        if wanted and not what.startswith(tuple(wanted)):
            continue
        try:
            async with asyncio.timeout(LIMIT_S):
                await run(rig)
            outcomes[what] = ""
        except NotRun as why:
            outcomes[what] = f"(not run: {why})"
        except AssertionError as wrong:
            outcomes[what] = str(wrong) or "it does not hold"
        except (TimeoutError, aiohttp.ClientError, grpc.aio.AioRpcError, OSError) as wrong:
            outcomes[what] = f"{type(wrong).__name__} {wrong}"
    return outcomes
