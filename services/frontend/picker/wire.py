"""The bytes of Envoy's ext_proc and of gRPC's health protocol, as messages of messages.py.

The messages are described here by their numbers, which never change, and only with the fields that are read or written.
The package `xds-protos` has them too, but it overwrites modules of the OpenTelemetry packages with older ones, which
breaks the exporter of traces. Descriptors are in a pool of their own, so that both may be in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, assert_never

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2
from google.protobuf.message import DecodeError

from services.frontend.picker.messages import (
    DESTINATION,
    SERVED,
    BodyMode,
    BodyModes,
    BodyReply,
    GatewayBody,
    GatewayHeaders,
    GatewayMessage,
    GatewayReply,
    GatewayTrailers,
    HeadersReply,
    ImmediateReply,
    Phase,
    TrailersReply,
)
from shared.errors import ProtocolError

METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
NAMESPACE = "envoy.lb"
SUBSET_NAMESPACE = "envoy.lb.subset_hint"
SUBSET = "x-gateway-destination-endpoint-subset"
ENDPOINTS_LIMIT = 10_000
"""The most endpoints of a subset."""
_SEND, _SKIP = 1, 2
_OVERWRITE = 2

_SCHEMA = """
HeaderValue          key 1 string, value 2 string, raw_value 3 bytes
HeaderMap            headers 1 *HeaderValue
HeaderValueOption    header 1 HeaderValue, append_action 3 int32
HeaderMutation       set_headers 1 *HeaderValueOption
MetadataEntry        key 1 string, value 2 Struct
Metadata             filter_metadata 1 *MetadataEntry
HttpHeaders          headers 1 HeaderMap, end_of_stream 3 bool
HttpBody             body 1 bytes, end_of_stream 2 bool
HttpTrailers         trailers 1 HeaderMap
ProtocolConfig       request_body_mode 1 int32, response_body_mode 2 int32
ProcessingRequest    request_headers 2 HttpHeaders, response_headers 3 HttpHeaders, request_body 4 HttpBody, \
response_body 5 HttpBody, request_trailers 6 HttpTrailers, response_trailers 7 HttpTrailers, \
metadata_context 8 Metadata, observability_mode 10 bool, protocol_config 11 ProtocolConfig
StreamedBody         body 1 bytes, end_of_stream 2 bool
BodyMutation         streamed_response 3 StreamedBody
CommonResponse       header_mutation 2 HeaderMutation, body_mutation 3 BodyMutation, clear_route_cache 5 bool
HeadersResponse      response 1 CommonResponse
BodyResponse         response 1 CommonResponse
TrailersResponse     header_mutation 1 HeaderMutation
HttpStatus           code 1 int32
ImmediateResponse    status 1 HttpStatus, headers 2 HeaderMutation, body 3 bytes, details 5 string
ProcessingMode       response_header_mode 2 int32, request_body_mode 3 int32, response_body_mode 4 int32, \
request_trailer_mode 5 int32, response_trailer_mode 6 int32
ProcessingResponse   request_headers 1 HeadersResponse, response_headers 2 HeadersResponse, \
request_body 3 BodyResponse, response_body 4 BodyResponse, \
request_trailers 5 TrailersResponse, response_trailers 6 TrailersResponse, \
immediate_response 7 ImmediateResponse, dynamic_metadata 8 Struct, mode_override 9 ProcessingMode
HealthCheckRequest   service 1 string
HealthCheckResponse  status 1 int32
"""
"""A line for each message: its name, then the name, the number and the type of each field. `*` marks a list. Maps and
enumerations are written as what they are on the wire: lists of pairs, and integers."""


def _build() -> Mapping[str, Any]:
    """Return the class of each message by its name."""
    package = "headrace.ext_proc"
    file = descriptor_pb2.FileDescriptorProto(
        name="headrace/ext_proc.proto", package=package, syntax="proto3", dependency=[struct_pb2.DESCRIPTOR.name]
    )
    kinds = descriptor_pb2.FieldDescriptorProto
    scalars = {
        "string": kinds.TYPE_STRING,
        "bytes": kinds.TYPE_BYTES,
        "int32": kinds.TYPE_INT32,
        "bool": kinds.TYPE_BOOL,
    }
    names = []
    for line in _SCHEMA.strip().splitlines():
        name, rest = line.split(maxsplit=1)
        names.append(name)
        message = file.message_type.add(name=name)
        for field in rest.split(","):
            title, number, kind = field.split()
            label = kinds.LABEL_REPEATED if kind.startswith("*") else kinds.LABEL_OPTIONAL
            kind = kind.lstrip("*")
            added = message.field.add(name=title, number=int(number), label=label)
            if kind in scalars:
                added.type = scalars[kind]
            else:
                added.type = kinds.TYPE_MESSAGE
                added.type_name = ".google.protobuf.Struct" if kind == "Struct" else f".{package}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(file.SerializeToString())
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in names}


MESSAGES = _build()
_REQUEST, _RESPONSE = MESSAGES["ProcessingRequest"], MESSAGES["ProcessingResponse"]
_KINDS: tuple[tuple[str, Phase], ...] = tuple(
    (f"{phase}_{kind}", phase) for kind in ("headers", "body", "trailers") for phase in ("request", "response")
)


def read_message(payload: bytes, wanted: Iterable[str]) -> GatewayMessage:
    """Decode a message of a gateway, with no other headers than those in `wanted`. Raise ProtocolError."""
    try:
        message = _REQUEST.FromString(payload)
    except DecodeError as wrong:
        raise ProtocolError(f"ext_proc: {wrong}") from None
    if message.observability_mode:
        raise ProtocolError("ext_proc: in observability_mode no reply is read: a gateway needs the destination")
    for name, phase in _KINDS:
        if not message.HasField(name):
            continue
        found = getattr(message, name)
        if name.endswith("_body"):
            return GatewayBody(phase, found.body, found.end_of_stream)
        if name.endswith("_trailers"):
            return GatewayTrailers(phase)
        headers = _headers(found.headers, {*wanted, SERVED})
        metadata = {entry.key: entry.value.fields for entry in message.metadata_context.filter_metadata}
        served = headers.get(SERVED, "")
        if NAMESPACE in metadata and SERVED in metadata[NAMESPACE]:
            served = metadata[NAMESPACE][SERVED].string_value
        return GatewayHeaders(phase, headers, found.end_of_stream, _subset(metadata), served, _modes(message))
    raise ProtocolError("ext_proc: a message with neither headers, a body nor trailers")


def _headers(headers: Any, wanted: set[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in headers.headers:
        name = one.key.lower()
        if name in wanted and name not in found:
            found[name] = one.raw_value.decode("utf-8", "replace") or one.value
    return found


def _subset(metadata: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the endpoints to choose among: a list, or one text with commas. Raise ProtocolError."""
    hint = metadata.get(SUBSET_NAMESPACE)
    if hint is None or SUBSET not in hint:
        return None
    given = hint[SUBSET]
    endpoints = [one.string_value for one in given.list_value.values] or given.string_value.split(",")
    if len(endpoints) > ENDPOINTS_LIMIT:
        raise ProtocolError(f"ext_proc: a subset of {len(endpoints)} endpoints; at most {ENDPOINTS_LIMIT} are taken")
    return tuple(endpoint.strip() for endpoint in endpoints if endpoint.strip())


def _modes(message: Any) -> BodyModes:
    if not message.HasField("protocol_config"):
        return BodyModes()
    config = message.protocol_config
    try:
        return BodyModes(BodyMode(config.request_body_mode), BodyMode(config.response_body_mode))
    except ValueError as wrong:
        raise ProtocolError(f"ext_proc: protocol_config: {wrong}") from None


def encode_reply(reply: GatewayReply) -> bytes:
    """Encode a reply to a gateway."""
    message = _RESPONSE()
    match reply:
        case HeadersReply():
            common = _common(message, f"{reply.phase}_headers", reply.set_headers, reply.destination)
            common.SetInParent()
            if reply.unread_answer_to is not None:
                mode = message.mode_override
                mode.request_body_mode, mode.response_body_mode = reply.unread_answer_to, BodyMode.NONE
                mode.request_trailer_mode = _SKIP
                # For the sake of trailers, which are rare, a gateway keeps the stream until the answer's end.
                mode.response_header_mode = mode.response_trailer_mode = _SEND
        case BodyReply():
            common = _common(message, f"{reply.phase}_body", reply.set_headers, reply.destination)
            common.SetInParent()
            if reply.piece is not None:
                streamed = common.body_mutation.streamed_response
                streamed.body, streamed.end_of_stream = reply.piece, reply.ended
                streamed.SetInParent()
        case TrailersReply():
            getattr(message, f"{reply.phase}_trailers").SetInParent()
        case ImmediateReply():
            immediate = message.immediate_response
            immediate.status.code = reply.status
            immediate.body = reply.body
            immediate.details = "headrace_picker"
            _set(immediate.headers, reply.headers)
        case _:
            assert_never(reply)
    return bytes(message.SerializeToString())


def _common(message: Any, name: str, headers: Mapping[str, str], destination: str) -> Any:
    """Return the common part of the reply `name`, with these headers, and the destination in the metadata, too."""
    common = getattr(message, name).response
    if headers:
        _set(common.header_mutation, headers)
    if destination:
        common.clear_route_cache = True
        message.dynamic_metadata.fields[NAMESPACE].struct_value.fields[DESTINATION].string_value = destination
    return common


def _set(mutation: Any, headers: Mapping[str, str]) -> None:
    for name, value in headers.items():
        option = mutation.set_headers.add(append_action=_OVERWRITE)
        option.header.key, option.header.raw_value = name, value.encode()
