"""A gateway's side of ext_proc and of gRPC's health protocol, for tests that say what a real gateway would not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from services.frontend.picker.messages import (
    DESTINATION,
    SERVED,
)
from services.frontend.picker.wire import MESSAGES, METHOD, NAMESPACE, SUBSET, SUBSET_NAMESPACE

MODES = {"NONE": 0, "STREAMED": 1, "BUFFERED": 2, "FULL_DUPLEX_STREAMED": 4}
LIMIT_BYTES = 64 << 20


class Gateway:
    """A connection to a picker."""

    def __init__(self, channel: Any) -> None:
        self._process = channel.stream_stream(
            METHOD,
            request_serializer=MESSAGES["ProcessingRequest"].SerializeToString,
            response_deserializer=MESSAGES["ProcessingResponse"].FromString,
        )
        codec = {
            "request_serializer": MESSAGES["HealthCheckRequest"].SerializeToString,
            "response_deserializer": MESSAGES["HealthCheckResponse"].FromString,
        }
        self._check = channel.unary_unary("/grpc.health.v1.Health/Check", **codec)
        self._watch = channel.unary_stream("/grpc.health.v1.Health/Watch", **codec)

    def ask(self) -> GatewayStream:
        """Open a stream, as for one request of a client."""
        return GatewayStream(self._process())

    async def health(self, service: str) -> int:
        """Return the status of a service: 1 is serving, 2 is not. Raise grpc.RpcError for one that is unknown."""
        answer = await self._check(MESSAGES["HealthCheckRequest"](service=service))
        return int(answer.status)

    def watch(self, service: str) -> HealthWatch:
        """Watch the status of a service."""
        return HealthWatch(self._watch(MESSAGES["HealthCheckRequest"](service=service)))


class HealthWatch:
    """The statuses of a service, as they change."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def read(self) -> int:
        """Return the next status: 1 is serving, 2 is not, 3 is unknown. 0 if the picker has ended the watch."""
        try:
            answer = await self.call.read()
        except grpc.aio.AioRpcError:
            return 0
        return 0 if answer is grpc.aio.EOF else int(answer.status)


class GatewayStream:
    """One request of a client."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def headers(
        self,
        headers: Mapping[str, str],
        *,
        ended: bool = False,
        request_mode: str = "FULL_DUPLEX_STREAMED",
        response_mode: str = "NONE",
        subset: Sequence[str] | None = None,
    ) -> None:
        """Send the headers of the request."""
        message = MESSAGES["ProcessingRequest"]()
        add_headers(message.request_headers, headers, ended=ended)
        message.protocol_config.request_body_mode = MODES[request_mode]
        message.protocol_config.response_body_mode = MODES[response_mode]
        if subset is not None:
            value = message.metadata_context.filter_metadata.add(key=SUBSET_NAMESPACE).value.fields[SUBSET]
            value.list_value.SetInParent()
            for endpoint in subset:
                value.list_value.values.add(string_value=endpoint)
        await self.call.write(message)

    async def body(self, data: bytes, *, ended: bool = True, phase: str = "request") -> None:
        """Send a piece of a body."""
        message = MESSAGES["ProcessingRequest"]()
        part = getattr(message, f"{phase}_body")
        part.body, part.end_of_stream = data, ended
        part.SetInParent()
        await self.call.write(message)

    async def answer(self, headers: Mapping[str, str], *, served: str = "", ended: bool = False) -> None:
        """Send the headers of a server's answer."""
        message = MESSAGES["ProcessingRequest"]()
        add_headers(message.response_headers, headers, ended=ended)
        if served:
            fields = message.metadata_context.filter_metadata.add(key=NAMESPACE).value.fields
            fields[SERVED].string_value = served
        await self.call.write(message)

    async def read(self) -> Any:
        """Return the picker's next reply. None if it has ended the stream, `status` says how."""
        try:
            reply = await self.call.read()
        except grpc.aio.AioRpcError:
            return None
        return None if reply is grpc.aio.EOF else reply

    async def end(self) -> None:
        """End the stream, as a gateway does once its client has the answer, and wait until the picker has, too."""
        await self.call.done_writing()
        while await self.read() is not None:
            pass

    async def read_end(self) -> str:
        """Wait until the picker ends the stream. Return the name of its code."""
        while await self.read() is not None:
            pass
        return (await self.status())[0]

    async def status(self) -> tuple[str, str]:
        """Return how the picker ended the stream: the name of a code, and details."""
        return (await self.call.code()).name, await self.call.details()


def add_headers(part: Any, headers: Mapping[str, str], *, ended: bool) -> None:
    part.SetInParent()
    part.end_of_stream = ended
    for name, value in headers.items():
        part.headers.headers.add(key=name, raw_value=value.encode())


def destination(reply: Any) -> tuple[str, str]:
    """Return the endpoints of a reply by its header and by its metadata. Each is empty if it is not there."""
    part = reply.request_headers if reply.HasField("request_headers") else reply.request_body
    headers = {one.header.key: one.header.raw_value for one in part.response.header_mutation.set_headers}
    fields = reply.dynamic_metadata.fields
    noted = fields[NAMESPACE].struct_value.fields[DESTINATION].string_value if NAMESPACE in fields else ""
    return headers.get(DESTINATION, b"").decode(), noted


def refusal(reply: Any) -> tuple[int, dict[str, str]]:
    """Return the status and the headers of an answer in place of a server's. 0 if it is none."""
    immediate = reply.immediate_response
    return immediate.status.code, {
        one.header.key: one.header.raw_value.decode() for one in immediate.headers.set_headers
    }


@asynccontextmanager
async def connected(address: str, tls: grpc.ChannelCredentials | None = None) -> AsyncIterator[Gateway]:
    """Yield a gateway's connection to the picker at HOST:PORT; with `tls` to one whose certificate is localhost's."""
    options: list[tuple[str, Any]] = [(f"grpc.max_{way}_message_length", LIMIT_BYTES) for way in ("send", "receive")]
    if tls is None:
        opened = grpc.aio.insecure_channel(address, options=options)
    else:  # with nothing kept from former connections
        options += [("grpc.ssl_target_name_override", "localhost"), ("grpc.use_local_subchannel_pool", 1)]
        opened = grpc.aio.secure_channel(address, tls, options=options)
    async with opened as channel:
        yield Gateway(channel)
