"""Our attempts as requests to a vLLM server, and its lines as outputs."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import fields

from services.worker.attached.api import ServerOutput
from services.worker.attached.vllm_api import ROWS, VLLM
from services.worker.config import AttachedConfig
from services.worker.contracts.messages import Submit
from shared.errors import ConfigError, InvalidRequest
from shared.hashing import pack_tokens, unpack_tokens
from shared.messages.generate import Sampling

FULL = Sampling(
    max_tokens=9,
    min_tokens=4,
    temperature=0.5,
    top_p=0.4,
    top_k=3,
    min_p=0.1,
    seed=7,
    presence_penalty=1.0,
    frequency_penalty=-1.0,
    repetition_penalty=1.5,
    logprobs=2,
    stop_token_ids=(7,),
    ignore_eos=True,
    logit_bias=((3, -100.0),),
    grammar="start: /a/",
    allowed_tokens=pack_tokens([3, 4]),
)


def submit(sampling: Sampling, **more: object) -> Submit:
    return Submit("r", 1, "f", pack_tokens([1, 2, 3]), 3, sampling, 9.0, **more)  # type: ignore[arg-type]


def params(sampling: Sampling, continued: int = 0) -> dict[str, object]:
    found: dict[str, object] = {}
    for row in ROWS.values():
        found |= row(sampling, continued)
    return found


def test_each_field_has_a_row() -> None:
    assert ROWS.keys() == {field.name for field in fields(Sampling)}


def test_each_field_arrives() -> None:
    same = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    wanted: dict[str, object] = {name: getattr(FULL, name) for name in (*same, "stop_token_ids", "ignore_eos")}
    wanted |= {"max_tokens": 9, "min_tokens": 4, "seed": 7, "logprobs": 2, "logit_bias": {"3": -100.0}}
    wanted |= {"structured_outputs": {"grammar": "start: /a/"}, "allowed_token_ids": [3, 4]}
    assert params(FULL) == wanted
    later = params(FULL, continued=5)
    assert (later["max_tokens"], later["min_tokens"]) == (4, 0)
    assert later["seed"] != 7
    assert params(Sampling(max_tokens=1))["logprobs"] is None


def test_a_grammar_of_another_form_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"^sampling\.grammar: "):
        params(Sampling(max_tokens=1, grammar='{"no": 1}'))


def test_a_body_has_salt_and_priority_where_they_are_wanted() -> None:
    plain = VLLM.body(submit(FULL, priority=3), AttachedConfig(), "m", {"seed": 1})
    assert plain == {
        "model": "m",
        "prompt": [1, 2, 3],
        "stream": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "seed": 1,
    }
    salted = VLLM.body(submit(FULL, priority=3, salt="s"), AttachedConfig(priorities=True), "m", {})
    assert (salted["cache_salt"], salted["priority"]) == ("s", -3)


def test_lines_become_outputs() -> None:
    def read(line: object) -> ServerOutput:
        return VLLM.read(msgspec.json.encode(line), submit(FULL), 0)

    assert read({"choices": [{"text": "a", "token_ids": [5, 6]}]}) == ServerOutput([5, 6])
    assert read({"choices": [{"token_ids": [], "finish_reason": "stop"}]}) == ServerOutput([], "stop")
    assert read({"choices": [{"token_ids": [], "finish_reason": "abort"}]}).finish == "abort by the server"
    assert read({"choices": [], "usage": {}}) == ServerOutput()
    for code in (500, "500", None, "rate_limit_exceeded", 429):
        assert read({"error": {"message": "broken", "code": code}}) == ServerOutput(error="broken")
    assert read({"error": {}}) == ServerOutput(error="an error without a message")
    for code in (400, "400", 422):
        with pytest.raises(InvalidRequest, match="no such"):
            read({"error": {"message": "no such", "code": code}})
    with pytest.raises(ConfigError, match=r"attached\.url: the server answers text for token ids"):
        read({"choices": [{"text": "a"}]})
    with pytest.raises(msgspec.MsgspecError):
        read(["what"])


def test_logprobs_name_the_likeliest_tokens_without_the_drawn_one() -> None:
    logprobs = {
        "tokens": ["token_id:5"],
        "token_logprobs": [-3.0],
        "top_logprobs": [{"token_id:5": -3.0, "token_id:8": -0.5, "token_id:9": -1.0}],
    }
    line = {"choices": [{"token_ids": [5], "logprobs": logprobs}]}
    (entry,) = VLLM.read(msgspec.json.encode(line), submit(FULL), 0).logprobs or ()
    assert (entry.logprob, unpack_tokens(entry.top_tokens), entry.top_logprobs) == (-3.0, [8, 9], (-0.5, -1.0))
