"""Several choices read as one: what each would have been alone, at this module, and at a whole frontend's doors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from struct import pack
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from services.frontend.config import LimitsConfig
from services.frontend.metrics import Metrics
from services.frontend.output.detokenize import TokenBytes
from services.frontend.output.output import Output
from services.frontend.requests.actions import Fail, Finish
from services.frontend.requests.events import PartReceived
from services.frontend.requests.session import Session
from services.frontend.requests.stream import InferenceRequest, Stream, StreamSelector
from services.frontend.server.routes import CLIENT_GONE
from services.frontend.serving.choices import Choices, open_choices
from shared import subjects
from shared.bus.memory_bus import MemoryBus
from shared.errors import RequestTimeout, Unavailable
from shared.hashing import pack_tokens
from shared.messages.frames import Part, PromptLogprobs, TokenLogprob
from shared.messages.generate import Accepted, Cancel, Generate, Refused, Sampling
from shared.messages.select import Overlap, Selected, SelectRefused
from tests.frontend.peers import DEADLINE_S, MODEL, NAMESPACE, World, clients, world

METRICS = Metrics(CollectorRegistry()).of_model("m")
TOKENS = TokenBytes([b"a", b"b", b"\xc3", b"\xa9"], [b"a", b"b", b"\xc3", b"\xa9"], False)
"""The last two are one character together: the first of them brings no text."""
LIMIT = 30
HELLO: Any = [{"role": "user", "content": "hello"}]


def requested(index: int) -> InferenceRequest:
    return InferenceRequest(
        f"r/{index}", "m", b"", 3, b"", Sampling(LIMIT), "", "", deadline=0.0, output=Output(TOKENS, ("bab",))
    )


class Asked:
    """Opens streams, and is their service: a session a stream, to which tokens come as from a worker."""

    def __init__(self) -> None:
        self.streams: dict[str, Stream] = {}
        self.left: list[str] = []

    @contextmanager
    def open(self, request: InferenceRequest, selector: StreamSelector) -> Iterator[Stream]:
        session = Session(request.id, LIMIT)
        session.start()
        session.on(Selected(request.id, 1, "w", 0, "r", Overlap(), ""))
        stream = self.streams[request.id] = Stream(request, session, METRICS, selector)
        try:
            yield stream
        finally:
            self.left.append(request.id)

    def bring(self, request: str, token: int) -> list[int]:
        """Pass a token to a request; return the tokens that it took."""
        stream = self.streams.get(request)
        if stream is None or stream.ended or len(stream.session.tokens) == LIMIT:
            return []
        stream.session.on(PartReceived("w", Part(request, 1, len(stream.session.tokens), pack_tokens([token]), None)))
        if stream.add_tokens([token], None):
            stream.end(Finish("stop"))
        return [token]

    def end(self, request: str) -> None:
        stream = self.streams.get(request)
        if stream is not None and not stream.ended:
            stream.end(Finish("length"))


Happening = tuple[int, int]
"""A choice, and one of its tokens, or 4 for its end. For any choice, 5 is a turn of the reader, 6 a client that does
not read, 7 a client that has read everything."""


@settings(max_examples=200)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 8), st.sampled_from([0, 0, 1, 1, 2, 3, 4, 5, 5, 6, 7])), max_size=80),
)
def test_each_choice_is_what_it_would_have_been_alone(each: list[int], happenings: list[Happening]) -> None:
    asyncio.run(_together_and_alone(each, happenings))


async def _together_and_alone(each: Sequence[int], happenings: Sequence[Happening]) -> None:
    count, asked, ready, writing = sum(each), Asked(), True, False
    got, ends, brought = [""] * count, [0] * count, [list[int]() for _ in range(count)]
    prompts = [[requested(sum(each[:at]) + index) for index in range(many)] for at, many in enumerate(each)]

    def send(index: int, text: bytes) -> bool:
        assert not writing, "an event in the middle of another one"
        if ready:
            got[index] += text.decode()
        return ready

    async def read(choices: Choices) -> None:
        nonlocal writing
        async for index, delta in choices:
            choices.validate()
            writing = True
            await asyncio.sleep(0)
            writing = False
            if delta is None:
                ends[index] += 1
                continue
            got[index] += delta.text
            choices.streams[index].send_directly(lambda more: more.text.encode(), partial(send, index))

    with open_choices(asked.open, prompts) as choices:
        reading = asyncio.create_task(read(choices))
        await asyncio.sleep(0)
        for at, what in happenings:
            if what < 4:
                brought[at % count] += asked.bring(f"r/{at % count}", what)
            elif what == 4:
                asked.end(f"r/{at % count}")
            elif what == 5:
                await asyncio.sleep(0)
            else:
                ready = what == 7
            choices.validate()
        while not reading.done():
            for request in [*asked.streams]:
                asked.end(request)
            await asyncio.sleep(0)
    assert ends == [1] * count
    assert sorted(asked.left) == sorted(f"r/{index}" for index in range(count))
    for index, tokens in enumerate(brought):
        alone = Asked()
        with open_choices(alone.open, [[requested(index)]]) as one:
            for token in tokens:
                alone.bring(f"r/{index}", token)
            alone.end(f"r/{index}")
            assert got[index] == "".join([delta.text async for _, delta in one if delta is not None])
            assert choices.streams[index].finish == one.streams[0].finish
            assert choices.streams[index].usage == one.streams[0].usage
    assert choices.usage.prompt_tokens == 3 * len(each)
    assert choices.usage.completion_tokens == sum(stream.usage.completion_tokens for stream in choices.streams.values())


async def test_the_others_are_asked_for_with_the_first_token_even_if_it_brings_no_text() -> None:
    asked = Asked()

    async def first(choices: Choices) -> int:
        async for index, _ in choices:
            return index
        return -1

    with open_choices(asked.open, [[requested(0), requested(1)], [requested(2)]]) as choices:
        reading = asyncio.create_task(first(choices))
        await asyncio.sleep(0)
        assert sorted(asked.streams) == ["r/0", "r/2"]
        asked.bring("r/0", 2)
        await asyncio.sleep(0)
        assert sorted(asked.streams) == ["r/0", "r/1", "r/2"]
        asked.bring("r/1", 0)
        assert await reading == 1


async def test_a_choice_that_failed_ends_them_all() -> None:
    asked = Asked()
    with open_choices(asked.open, [[requested(0)], [requested(1)]]) as choices:
        asked.bring("r/0", 0)
        asked.streams["r/1"].end(Fail(Unavailable("gone")))
        with pytest.raises(Unavailable, match="gone"):
            async for _ in choices:
                pass
        assert choices.errors
        assert not any(isinstance(error, RequestTimeout) for error in choices.errors)
    assert sorted(asked.left) == ["r/0", "r/1"]


# --- at a whole frontend


async def _three(w: World, first: Sequence[int] = ()) -> list[Generate]:
    """A request's three choices at the first worker, the first of which has had a token."""
    worker = w.workers[0]
    [leader] = await worker.generates.at_least(1)
    assert len(worker.generates.all) == 1, "the others wait until the prompt is computed"
    await worker.send(leader, 0, first or w.ids("a"))
    return (await worker.generates.at_least(3))[:3]


async def test_three_choices_are_three_requests_to_the_workers_and_one_to_the_client(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        worker = w.workers[0]
        worker.output, worker.cached_tokens = None, 16
        asking = asyncio.create_task(
            client.chat.completions.create(model=MODEL, messages=HELLO, n=3, seed=-2, stop="!", service_tier="flex")
        )
        generates = await _three(w)
        assert [one.sampling.seed for one in generates] == [(1 << 64) - 2, (1 << 64) - 1, 0]
        assert len({one.tokens for one in generates}) == 1
        name = generates[0].request.removesuffix("/0")
        assert [one.request for one in generates] == [f"{name}/{index}" for index in range(3)]
        assert {(select.session, select.request.partition("/")[0]) for select in w.router.asked.all} == {
            (f"{name}/0", name)
        }
        waits = [select.wait_limit_s for select in w.router.asked.all]
        assert waits == [60.0, 0.0, 0.0], "a follower is not refused for its wait"
        assert w.metric("headrace_input_sequence_tokens_count") == 1
        worker.cached_tokens = 0
        await worker.send(generates[2], 0, w.ids("c!x"))
        await worker.send(generates[1], 0, w.ids("bb"), "length")
        await worker.send(generates[0], 1, [*w.ids("aa"), 2], "stop")
        answer = await asking
        assert [(one.index, one.message.content, one.finish_reason) for one in answer.choices] == [
            (0, "aaa", "stop"),
            (1, "bb", "length"),
            (2, "c", "stop"),
        ]
        assert (answer.id, answer.service_tier) == (f"chatcmpl-{name}", "default")
        assert answer.usage is not None
        produced = len(w.ids("a") + w.ids("aa") + w.ids("bb") + w.ids("c!")) + 1
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (generates[0].prompt_tokens, produced)
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 16, "of the first"


async def test_a_streamed_choice_has_its_index_its_role_and_its_end(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        worker = w.workers[0]
        worker.output = None
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        asking = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=HELLO, n=3, **options))
        generates = await _three(w)
        stream = await asking
        for at, token in enumerate(w.ids(" and so on")):
            for choice in (2, 1, 0):
                await worker.send(generates[choice], at + (choice == 0), [token])
        for choice in (1, 0, 2):
            count = len(w.ids(" and so on")) + (choice == 0)
            await worker.send(generates[choice], count, [*w.ids("xyz"[choice]), 2], "stop")
        texts, ends, chunks = [""] * 3, list[int](), [chunk async for chunk in stream]
        roles = [0] * 3
        for chunk in chunks[:-1]:
            [choice] = chunk.choices
            assert choice.index not in ends
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role == "assistant"
            if choice.finish_reason is not None:
                ends.append(choice.index)
        assert texts == ["a and so onx", " and so ony", " and so onz"]
        assert sorted(ends) == [0, 1, 2]
        assert roles == [1, 1, 1]
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 3 * len(w.ids(" and so on")) + 1 + 3 * 2
        assert len({chunk.id for chunk in chunks}) == 1


async def test_prompts_of_every_kind_go_at_once_and_are_answered_in_their_order(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        worker = w.workers[0]
        worker.output = None
        body = {"model": MODEL, "prompt": ["one", [5, 6, 7], "three"], "n": 2, "seed": 4, "max_tokens": 3}
        asking = asyncio.create_task(http.post("/v1/completions", json=body))
        leaders = (await worker.generates.at_least(3))[:3]
        packed = [pack_tokens(w.ids("one")), pack_tokens([5, 6, 7]), pack_tokens(w.ids("three"))]
        by_name = {one.request.partition("/")[2]: one for one in leaders}
        assert [by_name[name].tokens for name in ("0", "2", "4")] == packed
        for one in leaders:
            await worker.send(one, 0, w.ids("a"))
        for one in await worker.generates.at_least(6):
            by_name[one.request.partition("/")[2]] = one
        assert sorted(by_name) == [str(index) for index in range(6)]
        assert [by_name[str(index)].tokens for index in range(6)] == [one for one in packed for _ in (0, 1)]
        assert [by_name[str(index)].sampling.seed for index in range(6)] == [4, 5] * 3
        for name, one in reversed(by_name.items()):
            await worker.send(one, int(one in leaders), w.ids(name), "length")
        answer = await (await asking).json()
        told = [(one["index"], one["text"], one["finish_reason"]) for one in answer["choices"]]
        assert told == [(index, ("a" if index % 2 == 0 else "") + str(index), "length") for index in range(6)]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, packed)) // 4
        waits = {select.request.partition("/")[2]: select.wait_limit_s for select in w.router.asked.all}
        assert waits == {"0": 60.0, **dict.fromkeys("12345", 0.0)}, "they wait for one another"
        assert w.metric("headrace_input_sequence_tokens_count") == len(packed)


async def test_log_probabilities_are_of_their_choice(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        worker, tokens = w.workers[0], w.say("ab")
        worker.logprobs = [TokenLogprob(-0.5, b"", ()) for _ in (*tokens, 2)]
        answer = await client.completions.create(model=MODEL, prompt=["x", "y"], logprobs=0)
        for choice in answer.choices:
            assert choice.logprobs is not None
            assert choice.logprobs.token_logprobs == [-0.5] * (len(tokens) + 1), "one is of the token that ends it"


def of_prompt(first: int, *values: float) -> PromptLogprobs:
    """Log probabilities of prompt tokens, each token the likeliest itself."""
    packed = pack(f"<{len(values)}f", *values)
    return PromptLogprobs(first, packed, pack_tokens([7] * len(values)), packed)


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_a_prompt_survive_the_loss_of_a_worker(directory: Path, stream: bool) -> None:
    async with world(directory, prompt_logprobs=True) as w, clients(w) as (_, http):
        first, second = w.workers
        first.output = second.output = None
        prompt = w.ids("a b c d")
        body = {"model": MODEL, "prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 2, "stream": stream}
        asking = asyncio.create_task(http.post("/v1/completions", json=body))
        [one] = await first.generates.at_least(1)
        assert (one.sampling.prompt_logprobs, w.router.asked.all[0].hashes) == (1, b"")
        values = [-float(at) for at in range(1, len(prompt))]
        await first.send(one, 0, (), prompt_logprobs=of_prompt(1, *values[:2]))
        await first.send(one, 0, (), "error", "the engine was lost")
        [two] = await second.generates.at_least(1)
        assert two.sampling.prompt_logprobs == 1
        await second.send(two, 0, (), prompt_logprobs=of_prompt(1, *values))
        second.logprobs = [TokenLogprob(-0.5, b"", ()), TokenLogprob(-0.25, b"", ())]
        await second.send(two, 0, w.ids("a"))
        await second.send(two, 1, w.ids("b"), "length")
        answer = await asking
        if stream:
            events = [line[6:] for line in (await answer.text()).split("\n\n") if line.startswith("data: {")]
            found = [json.loads(event)["choices"][0] for event in events]
        else:
            found = (await answer.json())["choices"]
        parts = [choice["logprobs"] for choice in found if choice["logprobs"] is not None]
        assert [value for one in parts for value in one["token_logprobs"]] == [None, *values, -0.5, -0.25]
        offsets = [value for one in parts for value in one["text_offset"]]
        text = "".join(choice["text"] for choice in found)
        tokens = [value for one in parts for value in one["tokens"]]
        assert [text[offset : offset + len(token)] for offset, token in zip(offsets, tokens, strict=True)] == tokens
        likeliest = [value for one in parts for value in one["top_logprobs"]]
        assert likeliest[0] is None
        assert len(likeliest) == len(prompt) + 2


async def test_a_prompt_alone_costs_no_token_of_an_answer(directory: Path) -> None:
    async with world(directory, prompt_logprobs=True) as w, clients(w) as (_, http):
        worker = w.workers[0]
        worker.output = None
        body = {"model": MODEL, "prompt": "a b", "echo": True, "max_tokens": 0}
        asking = asyncio.create_task(http.post("/v1/completions", json=body))
        [one] = await worker.generates.at_least(1)
        assert (one.sampling.max_tokens, one.sampling.prompt_logprobs) == (1, -1)
        await worker.send(one, 0, w.ids("c"), "length")
        answer = await (await asking).json()
        [choice] = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("a b", "length")
        assert answer["usage"]["completion_tokens"] == 0


async def test_too_many_log_probabilities_of_prompts_are_refused(directory: Path) -> None:
    async with world(directory, prompt_logprobs=True) as w, clients(w) as (_, http):
        body = {
            "model": MODEL,
            "prompt": [w.ids("a") * 110] * 128,
            "echo": True,
            "logprobs": 20,
            "max_tokens": 1,
        }
        answer = await http.post("/v1/completions", json=body)
        error = (await answer.json())["error"]
        assert (answer.status, error["param"]) == (400, "logprobs")


async def test_a_client_that_goes_cancels_all_its_choices(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        worker = w.workers[0]
        worker.output = None
        body = {"model": MODEL, "prompt": "x", "n": 3, "stream": True}
        asking = asyncio.create_task(http.post("/v1/completions", json=body))
        generates = await _three(w)
        (await asking).close()
        for one in generates:
            await worker.cancels.until(Cancel(one.request, 1))
        await w.counted("headrace_inflight_requests", 0)
        status = str(CLIENT_GONE)
        assert w.metric("headrace_requests_total", operation="completions", status=status) == 1


async def test_one_choice_that_fails_for_good_ends_the_request_and_the_others(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        worker = w.workers[0]
        worker.output = None
        worker.answer = lambda one: (
            Refused(one.request, one.attempt, "bad_request", "so it says")
            if one.request.endswith("/1")
            else Accepted(one.request, one.attempt)
        )
        asking = asyncio.create_task(http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "n": 3}))
        generates = await _three(w)
        response = await asking
        assert response.status == 400
        assert "so it says" in (await response.json())["error"]["message"]
        for one in (generates[0], generates[2]):
            await worker.cancels.until(Cancel(one.request, 1))


async def test_a_first_choice_that_fails_before_its_first_token_is_the_only_one_asked_for(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        w.router.answer = lambda one: SelectRefused(one.request, one.attempt, "overloaded", "busy", retry_after_s=2)
        async with http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "n": 3}) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "2")
        # A router that is late on a busy machine is asked again.
        assert len({one.request for one in w.router.asked.all}) == 1


async def test_choices_come_over_nats_too(directory: Path) -> None:
    async with world(directory) as w:
        w.say("fine")
        body = {"model": MODEL, "prompt": ["x", "y"], "n": 2, "stream": True}
        subject = subjects.client(NAMESPACE, "completions")
        texts, ends = [""] * 4, 0
        async with MemoryBus(w.broker).stream(subject, json.dumps(body).encode(), idle_timeout_s=DEADLINE_S) as replies:
            async for reply in replies:
                for choice in json.loads(reply.payload)["choices"]:  # a keepalive has none
                    texts[choice["index"]] += choice["text"]
                    ends += choice["finish_reason"] is not None
        assert (texts, ends) == (["fine"] * 4, 4)


@pytest.mark.parametrize(("limits", "n", "status"), [({"choices": 3}, 4, 400), ({"requests": 3}, 4, 400)])
async def test_the_number_of_choices_is_limited(directory: Path, limits: Any, n: int, status: int) -> None:
    async with world(directory, limits=LimitsConfig(drain_s=0.0, **limits)) as w, clients(w) as (_, http):
        w.say("fine")
        async with http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "n": n}) as response:
            assert response.status == status
            assert (await response.json())["error"]["param"] == "n"
        async with http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "n": n - 1}) as response:
            assert response.status == 200


@pytest.mark.parametrize(("limits", "bound"), [({"requests": 4}, "requests"), ({"tokens": 100}, "tokens")])
async def test_choices_count_against_the_bounds_like_requests(directory: Path, limits: Any, bound: str) -> None:
    async with world(directory, limits=LimitsConfig(drain_s=0.0, **limits)) as w, clients(w) as (_, http):
        worker = w.workers[0]
        worker.output = None
        body = {"model": MODEL, "prompt": [5, 6], "max_tokens": 20}
        first = asyncio.create_task(http.post("/v1/completions", json=body))
        [generate] = await worker.generates.at_least(1)
        async with http.post("/v1/completions", json=body | {"n": 4}) as response:
            assert response.status == 429
        assert w.metric("headrace_model_rejection_total", bound=bound) == 1
        await worker.send(generate, 0, [5, 2], "stop")
        assert (await first).status == 200
        w.say("fine")
        async with http.post("/v1/completions", json=body | {"n": 4}) as response:
            assert response.status == 200


@pytest.mark.parametrize("shown", [True, False])
async def test_a_stop_string_that_is_a_special_token_ends_the_answer(directory: Path, shown: bool) -> None:
    """Its text stands nowhere unless it is asked for, so no search of the text finds it."""
    async with world(directory) as w, clients(w) as (client, _):
        w.workers[0].output = [*w.ids("ab"), 1, *w.ids("c"), 2]
        more = {"skip_special_tokens": not shown}
        answer = await client.completions.create(model=MODEL, prompt="x", stop=["<|im_start|>"], extra_body=more)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("ab", "stop")
