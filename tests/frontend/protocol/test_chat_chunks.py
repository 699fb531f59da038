from __future__ import annotations

import json
from functools import partial
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.frontend.output.output import Delta, LogprobEntry
from services.frontend.protocol.chat_chunks import (
    CachedTokensByTier,
    ChatEncoder,
    CompletionEncoder,
    usage_of,
)
from services.frontend.tool_parsers.parse_result import CallPiece
from shared.hashing import pack_tokens

COUNTS = st.integers(min_value=-3, max_value=40)


@given(COUNTS, COUNTS, COUNTS)
def test_the_tiers_make_up_what_was_cached_whatever_a_worker_says(cached: int, host: int, disk: int) -> None:
    tiers = CachedTokensByTier.of(cached, host, disk)
    assert min(tiers.device, tiers.host, tiers.disk) >= 0
    assert tiers.device + tiers.host + tiers.disk == max(0, cached)
    if min(cached, host, disk) >= 0 and host + disk <= cached:
        assert tiers == CachedTokensByTier(cached - host - disk, host, disk)


def test_no_more_of_a_prompt_is_cached_than_there_is() -> None:
    usage = usage_of(10, 3, 16, 12, 1)
    assert usage.prompt_tokens_details.cached_tokens == 10
    assert usage.prompt_tokens_details.cached_tokens_by_tier == CachedTokensByTier(device=0, host=9, disk=1)
    assert usage.total_tokens == 13


def shape(*, parsed: bool, with_logprobs: bool = False, tier: bool = False, index: int = 0) -> ChatEncoder:
    told = partial(ChatEncoder, "r", 7, "m", with_logprobs=with_logprobs, with_usage=False)
    return told(parsed=parsed, tier=tier, index=index)


def choice(payload: bytes) -> Any:
    [only] = json.loads(payload)["choices"]
    return only


BOTH = Delta("so", reasoning="hm", calls=(CallPiece(0, "{", "c0", "f"), CallPiece(1, "", "c1", "g")))


def test_a_chunk_has_what_is_new_and_nothing_else() -> None:
    told = shape(parsed=True)
    assert choice(told.first_chunk())["delta"] == {"role": "assistant", "content": None}
    assert choice(told.delta_chunk(Delta("so"))) == {
        "index": 0,
        "delta": {"content": "so"},
        "logprobs": None,
        "finish_reason": None,
    }
    assert choice(told.delta_chunk(BOTH))["delta"] == {
        "content": "so",
        "reasoning_content": "hm",
        "tool_calls": [
            {"index": 0, "id": "c0", "type": "function", "function": {"name": "f", "arguments": "{"}},
            {"index": 1, "id": "c1", "type": "function", "function": {"name": "g", "arguments": ""}},
        ],
    }
    further = Delta("", calls=(CallPiece(1, "}"),))
    assert choice(told.delta_chunk(further))["delta"] == {"tool_calls": [{"index": 1, "function": {"arguments": "}"}}]}
    assert choice(told.delta_chunk(Delta("")))["delta"] == {"content": ""}, (
        "a chunk that only asks whether somebody listens"
    )


def test_log_probabilities_come_with_any_kind_of_delta() -> None:
    entry = LogprobEntry(b"{", -0.5, (), 0)
    told = choice(shape(parsed=True, with_logprobs=True).delta_chunk(Delta("", (entry,), reasoning="hm")))
    assert told["delta"] == {"reasoning_content": "hm"}
    assert [one["token"] for one in told["logprobs"]["content"]] == ["{"]


def test_a_whole_message_has_calls_and_reasoning_only_if_there_are_any() -> None:
    usage = usage_of(1, 1, 0)
    message = choice(shape(parsed=True).full_body([(BOTH, "tool_calls")], usage))["message"]
    assert (message["content"], message["reasoning_content"]) == ("so", "hm")
    first = {"id": "c0", "type": "function", "function": {"name": "f", "arguments": "{"}}
    assert message["tool_calls"][0] == first
    plain = {"content": "so", "role": "assistant", "refusal": None}
    for parsed in (False, True):
        assert choice(shape(parsed=parsed).full_body([(Delta("so"), "stop")], usage))["message"] == plain
    assert choice(shape(parsed=True).full_body([(Delta(""), "stop")], usage))["message"]["content"] is None


def test_a_chunk_is_of_one_choice_and_an_answer_of_all() -> None:
    told = shape(parsed=True, tier=True, index=2)
    for payload in (told.first_chunk(), told.delta_chunk(Delta("so")), told.delta_chunk(BOTH), told.last_chunk("stop")):
        assert choice(payload)["index"] == 2
        assert json.loads(payload)["service_tier"] == "default"
    assert json.loads(told.frame.keepalive_chunk())["choices"] == []
    whole = json.loads(told.full_body([(Delta("a"), "stop"), (BOTH, "tool_calls")], usage_of(1, 1, 0)))
    told_of = [(one["index"], one["message"]["content"], one["finish_reason"]) for one in whole["choices"]]
    assert told_of == [(0, "a", "stop"), (1, "so", "tool_calls")]
    assert whole["service_tier"] == "default"
    assert "service_tier" not in json.loads(shape(parsed=False).delta_chunk(Delta("so")))


def test_a_completions_chunk_is_of_one_choice_too() -> None:
    told = CompletionEncoder("r", 7, "m", with_logprobs=False, with_usage=True, index=3)
    assert [choice(payload)["index"] for payload in (told.delta_chunk(Delta("so")), told.last_chunk("stop"))] == [3, 3]
    assert json.loads(told.frame.keepalive_chunk())["usage"] is None


def test_token_ids_are_in_each_choice_and_the_prompts_where_vllm_has_them() -> None:
    prompts = [pack_tokens([5, 6]), pack_tokens([7])]
    usage = usage_of(3, 2, 0)
    for with_logprobs in (False, True):
        told = partial(ChatEncoder, "r", 7, "m", with_logprobs=with_logprobs, with_usage=True, prompts=prompts)
        first = json.loads(told(index=0).first_chunk())
        assert (first["prompt_token_ids"], first["usage"], first["choices"][0]["token_ids"]) == ([5, 6], None, [])
        assert "prompt_token_ids" not in json.loads(told(index=1).first_chunk())
        assert choice(told(index=1).delta_chunk(Delta("so", token_ids=(1, 2))))["token_ids"] == [1, 2]
        assert choice(told(index=1).last_chunk("stop"))["token_ids"] == []
        whole = json.loads(told().full_body([(Delta("a", token_ids=(1,)), "stop"), (Delta("b"), "length")], usage))
        assert whole["prompt_token_ids"] == [5, 6]
        assert [one["token_ids"] for one in whole["choices"]] == [[1], []]
        text = partial(CompletionEncoder, "r", 7, "m", with_logprobs=with_logprobs, with_usage=False, prompts=prompts)
        begun = text(index=1).first_chunk()
        assert begun is not None
        assert choice(begun) == {
            **{"index": 1, "text": "", "logprobs": None, "finish_reason": None},
            **{"token_ids": [], "prompt_token_ids": [7]},
        }
        assert choice(text().delta_chunk(Delta("so", token_ids=(1, 2))))["token_ids"] == [1, 2]
        assert choice(text().last_chunk("stop"))["token_ids"] == []
        whole = json.loads(text().full_body([(Delta("a", token_ids=(1,)), "stop"), (Delta("b"), "length")], usage))
        assert [one["prompt_token_ids"] for one in whole["choices"]] == [[5, 6], [7]]
        assert [one["token_ids"] for one in whole["choices"]] == [[1], []]


def test_without_token_ids_there_is_no_field_for_them() -> None:
    told = CompletionEncoder("r", 7, "m", with_logprobs=False, with_usage=False)
    assert told.first_chunk() is None
    plain = shape(parsed=False)
    whole = told.full_body([(Delta("a"), "stop")], usage_of(1, 1, 0))
    assert b"token_ids" not in b"".join((plain.first_chunk(), plain.delta_chunk(Delta("a")), whole))
