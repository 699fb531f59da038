"""vLLM's fields of chats and completions over HTTP, from real processes and a small model's real arithmetic.

The model is random, so `logit_bias` makes it say what a test needs: of a token with a bias of 100 it says nothing else.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.integration.fleet import Fleet, fleet
from tests.integration.stack import eventually
from tests.tiny_model import write_tiny_model
from tests.worker.native.reference import last_hidden_states, logits_of

LIMIT_S = 180.0
START, END = 1, 2
"""<|im_start|>, and <|im_end|>, which ends a sequence."""
HELLO = [{"role": "user", "content": "the mill at the river"}]
WORKERS = ("worker 1", "worker 2")
MANY = 1500
"""Tokens that take seconds on any machine."""
READ_BEFORE = 50
"""Chunks until a worker is killed; far more than that are to come."""
KINDS = ("chat", "completions")


class Choice(NamedTuple):
    """One choice of an answer, whole or put together from its chunks."""

    text: str
    finish: str
    tokens: list[int]
    prompt: list[int]
    """The prompt's tokens, if the choice has them: a completion's."""


class Answer(NamedTuple):
    """The choices, the tokens that `usage` counts, and the prompt's tokens, if the answer has them: a chat's."""

    choices: list[Choice]
    counted: int
    prompt: list[int]


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fields")
    model = write_tiny_model(folder / "tiny", context_length=4096)
    where = ("--namespace", "fields", "--discovery-backend", "file", "--discovery-path", str(folder / "where"))
    with fleet(folder, nats_url, *where) as one:
        one.start("router", "router")
        for name in WORKERS:
            one.start("worker", name, "--model", str(model), "--threads", "1")
        # A busy machine that makes workers look frozen costs attempts, and no request.
        # An engine may take long to start.
        limits = ("--limits-frozen-s", "2.5", "--limits-quiet-s", "0.5", "--limits-attempts", "20")
        one.start("frontend", "frontend", *limits, "--limits-rescue-s", "120")
        one.wait_ready()
        router = one.services["router"]
        eventually(
            lambda: router.metric("headrace_kv_sources") >= len(WORKERS),
            limit_s=LIMIT_S,
            what="the router knows the workers",
        )
        yield one


class Asking:
    """Asks the frontend: each request as a chat or a completion, streamed or not."""

    def __init__(self, url: str, kind: str, *, stream: bool) -> None:
        self.url = url
        self.kind = kind
        self.stream = stream

    def post(self, path: str, **body: Any) -> Any:
        with self._opened(path, body) as answer:
            return json.load(answer)

    def ids(self, text: str) -> list[int]:
        """The tokens of a text."""
        tokens: list[int] = self.post("/tokenize", prompt=text)["tokens"]
        return tokens

    def bias(self, text: str) -> dict[str, int]:
        """Return a bias for the one token of a text, so that the model says it again and again."""
        [token] = self.ids(text)
        return {str(token): 100}

    def ask(self, then: Callable[[], None] = lambda: None, **fields: Any) -> Answer:
        """`then` happens in the middle of a stream."""
        given = {"messages": HELLO} if self.kind == "chat" else {"prompt": "the mill"}
        body = {"temperature": 0, **given, **fields}
        path = "/v1/chat/completions" if self.kind == "chat" else "/v1/completions"
        if not self.stream:
            return _whole(self.post(path, **body))
        chunks: list[Any] = []
        for chunk in self.chunks(path, **body, stream_options={"include_usage": True}):
            chunks.append(chunk)
            if len(chunks) == READ_BEFORE:
                then()
        return _joined(chunks)

    def chunks(self, path: str, **body: Any) -> Iterator[Any]:
        """The chunks of a stream, as they come."""
        with self._opened(path, body | {"stream": True}) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    chunk = json.loads(line[6:])
                    assert "error" not in chunk, chunk
                    yield chunk

    def refused(self, **fields: Any) -> tuple[int, str]:
        with pytest.raises(urllib.error.HTTPError) as refusal:
            self.ask(**fields)
        with refusal.value as answer:
            return answer.code, json.load(answer)["error"]["message"]

    def _opened(self, path: str, body: dict[str, Any]) -> Any:
        content, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", content, headers)
        return urllib.request.urlopen(request, timeout=LIMIT_S)


def _whole(body: Any) -> Answer:
    choices = [
        Choice(
            one["message"]["content"] if "message" in one else one["text"],
            one["finish_reason"],
            one.get("token_ids", []),
            one.get("prompt_token_ids", []),
        )
        for one in body["choices"]
    ]
    return Answer(choices, body["usage"]["completion_tokens"], body.get("prompt_token_ids", []))


def _joined(chunks: list[Any]) -> Answer:
    found: dict[int, Choice] = {}
    prompt: list[int] = []
    counted = 0
    for chunk in chunks:
        prompt += chunk.get("prompt_token_ids", [])
        counted = (chunk["usage"] or {"completion_tokens": counted})["completion_tokens"]
        for one in chunk["choices"]:
            so_far = found.get(one["index"], Choice("", "", [], []))
            found[one["index"]] = Choice(
                so_far.text + ((one["delta"].get("content") or "") if "delta" in one else one["text"]),
                one["finish_reason"] or so_far.finish,
                so_far.tokens + one.get("token_ids", []),
                so_far.prompt + one.get("prompt_token_ids", []),
            )
    return Answer([found[index] for index in sorted(found)], counted, prompt)


@pytest.fixture(params=[(kind, stream) for kind in KINDS for stream in (False, True)], ids=str)
def asking(request: pytest.FixtureRequest, services: Fleet) -> Asking:
    kind, stream = request.param
    return Asking(services.services["frontend"].url, kind, stream=stream)


def test_no_end_of_sequence_comes_before_the_least_tokens(asking: Asking) -> None:
    ends: dict[str, Any] = {"logit_bias": {END: 100}, "max_tokens": 40, "n": 2, "return_token_ids": True}
    for choice in asking.ask(**ends).choices:
        assert (choice.tokens, choice.finish) == ([END], "stop")
    answer = asking.ask(**ends, min_tokens=9, temperature=1)
    for choice in answer.choices:
        assert len(choice.tokens) == 10
        assert choice.tokens.index(END) == 9
        assert choice.finish == "stop"
    assert answer.counted == 20
    assert asking.ask(**{**ends, "max_tokens": 9}, min_tokens=9).choices[0].finish == "length"


def test_no_stop_token_comes_before_the_least_tokens_and_no_stop_string_counts(asking: Asking) -> None:
    says: dict[str, Any] = {"logit_bias": asking.bias("a"), "max_tokens": 40, "n": 2}
    [stop] = asking.ids("a")
    for choice in asking.ask(**says, stop_token_ids=[stop], min_tokens=5, return_token_ids=True).choices:
        assert choice.tokens.index(stop) == 5
        assert len(choice.tokens) == 6
    for least, text in ((0, ""), (2, "a"), (5, "aaaa")):
        answer = asking.ask(**says, stop="aa", min_tokens=least)
        assert [choice.text for choice in answer.choices] == [text] * 2
        assert answer.counted == 2 * (len(text) + 2)


def test_a_grammar_that_allows_only_the_end_ends_the_answer(asking: Asking) -> None:
    answer = asking.ask(structured_outputs={"choice": ["mill"]}, min_tokens=30, max_tokens=40)
    assert [choice.text for choice in answer.choices] == ["mill"]
    assert answer.choices[0].finish == "stop"


def test_more_least_tokens_than_may_come_are_refused_by_both_names(asking: Asking) -> None:
    status, message = asking.refused(min_tokens=9, max_tokens=8)
    assert status == 400
    assert "min_tokens" in message
    assert "max_tokens" in message
    status, message = asking.refused(min_tokens=100_000)
    assert (status, "min_tokens" in message) == (400, True)


def test_special_tokens_are_in_the_text_where_that_is_asked_for(asking: Asking) -> None:
    says: dict[str, Any] = {"logit_bias": {START: 100}, "max_tokens": 3, "n": 2, "return_token_ids": True}
    for skip, text in ((True, ""), (None, ""), (False, "<|im_start|>" * 3)):
        for choice in asking.ask(**says, skip_special_tokens=skip, spaces_between_special_tokens=False).choices:
            assert (choice.text, choice.tokens) == (text, [START] * 3)


def test_what_ended_the_answer_stays_in_it_where_that_is_asked_for(asking: Asking) -> None:
    says: dict[str, Any] = {"logit_bias": asking.bias("a"), "max_tokens": 40, "n": 2}
    [token] = asking.ids("a")
    for included, string, stop in ((False, "", ""), (True, "aaa", "a")):
        kept: dict[str, Any] = {"include_stop_str_in_output": included}
        assert [one.text for one in asking.ask(**says, **kept, stop=["aaa"]).choices] == [string] * 2
        assert [one.text for one in asking.ask(**says, **kept, stop_token_ids=[token]).choices] == [stop] * 2
    ends: dict[str, Any] = {"logit_bias": {END: 100}, "max_tokens": 40, "include_stop_str_in_output": True}
    assert [one.text for one in asking.ask(**ends).choices] == [""]
    assert [one.text for one in asking.ask(**ends, skip_special_tokens=False).choices] == ["<|im_end|>"]


def test_token_ids_are_the_prompts_and_those_of_the_answer(asking: Asking) -> None:
    answer = asking.ask(max_tokens=20, n=2, return_token_ids=True, ignore_eos=True)
    body = {"messages": HELLO} if asking.kind == "chat" else {"prompt": "the mill"}
    prompt = asking.post("/tokenize", **body)["tokens"]
    if asking.kind == "chat":
        assert (answer.prompt, [choice.prompt for choice in answer.choices]) == (prompt, [[], []])
    else:
        assert (answer.prompt, [choice.prompt for choice in answer.choices]) == ([], [prompt, prompt])
    for choice in answer.choices:
        assert len(choice.tokens) == 20
        shown = [token for token in choice.tokens if token > END]
        assert asking.post("/detokenize", tokens=shown)["prompt"] == choice.text
    without = asking.ask(max_tokens=2)
    assert (without.prompt, without.choices[0].tokens, without.choices[0].prompt) == ([], [], [])


def test_a_prompt_is_cut_to_its_last_tokens(asking: Asking) -> None:
    def prompt(**fields: Any) -> list[int]:
        answer = asking.ask(max_tokens=1, return_token_ids=True, **fields)
        return answer.prompt or answer.choices[0].prompt

    whole = prompt()
    assert prompt(truncate_prompt_tokens=5) == whole[-5:]
    assert prompt(truncate_prompt_tokens=-1) == prompt(truncate_prompt_tokens=4095) == whole
    text = "the mill " * 4000
    long = {"messages": [{"role": "user", "content": text}]} if asking.kind == "chat" else {"prompt": text}
    assert len(prompt(**long, truncate_prompt_tokens=-1)) == 4095
    status, message = asking.refused(truncate_prompt_tokens=4096)
    assert (status, "truncate_prompt_tokens" in message) == (400, True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_says_where_its_prompt_ends(services: Fleet, stream: bool) -> None:
    asking = Asking(services.services["frontend"].url, "chat", stream=stream)
    turns = [*HELLO, {"role": "assistant", "content": "turns and "}]
    before = "<|im_start|>user\nthe mill at the river<|im_end|>\n<|im_start|>assistant\nturns and "
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, before + "<|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": False}, before + "<|im_end|>\n"),
        ({"continue_final_message": True}, before),
        ({"continue_final_message": True, "add_generation_prompt": False}, before),
    ]
    for fields, text in cases:
        answer = asking.ask(messages=turns, max_tokens=3, n=2, return_token_ids=True, **fields)
        assert asking.post("/detokenize", tokens=answer.prompt)["prompt"] == text
        assert asking.post("/tokenize", messages=turns, **fields)["tokens"] == answer.prompt
        assert len(answer.choices) == 2
    status, message = asking.refused(messages=turns, continue_final_message=True, add_generation_prompt=True)
    assert status == 400
    assert "continue_final_message" in message
    assert "add_generation_prompt" in message


def test_the_least_tokens_are_counted_over_a_worker_that_is_killed(services: Fleet) -> None:
    asking = Asking(services.services["frontend"].url, "completions", stream=True)
    fields: dict[str, Any] = {"logit_bias": {END: 100}, "max_tokens": 2000, "temperature": 0.9, "seed": 7}
    fields |= {"min_tokens": MANY, "return_token_ids": True}
    [undisturbed] = asking.ask(**fields).choices
    services.wait_idle(*WORKERS)

    def kill() -> None:
        with services.busiest(*WORKERS) as worker:
            worker.kill()

    frontend = services.services["frontend"]
    before = frontend.metric("headrace_model_migration_total")
    [choice] = asking.ask(kill, **fields).choices
    assert frontend.metric("headrace_model_migration_total") > before
    assert choice.tokens.index(END) == MANY
    assert choice == undisturbed


def _logprobs(chunks: Iterable[Any]) -> dict[str, list[Any]]:
    """The log-probabilities of one choice, joined from its chunks or from the one whole answer."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["logprobs"] is not None]
    return {
        name: [value for choice in choices for value in choice["logprobs"][name]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_prompt_are_those_of_the_model_each_time(
    services: Fleet, tmp_path: Path, stream: bool
) -> None:
    model = write_tiny_model(tmp_path / "tiny", context_length=4096)
    prompt = [3 + (index * index + index // 7) % 317 for index in range(500)]
    logits = logits_of(model, last_hidden_states(model, prompt))
    shifted = logits - logits.max(axis=1, keepdims=True)
    expected = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    asking = Asking(services.services["frontend"].url, "completions", stream=stream)
    body = {"prompt": prompt, "echo": True, "logprobs": 2, "temperature": 0, "ignore_eos": True}

    def ask(max_tokens: int, **fields: Any) -> dict[str, list[Any]]:
        given = body | {"max_tokens": max_tokens} | fields
        whole = asking.chunks("/v1/completions", **given) if stream else [asking.post("/v1/completions", **given)]
        return _logprobs(whole)

    scored = ask(3)
    assert len(scored["token_logprobs"]) == len(prompt) + 3
    assert scored["token_logprobs"][0] is scored["top_logprobs"][0] is None
    own = [expected[at, token] for at, token in enumerate(prompt[1:])]
    assert scored["token_logprobs"][1 : len(prompt)] == pytest.approx(own, rel=2e-5, abs=1e-4)
    best = [max(top.values()) for top in scored["top_logprobs"][1 : len(prompt)]]
    assert best == pytest.approx(expected[:-1].max(axis=1).tolist(), rel=2e-5, abs=1e-4)
    assert ask(3)["token_logprobs"][1:] == pytest.approx(scored["token_logprobs"][1:], abs=1e-3), "now it is cached"
    assert ask(0)["token_logprobs"][1:] == pytest.approx(scored["token_logprobs"][1 : len(prompt)], abs=1e-3)
    ended = ask(5, ignore_eos=False, logit_bias={END: 100})
    assert ended["tokens"] == [*scored["tokens"][: len(prompt)], "<|im_end|>"], "programs drop the last one"
