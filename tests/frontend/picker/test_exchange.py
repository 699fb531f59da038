"""What a picker replies to each message of a gateway, in every mode of sending bodies."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.frontend.picker.exchange import PIECE_BYTES, Exchange, ExchangeState
from services.frontend.picker.messages import (
    DESTINATION,
    REASON,
    REQUEST_ID,
    AnswerBegun,
    BodyMode,
    BodyModes,
    BodyReply,
    ChoiceRefused,
    ChooseEndpoint,
    EndpointsChosen,
    EndStream,
    ExchangeAction,
    ExchangeEvent,
    FirstText,
    GatewayBody,
    GatewayHeaders,
    GatewayTrailers,
    HeadersReply,
    ImmediateReply,
    PickerLeaves,
    ReleaseEndpoint,
    TimeOver,
    TrailersReply,
)
from services.frontend.protocol.errors import failure

HEADERS = {":path": "/v1/chat/completions", REQUEST_ID: "mine"}
CHOSEN = EndpointsChosen(("1.1.1.1:80", "2.2.2.2:80"), "mine")
PLACES = "1.1.1.1:80,2.2.2.2:80"
DUPLEX = BodyModes(BodyMode.FULL_DUPLEX_STREAMED, BodyMode.FULL_DUPLEX_STREAMED)
STREAM = {"content-type": "text/event-stream; charset=utf-8", REQUEST_ID: "mine"}


def modes(request: BodyMode = BodyMode.FULL_DUPLEX_STREAMED, response: BodyMode = BodyMode.NONE) -> BodyModes:
    return BodyModes(request, response)


def asking(of: BodyModes, *, ended: bool = False, subset: tuple[str, ...] | None = None) -> GatewayHeaders:
    return GatewayHeaders("request", HEADERS, ended, subset, modes=of)


def fed(exchange: Exchange, *given: ExchangeEvent) -> list[ExchangeAction]:
    """Feed these, and return what followed from the last."""
    actions: list[ExchangeAction] = []
    for event in given:
        actions = exchange.on(event)
        exchange.validate()
    return actions


def sent(of: BodyModes) -> Exchange:
    """Return an exchange whose request is on its way."""
    exchange = Exchange()
    fed(exchange, asking(of), GatewayBody("request", b"{}", ended=True), CHOSEN)
    assert exchange.state is ExchangeState.SENT
    return exchange


def test_a_buffered_body_is_asked_for_at_once_and_its_reply_has_the_destination() -> None:
    exchange = Exchange()
    of = modes(BodyMode.BUFFERED)
    assert fed(exchange, asking(of, subset=("1.1.1.1:80",))) == [HeadersReply("request")]
    [chooses] = fed(exchange, GatewayBody("request", b"{}", ended=True))
    assert chooses == ChooseEndpoint(HEADERS, b"{}", ("1.1.1.1:80",))
    assert fed(exchange, CHOSEN) == [BodyReply("request", None, False, {DESTINATION: PLACES}, PLACES)]
    assert exchange.size_bytes == 0


@pytest.mark.parametrize("response", [BodyMode.STREAMED, BodyMode.BUFFERED])
def test_a_gateway_that_would_send_the_answers_body_is_asked_not_to(response: BodyMode) -> None:
    [reply] = fed(Exchange(), asking(modes(BodyMode.BUFFERED, response)))
    assert reply == HeadersReply("request", unread_answer_to=BodyMode.BUFFERED)


def test_with_full_duplex_nothing_is_answered_before_the_whole_body_is_there_and_it_goes_back_in_pieces() -> None:
    exchange = Exchange()
    assert fed(exchange, asking(DUPLEX)) == []
    body = bytes(PIECE_BYTES) + b"rest"
    assert fed(exchange, GatewayBody("request", body[:100])) == []
    assert fed(exchange, GatewayBody("request", body[100:], ended=True)) == [ChooseEndpoint(HEADERS, body, None)]
    assert fed(exchange, CHOSEN) == [
        HeadersReply("request", {DESTINATION: PLACES}, PLACES),
        BodyReply("request", body[:PIECE_BYTES]),
        BodyReply("request", b"rest", ended=True),
    ]


def test_with_full_duplex_an_empty_body_and_trailers_go_back_as_they_came() -> None:
    for message, back in (
        (GatewayBody("request", b"", ended=True), [BodyReply("request", b"", ended=True)]),
        (GatewayTrailers("request"), [BodyReply("request", b""), TrailersReply("request")]),
    ):
        exchange = Exchange()
        [chooses] = fed(exchange, asking(DUPLEX), message)
        assert isinstance(chooses, ChooseEndpoint)
        assert fed(exchange, CHOSEN)[1:] == back


@pytest.mark.parametrize("of", [DUPLEX, modes(BodyMode.BUFFERED), modes(BodyMode.NONE), modes(BodyMode.STREAMED)])
def test_a_request_without_a_body_is_chosen_for_at_once(of: BodyModes) -> None:
    exchange = Exchange()
    assert fed(exchange, asking(of, ended=True)) == [ChooseEndpoint(HEADERS, b"", None)]
    assert fed(exchange, CHOSEN) == [HeadersReply("request", {DESTINATION: PLACES}, PLACES)]


@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.STREAMED, BodyMode.GRPC])
def test_a_gateway_that_sends_headers_on_before_the_body_is_refused_with_what_to_set(mode: BodyMode) -> None:
    immediate, end = fed(Exchange(), asking(modes(mode)))
    assert isinstance(immediate, ImmediateReply)
    assert immediate.status == 500
    assert immediate.headers[REASON] == (
        f"the gateway's request_body_mode is {mode.name}; set BUFFERED or FULL_DUPLEX_STREAMED for this route"
    )
    assert end == EndStream()


def test_a_body_beyond_the_limit_is_413_and_one_at_it_is_chosen_for() -> None:
    exchange = Exchange(limit_bytes=10)
    [chooses] = fed(exchange, asking(DUPLEX), GatewayBody("request", bytes(6)), GatewayBody("request", bytes(4), True))
    assert isinstance(chooses, ChooseEndpoint)
    exchange = Exchange(limit_bytes=10)
    immediate, _ = fed(exchange, asking(DUPLEX), GatewayBody("request", bytes(6)), GatewayBody("request", bytes(5)))
    assert isinstance(immediate, ImmediateReply)
    assert (immediate.status, immediate.headers[REASON]) == (413, "the body has more than 10 bytes")
    assert immediate.headers[REQUEST_ID] == "mine"


def test_a_refusal_is_the_clients_answer_with_its_reason_as_a_line_of_ascii() -> None:
    refusal = ChoiceRefused(failure(429, "füll", "rate_limit_error"), "füll\r\nx: y", "mine")
    immediate, end = fed(Exchange(), asking(DUPLEX, ended=True), refusal)
    assert isinstance(immediate, ImmediateReply)
    assert (immediate.status, immediate.headers[REASON], end) == (429, "fllx: y", EndStream())
    assert immediate.body == refusal.failure.payload


def test_a_request_without_a_name_gets_ours_on_its_way_and_its_answer_has_it() -> None:
    exchange = Exchange()
    nameless = GatewayHeaders("request", {":path": "/"}, ended=True)
    assert fed(exchange, nameless, CHOSEN) == [
        HeadersReply("request", {DESTINATION: PLACES, REQUEST_ID: "mine"}, PLACES)
    ]
    begun, reply = fed(exchange, GatewayHeaders("response", {}, served="2.2.2.2:80"))
    assert (begun, reply) == (AnswerBegun("2.2.2.2:80", has_text=True), HeadersReply("response", {REQUEST_ID: "mine"}))


def test_the_first_text_of_a_stream_that_the_gateway_shows_is_reported_once_and_all_goes_back() -> None:
    exchange = sent(DUPLEX)
    begun, reply = fed(exchange, GatewayHeaders("response", STREAM))
    assert (begun, reply) == (AnswerBegun("", has_text=False), HeadersReply("response"))
    assert fed(exchange, GatewayBody("response", b"")) == [BodyReply("response", b"")]
    assert fed(exchange, GatewayBody("response", b"a")) == [FirstText(), BodyReply("response", b"a")]
    assert fed(exchange, GatewayBody("response", b"b")) == [BodyReply("response", b"b")]
    assert fed(exchange, GatewayTrailers("response")) == [TrailersReply("response")]
    assert exchange.state is ExchangeState.ENDED


def test_an_answer_that_the_gateway_keeps_itself_goes_on_as_it_is() -> None:
    exchange = sent(modes(BodyMode.BUFFERED, BodyMode.STREAMED))
    fed(exchange, GatewayHeaders("response", STREAM))
    assert fed(exchange, GatewayBody("response", b"a", ended=True)) == [FirstText(), BodyReply("response")]
    assert exchange.state is ExchangeState.ENDED


@pytest.mark.parametrize("mode", [BodyMode.BUFFERED, BodyMode.BUFFERED_PARTIAL])
def test_a_buffered_body_in_two_messages_is_chosen_for_once_and_each_has_a_reply(mode: BodyMode) -> None:
    for first_ends in (False, True):
        exchange = Exchange()
        [chooses] = fed(exchange, asking(modes(mode)), GatewayBody("request", b"{}", ended=first_ends))
        assert isinstance(chooses, ChooseEndpoint)
        assert fed(exchange, CHOSEN) == [BodyReply("request", None, False, {DESTINATION: PLACES}, PLACES)]
        assert fed(exchange, GatewayBody("request", b"", ended=True)) == [BodyReply("request")]
        assert fed(exchange, GatewayHeaders("response", STREAM))[-1] == HeadersReply("response")


def test_with_full_duplex_the_last_piece_of_a_body_may_come_twice() -> None:
    exchange = Exchange()
    last = GatewayBody("request", b"{}", ended=True)
    fed(exchange, asking(DUPLEX), last)
    assert fed(exchange, last) == []
    assert fed(exchange, CHOSEN)[1:] == [BodyReply("request", b"{}", ended=True)]
    assert fed(exchange, last) == []
    assert fed(exchange, GatewayHeaders("response", STREAM))[-1] == HeadersReply("response")
    [end] = fed(exchange, GatewayBody("request", b"{}"))
    assert isinstance(end, EndStream)


def test_a_gateway_may_answer_by_itself_before_the_body_is_there() -> None:
    exchange = Exchange()
    fed(exchange, asking(modes(BodyMode.BUFFERED)))
    assert fed(exchange, GatewayHeaders("response", {":status": "413"})) == [HeadersReply("response")]


def test_trailers_of_a_request_that_was_answered_early_go_on() -> None:
    exchange = sent(modes(BodyMode.BUFFERED_PARTIAL))
    fed(exchange, GatewayHeaders("response", {":status": "413"}, True))
    assert fed(exchange, GatewayTrailers("request")) == [TrailersReply("request")]


def test_a_buffered_request_with_trailers_and_no_body_is_refused() -> None:
    refused, end = fed(Exchange(), asking(modes(BodyMode.BUFFERED)), GatewayTrailers("request"))
    assert isinstance(refused, ImmediateReply)
    assert (refused.status, end) == (400, EndStream())


def test_trailers_after_a_buffered_body_go_on() -> None:
    exchange = Exchange()
    fed(exchange, asking(modes(BodyMode.BUFFERED)), GatewayBody("request", b"{}"), CHOSEN)
    assert fed(exchange, GatewayTrailers("request")) == [TrailersReply("request")]


@pytest.mark.parametrize(
    ("before", "message", "what"),
    [
        ([], GatewayBody("request", b""), "request body out of order, in the state headers"),
        ([], GatewayHeaders("response", {}), "response headers out of order, in the state headers"),
        ([asking(DUPLEX)], asking(DUPLEX), "request headers out of order, in the state body"),
        ([asking(DUPLEX)], GatewayBody("response", b""), "response body out of order, in the state body"),
        ([asking(DUPLEX, ended=True), CHOSEN], GatewayBody("request", b""), "request body out of order, in the state"),
        ([asking(DUPLEX, ended=True), CHOSEN], GatewayTrailers("response"), "response trailers out of order"),
    ],
)
def test_a_message_out_of_order_ends_the_stream_with_a_line_about_it(
    before: list[ExchangeEvent], message: ExchangeEvent, what: str
) -> None:
    exchange = Exchange()
    fed(exchange, *before)
    [end] = fed(exchange, message)
    assert isinstance(end, EndStream)
    assert end.fault.startswith(f"the gateway sent {what}")
    assert exchange.state is ExchangeState.ENDED


def test_a_body_that_does_not_come_in_time_is_408() -> None:
    befores: list[list[ExchangeEvent]] = [[], [asking(DUPLEX), GatewayBody("request", b"{")]]
    for before in befores:
        exchange = Exchange()
        fed(exchange, *before)
        immediate, end = fed(exchange, TimeOver())
        assert isinstance(immediate, ImmediateReply)
        assert (immediate.status, end) == (408, EndStream())


def test_a_deadline_frees_what_is_reserved_and_ends_the_stream_unless_a_body_goes_through_it() -> None:
    assert fed(sent(modes()), TimeOver()) == [ReleaseEndpoint(), EndStream()]
    exchange = sent(DUPLEX)
    fed(exchange, GatewayHeaders("response", STREAM))
    assert fed(exchange, TimeOver()) == [ReleaseEndpoint()]
    assert fed(exchange, GatewayBody("response", b"a", ended=True)) == [
        FirstText(),
        BodyReply("response", b"a", ended=True),
    ]
    assert fed(exchange, TimeOver()) == [ReleaseEndpoint(), EndStream()], "a gateway that never says the end"


def test_a_picker_that_leaves_ends_the_streams_whose_gateways_can_go_on_without_it() -> None:
    for of, ends in ((modes(), True), (modes(BodyMode.BUFFERED, BodyMode.STREAMED), True), (DUPLEX, False)):
        exchange = sent(of)
        assert fed(exchange, PickerLeaves()) == ([EndStream()] if ends else [])
    exchange = Exchange()
    assert fed(exchange, asking(modes()), PickerLeaves()) == []
    assert fed(exchange, GatewayBody("request", b"", ended=True), CHOSEN)[-1] == EndStream(), "as soon as it can"


def test_a_gateway_whose_answer_passes_through_a_picker_that_leaves_ends_the_stream_itself() -> None:
    exchange = sent(DUPLEX)
    fed(exchange, PickerLeaves(), GatewayHeaders("response", STREAM))
    assert exchange.passes_answer
    assert fed(exchange, GatewayBody("response", b"a", ended=True))[-1] == BodyReply("response", b"a", ended=True)
    assert exchange.passes_answer
    assert fed(exchange, TimeOver()) == [ReleaseEndpoint(), EndStream()], "a gateway that never ends it"


messages = st.one_of(
    st.builds(
        GatewayHeaders,
        st.sampled_from(["request", "response"]),
        st.sampled_from([HEADERS, STREAM, {}]),
        st.booleans(),
        modes=st.builds(BodyModes, st.sampled_from(BodyMode), st.sampled_from(BodyMode)),
    ),
    st.builds(GatewayBody, st.sampled_from(["request", "response"]), st.binary(max_size=9), st.booleans()),
    st.builds(GatewayTrailers, st.sampled_from(["request", "response"])),
    st.sampled_from([TimeOver(), PickerLeaves()]),
)


@given(st.lists(messages, max_size=12), st.booleans())
@settings(max_examples=300)
def test_whatever_comes_there_is_one_choice_at_most_and_one_end(given: list[ExchangeEvent], good: bool) -> None:
    exchange, chosen = Exchange(limit_bytes=20), 0
    for event in given:
        actions = fed(exchange, event)
        if any(isinstance(action, ChooseEndpoint) for action in actions):
            chosen += 1
            actions = fed(exchange, CHOSEN if good else ChoiceRefused(failure(503, "x", "y"), "x"))
        if any(isinstance(action, EndStream) for action in actions):
            assert exchange.state is ExchangeState.ENDED
            assert sum(isinstance(action, EndStream) for action in actions) == 1
            break
    assert chosen <= 1
