"""Events, added up as a client does, are the response; and how the text was cut into deltas changes nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response as OpenAIResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from services.frontend.output.output import Delta, LogprobEntry, TopLogprobEntry
from services.frontend.protocol.chat_chunks import usage_of
from services.frontend.protocol.foreign import Ended
from services.frontend.protocol.responses_events import Response, ResponseEvent, new_response
from services.frontend.protocol.responses_request import decode_response
from services.frontend.requests.stream import join_deltas
from services.frontend.serving.responses_writer import ResponseWriter
from services.frontend.tool_parsers.parser import FormatName, ParsePlan
from shared.messages.generate import Sampling
from tests.frontend.pieces import ANSWERS, CALL, parsed

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
OURS = msgspec.json.Decoder(ResponseEvent)
USAGE = usage_of(7, 5, 3)


def response(*, summed_up: bool = False) -> Response:
    body = {"input": "hi", "model": "tiny", "metadata": {"a": "b"}, "instructions": "be kind"}
    asked = decode_response(msgspec.json.encode(body | ({"reasoning": {"summary": "auto"}} if summed_up else {})))
    return new_response(asked, "resp_f1.abc", 1, "tiny", Sampling(max_tokens=8))


def written(
    deltas: Sequence[Delta],
    finish: str = "stop",
    directly: Callable[[], bool] = lambda: True,
    *,
    summed_up: bool = False,
) -> tuple[Response, list[bytes]]:
    """The response, and its events; `directly`: whether a delta may take the fast path, as a client that reads."""
    kept: list[tuple[Response, bytes]] = []
    writer = ResponseWriter(response(summed_up=summed_up), "abc", lambda *one: kept.append(one))
    events = writer.first_events(USAGE)
    for delta in deltas:
        event = writer.continuation(delta)
        assert writer.continuation(delta) == event, "nothing has changed"
        if event is not None and directly():
            writer.continued(delta)
            events.append(event)
        else:
            pushed = writer.push(delta)
            assert event is None or pushed == [event]
            events += pushed
        writer.validate()
    assert kept == []
    events += writer.last_events(Ended(finish, "", USAGE, 2, 9, 1.0, 0.5, 0.25))
    writer.validate()
    assert kept == [(writer.response, msgspec.json.encode(writer.response))]
    return writer.response, events


def folded(events: Sequence[bytes]) -> dict[str, Any]:
    """Return the response that a client adds up, and the one that it gets at the end."""
    items: list[dict[str, Any]] = []
    for number, raw in enumerate(events):
        event = msgspec.json.decode(raw)
        assert event["sequence_number"] == number
        assert EVENT.validate_json(raw).type == event["type"], "OpenAI's types know it"
        assert msgspec.json.decode(msgspec.json.encode(OURS.decode(raw))) == event, "as ours do"
        match event["type"]:
            case "response.output_item.added":
                assert event["output_index"] == len(items)
                assert event["item"]["status"] == "in_progress"
                assert all(item["status"] != "in_progress" for item in items), "one is open at a time"
                items.append(event["item"])
            case "response.content_part.added":
                items[event["output_index"]]["content"].append(event["part"])
            case "response.output_text.delta":
                part = items[event["output_index"]]["content"][event["content_index"]]
                part["text"] += event["delta"]
                part["logprobs"] += event["logprobs"]
            case "response.reasoning_text.delta":
                items[event["output_index"]]["content"][event["content_index"]]["text"] += event["delta"]
            case "response.reasoning_summary_part.added":
                items[event["output_index"]]["summary"].append(event["part"])
            case "response.reasoning_summary_text.delta":
                items[event["output_index"]]["summary"][event["summary_index"]]["text"] += event["delta"]
            case "response.reasoning_summary_text.done":
                assert items[event["output_index"]]["summary"][event["summary_index"]]["text"] == event["text"]
            case "response.reasoning_summary_part.done":
                assert items[event["output_index"]]["summary"][event["summary_index"]] == event["part"]
            case "response.function_call_arguments.delta":
                items[event["output_index"]]["arguments"] += event["delta"]
            case "response.output_text.done" | "response.reasoning_text.done":
                part = items[event["output_index"]]["content"][event["content_index"]]
                assert part["text"] == event["text"]
            case "response.content_part.done":
                assert items[event["output_index"]]["content"][event["content_index"]] == event["part"]
            case "response.function_call_arguments.done":
                assert items[event["output_index"]]["arguments"] == event["arguments"]
            case "response.output_item.done":
                item = items[event["output_index"]]
                item["status"] = event["item"]["status"]
                assert item == event["item"]
    first, second, last = (msgspec.json.decode(events[at]) for at in (0, 1, -1))
    assert (first["type"], second["type"]) == ("response.created", "response.in_progress")
    assert first["response"] == second["response"]
    assert first["response"]["status"] == "in_progress"
    assert last["type"] == f"response.{last['response']['status']}"
    assert last["response"]["output"] == items
    return dict(last["response"])


@given(
    st.sampled_from(ANSWERS),
    st.lists(st.integers(0, 300), max_size=12),
    st.booleans(),
    st.sampled_from(["hermes", None]),
    st.sampled_from(["stop", "length", "tool_calls"]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_events_add_up_to_the_whole_answer_wherever_it_is_cut(
    text: str, cuts: list[int], thinks: bool, calls: FormatName | None, finish: str, summed_up: bool, draw: Random
) -> None:
    plan = ParsePlan(calls, thinks)
    deltas = parsed(text, cuts, plan)
    whole, _ = written([join_deltas(parsed(text, (), plan))], finish, summed_up=summed_up)
    streamed, events = written(deltas, finish, lambda: draw.random() < 0.5, summed_up=summed_up)
    assert streamed == whole
    told = folded(events)
    assert told == msgspec.json.decode(msgspec.json.encode(whole))
    assert OpenAIResponse.model_validate(told).status == ("incomplete" if finish == "length" else "completed")
    joined, _ = written([join_deltas(deltas)], finish, summed_up=summed_up)
    assert joined == whole, "a client that reads slowly gets the same"


def test_items_are_where_the_model_wrote_them() -> None:
    deltas = parsed(f"<think>hm</think>I look.\n{CALL} then {CALL}", (), ParsePlan("hermes", True))
    whole, events = written(deltas)
    assert [type(item).__name__ for item in whole.output] == [
        *("OutputThought", "OutputMessage", "OutputCall", "OutputMessage", "OutputCall"),
    ]
    assert OpenAIResponse.model_validate(folded(events)).output_text == "I look.\nthen "
    assert len({item.id for item in whole.output}) == 5


def test_thinking_is_its_own_summary_in_place_of_content_where_a_summary_is_asked_for() -> None:
    whole, events = written(parsed("<think>hm</think>Yes.", (4, 9), ParsePlan(None, reasoning=True)), summed_up=True)
    thought, message = folded(events)["output"]
    assert (thought["summary"], thought["content"]) == ([{"type": "summary_text", "text": "hm"}], [])
    assert message["content"][0]["text"] == "Yes."
    assert whole.reasoning.summary == "auto"
    types = {msgspec.json.decode(event)["type"] for event in events}
    summed_up = {f"response.reasoning_summary_{end}" for end in ("part.added", "text.delta", "text.done", "part.done")}
    assert summed_up <= types
    assert not any(kind.startswith("response.reasoning_text") for kind in types)


def test_an_answer_that_is_cut_off_is_incomplete_and_so_is_its_last_item() -> None:
    whole, _ = written(parsed(f"hi {CALL[:50]}", (), ParsePlan("hermes")), "length")
    assert whole.status == "incomplete"
    assert whole.completed_at is None
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in whole.output] == ["completed", "incomplete"]


def test_a_call_that_the_model_did_not_finish_is_incomplete_in_a_complete_response() -> None:
    whole, events = written(parsed(f"{CALL}{CALL[:50]}", (60, 110), ParsePlan("hermes")), "tool_calls")
    assert whole.status == "completed"
    assert [item.status for item in whole.output] == ["completed", "incomplete"]
    assert [item["status"] for item in folded(events)["output"]] == ["completed", "incomplete"]


def test_log_probabilities_go_with_their_text() -> None:
    entries = [LogprobEntry(text.encode(), -0.5, (TopLogprobEntry(b"x", -1.0),), at) for at, text in enumerate("abc")]
    deltas = [Delta("a", (entries[0],)), Delta("bc", (entries[1], entries[2]))]
    whole, events = written(deltas)
    assert written([join_deltas(deltas)])[0] == whole
    [item] = folded(events)["output"]
    assert [one["token"] for one in item["content"][0]["logprobs"]] == ["a", "b", "c"]
    assert item["content"][0]["logprobs"][0]["top_logprobs"] == [{"token": "x", "logprob": -1.0, "bytes": [120]}]


def test_one_that_fails_says_so_last_with_what_there_was() -> None:
    writer = ResponseWriter(response(), "abc", lambda *_one: None)
    writer.first_events(USAGE)
    writer.push(Delta("half of it"))
    last = EVENT.validate_json(writer.error(503, "the worker is gone"))
    writer.validate()
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error.message == "the worker is gone"
    assert last.response.output_text == "half of it"
    assert last.response.output[0].status == "incomplete"
