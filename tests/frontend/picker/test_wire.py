"""The bytes of ext_proc. A real Envoy reads and writes them in tests/picker."""

from __future__ import annotations

from typing import Any

import pytest

from services.frontend.picker.messages import (
    DESTINATION,
    SERVED,
    BodyMode,
    BodyModes,
    BodyReply,
    GatewayBody,
    GatewayHeaders,
    GatewayTrailers,
    HeadersReply,
    ImmediateReply,
    TrailersReply,
)
from services.frontend.picker.wire import (
    ENDPOINTS_LIMIT,
    MESSAGES,
    NAMESPACE,
    SUBSET,
    SUBSET_NAMESPACE,
    encode_reply,
    read_message,
)
from shared.errors import ProtocolError

WANTED = (":path", "x-request-id")


def request() -> Any:
    return MESSAGES["ProcessingRequest"]()


def note(message: Any, namespace: str, key: str) -> Any:
    """Return the value of a key in the metadata of a message, to be set."""
    return message.metadata_context.filter_metadata.add(key=namespace).value.fields[key]


def decoded(payload: bytes) -> Any:
    return MESSAGES["ProcessingResponse"].FromString(payload)


def test_the_numbers_of_the_fields_are_those_of_the_protocol() -> None:
    # request_headers { headers { headers { key: ":path" raw_value: "/" } } end_of_stream: true }
    # protocol_config { request_body_mode: BUFFERED response_body_mode: STREAMED }
    payload = bytes.fromhex("1210 0a0c 0a0a 0a05 3a70617468 1a01 2f 1801 5a04 0802 1001")
    assert read_message(payload, WANTED) == GatewayHeaders(
        "request", {":path": "/"}, ended=True, modes=BodyModes(BodyMode.BUFFERED, BodyMode.STREAMED)
    )
    # request_body { response {} }, and response_body { response { body_mutation { streamed_response {
    # body: "a" end_of_stream: true } } } }
    assert encode_reply(BodyReply("request")).hex(" ") == "1a 02 0a 00"
    assert encode_reply(BodyReply("response", b"a", ended=True)).hex(" ") == "22 0b 0a 09 1a 07 1a 05 0a 01 61 10 01"


def test_only_headers_that_count_are_kept_the_first_of_each_by_either_kind_of_value() -> None:
    message = request()
    given = [(":Path", "", b"/a"), (":path", "", b"/b"), ("X-Request-Id", "r", b""), ("other", "o", b"")]
    for key, value, raw in given:
        message.request_headers.headers.headers.add(key=key, value=value, raw_value=raw)
    found = read_message(message.SerializeToString(), WANTED)
    assert isinstance(found, GatewayHeaders)
    assert found.headers == {":path": "/a", "x-request-id": "r"}
    assert found.modes == BodyModes(), "a gateway that does not say how it sends bodies"


def test_bodies_and_trailers_are_read_with_their_end() -> None:
    message = request()
    message.response_body.body, message.response_body.end_of_stream = b"x", True
    assert read_message(message.SerializeToString(), WANTED) == GatewayBody("response", b"x", ended=True)
    message = request()
    message.request_trailers.SetInParent()
    assert read_message(message.SerializeToString(), WANTED) == GatewayTrailers("request")


@pytest.mark.parametrize("as_text", [False, True])
def test_a_subset_is_a_list_or_a_text_with_commas_and_an_empty_one_is_not_none(as_text: bool) -> None:
    for given, expected in (([], ()), (["1.1.1.1:80", " 2.2.2.2:80 "], ("1.1.1.1:80", "2.2.2.2:80"))):
        message = request()
        message.request_headers.SetInParent()
        value = note(message, SUBSET_NAMESPACE, SUBSET)
        if as_text:
            value.string_value = ",".join(given)
        else:
            value.list_value.SetInParent()
            for endpoint in given:
                value.list_value.values.add(string_value=endpoint)
        found = read_message(message.SerializeToString(), WANTED)
        assert isinstance(found, GatewayHeaders)
        assert found.subset == expected
    message = request()
    message.request_headers.SetInParent()
    found = read_message(message.SerializeToString(), WANTED)
    assert isinstance(found, GatewayHeaders)
    assert found.subset is None


def test_the_endpoint_that_served_is_in_the_metadata_or_else_in_a_header() -> None:
    message = request()
    message.response_headers.headers.headers.add(key=SERVED, raw_value=b"1.1.1.1:80")
    found = read_message(message.SerializeToString(), WANTED)
    assert isinstance(found, GatewayHeaders)
    assert found.served == "1.1.1.1:80"
    note(message, NAMESPACE, SERVED).string_value = "2.2.2.2:80"
    found = read_message(message.SerializeToString(), WANTED)
    assert isinstance(found, GatewayHeaders)
    assert found.served == "2.2.2.2:80"


def test_the_destination_is_in_the_header_and_in_the_metadata_and_they_agree() -> None:
    for reply in (
        HeadersReply("request", {DESTINATION: "1.1.1.1:80"}, "1.1.1.1:80"),
        BodyReply("request", None, False, {DESTINATION: "1.1.1.1:80"}, "1.1.1.1:80"),
    ):
        message = decoded(encode_reply(reply))
        common = (message.request_headers if isinstance(reply, HeadersReply) else message.request_body).response
        [header] = common.header_mutation.set_headers
        assert (header.header.key, header.header.raw_value, header.append_action) == (DESTINATION, b"1.1.1.1:80", 2)
        assert message.dynamic_metadata.fields[NAMESPACE].struct_value.fields[DESTINATION].string_value == "1.1.1.1:80"


def test_the_answers_body_is_declined_without_a_change_of_the_requests() -> None:
    mode = decoded(encode_reply(HeadersReply("request", unread_answer_to=BodyMode.BUFFERED))).mode_override
    assert (mode.request_body_mode, mode.response_body_mode, mode.response_header_mode) == (2, 0, 1)


def test_an_immediate_answer_and_trailers_are_written() -> None:
    message = decoded(encode_reply(ImmediateReply(429, {"retry-after": "1"}, b"{}")))
    assert (message.immediate_response.status.code, message.immediate_response.body) == (429, b"{}")
    assert message.immediate_response.headers.set_headers[0].header.raw_value == b"1"
    assert decoded(encode_reply(TrailersReply("response"))).HasField("response_trailers")


def strange_messages() -> list[tuple[bytes, str]]:
    observing, crowded, unknown = request(), request(), request()
    observing.request_headers.SetInParent()
    observing.observability_mode = True
    crowded.request_headers.SetInParent()
    value = note(crowded, SUBSET_NAMESPACE, SUBSET)
    for _ in range(ENDPOINTS_LIMIT + 1):
        value.list_value.values.add(string_value="1.1.1.1:80")
    unknown.request_headers.SetInParent()
    unknown.protocol_config.request_body_mode = 99
    return [
        (b"\xff\xff", "ext_proc: "),
        (b"", "ext_proc: a message with neither headers, a body nor trailers"),
        (observing.SerializeToString(), "ext_proc: in observability_mode no reply is read"),
        (crowded.SerializeToString(), "ext_proc: a subset of 10001 endpoints; at most 10000 are taken"),
        (unknown.SerializeToString(), "ext_proc: protocol_config: 99 is not a valid BodyMode"),
    ]


@pytest.mark.parametrize(("payload", "what"), strange_messages())
def test_a_message_that_cannot_be_read_is_one_line(payload: bytes, what: str) -> None:
    with pytest.raises(ProtocolError, match=what):
        read_message(payload, WANTED)
