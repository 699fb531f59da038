"""What a body asks of its answers, in one record, and the sampling parameters of its choices."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.frontend.protocol.chat import ChatRequest, decode_chat
from services.frontend.protocol.completions import CompletionRequest, decode_completion
from services.frontend.protocol.text_plan import TextRequest, plan_of, sampling_of
from shared.errors import InvalidRequest
from shared.hashing import pack_tokens
from shared.messages.generate import Sampling


def chat(**fields: Any) -> ChatRequest:
    return decode_chat(json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return decode_completion(json.dumps({"prompt": "x", **fields}).encode())


def sampling(request: TextRequest, max_tokens: int, drawn_seed: int) -> Sampling:
    return sampling_of(request, plan_of(request), max_tokens, drawn_seed)


def test_defaults_are_openais() -> None:
    assert sampling(chat(), 5, 77) == Sampling(5, seed=77)
    assert (plan_of(chat()).max_tokens, plan_of(chat()).limit_param) == (None, "max_tokens")


def test_the_tokens_that_alone_may_be_drawn_are_packed() -> None:
    assert sampling(chat(allowed_token_ids=[7, 3]), 1, 0).allowed_tokens == pack_tokens([7, 3])


def test_a_top_k_of_minus_one_is_off_as_vllm_has_it() -> None:
    assert sampling(chat(top_k=-1), 1, 0).top_k == 0


def test_a_bias_is_of_a_token_id() -> None:
    assert sampling(chat(logit_bias={"5": -100, "0": 0.5}), 1, 0).logit_bias == ((5, -100.0), (0, 0.5))
    assert sampling(chat(logit_bias={}), 1, 0).logit_bias == ()


def test_seeds_are_64_bits_and_zero_is_one() -> None:
    assert sampling(chat(seed=0), 1, 77).seed == 0
    assert sampling(chat(seed=-2), 1, 77).seed == (1 << 64) - 2


def test_a_seed_of_minus_one_is_drawn_as_vllm_and_ollama_have_it() -> None:
    assert sampling(chat(seed=-1), 1, 77).seed == 77


def test_a_top_p_of_zero_leaves_the_likeliest_token() -> None:
    assert 0 < sampling(chat(top_p=0), 1, 0).top_p < 1e-5


def test_a_stop_is_one_string_or_several() -> None:
    assert plan_of(chat(stop="a")).stops == ("a",)
    assert plan_of(chat(stop=["a", "b"])).stops == ("a", "b")
    assert plan_of(chat(stop=[])).stops == plan_of(chat()).stops == ()
    assert len(plan_of(chat(stop=[f"{number:016}" for number in range(256)])).stops) == 256


def test_logprobs_become_one_number() -> None:
    assert [plan_of(chat(logprobs=flag)).logprobs for flag in (None, False, True)] == [-1, -1, 0]
    assert plan_of(chat(logprobs=True, top_logprobs=4)).logprobs == 4


def test_logprobs_of_a_completion_are_a_number() -> None:
    assert [plan_of(completion(logprobs=count)).logprobs for count in (None, 0, 5)] == [-1, 0, 5]


def test_the_prompts_tokens_in_one_answer_are_bounded() -> None:
    """A chat's answer names those of its one prompt once, a completion's in each choice."""
    two = CompletionRequest(prompt="x", n=2, return_token_ids=True)
    for request, most in ((chat(n=2, return_token_ids=True), 128 << 10), (two, 64 << 10)):
        plan_of(request).check_prompt_ids(most)
        with pytest.raises(InvalidRequest) as refusal:
            plan_of(request).check_prompt_ids(most + 1)
        assert refusal.value.param == "return_token_ids"
    plan_of(CompletionRequest(prompt="x", n=2)).check_prompt_ids(1 << 20)


def test_a_body_without_options_asks_for_nothing_special() -> None:
    for plan in (plan_of(chat()), plan_of(completion())):
        assert (plan.count, plan.max_tokens, plan.min_tokens, plan.logprobs, plan.stops) == (1, None, 0, -1, ())
        flags = {name: value for name in plan.__struct_fields__ if (value := getattr(plan, name)) is True}
        assert flags in ({}, {"is_chat": True})


def test_the_usage_of_each_chunk_is_only_asked_for_with_the_usage() -> None:
    def usage(**options: bool) -> tuple[bool, bool]:
        plan = plan_of(chat(stream=True, stream_options=options))
        return plan.with_usage, plan.each_usage

    assert usage() == usage(continuous_usage_stats=True) == (False, False)
    assert usage(include_usage=True) == (True, False)
    assert usage(include_usage=True, continuous_usage_stats=True) == (True, True)


def test_a_prompt_may_be_all_that_is_asked_for_and_have_log_probabilities() -> None:
    assert plan_of(completion(max_tokens=0, echo=True)).prompt_only
    assert not plan_of(completion(echo=True)).prompt_only
    assert plan_of(completion(echo=True, logprobs=0)).prompt_logprobs
    assert not plan_of(completion(logprobs=0)).prompt_logprobs
    assert not plan_of(chat(logprobs=True)).prompt_logprobs
