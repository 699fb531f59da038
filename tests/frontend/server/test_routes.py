from __future__ import annotations

import asyncio
import json
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import openai
import pytest
from yarl import URL

from services.frontend.config import HttpConfig, LimitsConfig
from services.frontend.requests import calls
from shared import subjects
from shared.hashing import pack_tokens, sequence_hashes, unpack_hashes, unpack_tokens
from shared.messages.frames import STEP_FRAME, Part, StepFrame, TokenLogprob
from shared.messages.generate import Refused, Sampling
from shared.messages.select import Finished, Prefilled
from shared.version import VERSION
from tests.frontend.peers import CONTEXT, DEADLINE_S, MODEL, NAMESPACE, clients, world

HELLO: Any = [{"role": "user", "content": "hello"}]


async def test_a_chat_is_answered_whole(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        said = w.say("the water finds the wheel — grüße 🚰")
        w.workers[0].cached_tokens = 16
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO)
        [choice] = answer.choices
        assert choice.message.content == "the water finds the wheel — grüße 🚰"
        assert choice.message.role == "assistant"
        assert choice.finish_reason == "stop"
        assert answer.model == MODEL
        assert answer.object == "chat.completion"
        [generate] = w.workers[0].generates.all
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == generate.prompt_tokens
        assert answer.usage.completion_tokens == len(said) + 1
        assert answer.usage.total_tokens == generate.prompt_tokens + len(said) + 1
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 16


async def test_usage_tells_where_the_cached_tokens_were_as_of_the_attempt_that_brought_the_first_token(
    directory: Path,
) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        first, second = w.workers
        first.output = None
        first.cached_tokens, first.cached_host_tokens, first.cached_disk_tokens = 14, 5, 2
        second.cached_tokens = second.cached_host_tokens = 12
        asking = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=HELLO))
        [generate] = await first.generates.at_least(1)
        second.output = [*w.ids("on it goes"), 2]
        await first.send(generate, 0, second.output[:1])
        told = await w.router.told.at_least(1)
        await w.leave("w1")
        usage = (await asking).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        details = usage.prompt_tokens_details.model_dump()
        assert details["cached_tokens"] == 14
        assert details["cached_tokens_by_tier"] == {"device": 7, "host": 5, "disk": 2}
        prefilled = next(event for event in told if isinstance(event, Prefilled))
        assert (prefilled.cached_host_tokens, prefilled.cached_disk_tokens) == (5, 2)
        by_tier = {tier: w.metric("headrace_cached_tokens_total", tier=tier) for tier in ("device", "host", "disk")}
        assert by_tier == {"device": 7, "host": 17, "disk": 2}, "both attempts were spared work"


async def test_the_template_is_rendered_and_its_blocks_are_hashed(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        w.say("x")
        parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
        messages: Any = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
        await client.chat.completions.create(model=MODEL, messages=messages)
        [generate], [select] = w.workers[0].generates.all, w.router.asked.all
        tokens = unpack_tokens(generate.tokens)
        assert w.tokenizer.decode(tokens, skip_special_tokens=False) == (
            "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhel\nlo<|im_end|>\n<|im_start|>assistant\n"
        )
        assert tokens[0] == 1
        assert unpack_hashes(select.hashes) == sequence_hashes(pack_tokens(tokens), 16)
        assert select.prompt_tokens == generate.prompt_tokens == len(tokens)
        assert generate.sampling.max_tokens == CONTEXT - len(tokens)


async def test_a_long_chat_is_tokenised_off_the_loop_and_alike(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        w.say("x")
        text = "water " * 400
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": text}])
        [generate] = w.workers[0].generates.all
        assert text in w.tokenizer.decode(unpack_tokens(generate.tokens))


async def test_a_chat_streams_the_same_text_with_role_first_and_usage_last(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        said = w.say("grüße 🚰 from the 水 wheel")
        stream = await client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "grüße 🚰 from the 水 wheel"
        assert all("�" not in (chunk.choices[0].delta.content or "") for chunk in chunks[:-1])
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len(said) + 1
        assert len({chunk.id for chunk in chunks}) == 1


async def test_a_stream_is_server_sent_events_with_done_last(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        w.say("ab")
        body = {"model": MODEL, "messages": HELLO, "stream": True}
        async with http.post("/v1/chat/completions", json=body) as response:
            assert response.content_type == "text/event-stream"
            assert response.headers["X-Request-Id"] == w.router.asked.all[0].request
            text = (await response.read()).decode()
        events = text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert all("usage" not in json.loads(event.removeprefix("data: ")) for event in events[:-2])


async def test_a_request_keeps_its_clients_name_and_two_of_one_name_do_not_clash(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        worker = w.workers[0]
        worker.output = None
        body = {"model": MODEL, "prompt": "x"}
        both = [
            asyncio.create_task(http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine.1"}))
            for _ in range(2)
        ]
        for number, generate in enumerate(await worker.generates.at_least(2)):
            assert generate.request.startswith("mine.1-")
            await worker.send(generate, 0, [*w.ids(f"answer {number}"), 2], "stop")
        texts = []
        for response in await asyncio.gather(*both):
            assert response.headers["X-Request-Id"] == "mine.1"
            texts.append((await response.json())["choices"][0]["text"])
        assert sorted(texts) == ["answer 0", "answer 1"]


@pytest.mark.parametrize("given", ["a" * 65, "a b", "grüße", 'x"y', ""])
async def test_an_unusable_request_id_is_ignored(directory: Path, given: str) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        w.say("x")
        body = {"model": MODEL, "prompt": "x"}
        async with http.post("/v1/completions", json=body, headers={"X-Request-Id": given}) as response:
            assert response.headers["X-Request-Id"] == w.router.asked.all[0].request != given


async def test_errors_name_their_request_too(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        named = {"X-Request-Id": "mine"}
        for path, body, status in (
            ("/v1/completions", b"{", 400),
            ("/v1/chat/completions", BytesIO(b"x" * 5_000_000), 413),
            ("/v1/nothing", b"{}", 404),
            ("/v1/models", b"", 405),
        ):
            async with http.post(path, data=body, headers=named) as response:
                assert (response.status, response.headers["X-Request-Id"]) == (status, "mine")
            async with http.post(path) as response:
                assert len(response.headers["X-Request-Id"]) == 32


MANY_SLASHES = "one slash is enough; the base URL of this client may end with one too many"


async def test_a_wrong_base_url_is_said_to_be_wrong(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        async with http.post("/chat/completions", json={}) as response:
            said = (await response.json())["error"]["message"]
            assert (response.status, said.partition("; ")[2]) == (
                404,
                "it is at /v1/chat/completions: the base URL ends in /v1",
            )
        for path, right, why in (
            ("/v1/v1/messages", "/v1/messages", "the base URL of this client ends without /v1"),
            ("/v1/chat/completions/", "/v1/chat/completions", "no slash comes after it"),
            ("//v1/chat/completions", "/v1/chat/completions", MANY_SLASHES),
            ("/v1//messages", "/v1/messages", MANY_SLASHES),
        ):
            async with http.post(URL(w.url).with_path(path), json={}) as response:
                said = (await response.json())["error"]["message"]
                assert (response.status, said.partition("; ")[2]) == (404, f"it is at {right}: {why}")
        async with http.post("/nothing", json={}) as response:
            assert "base URL" not in (await response.json())["error"]["message"]


async def test_a_client_that_speaks_no_http_gets_an_error_and_fills_no_log(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(directory) as w:
        url = urlsplit(w.url)
        post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
        for sent in (
            b"\x16\x03\x01 hello\r\n\r\n",
            post + b"Content-Length: -5\r\n\r\n",
            post + b"X: " + b"x" * 20_000 + b"\r\n\r\n",
            post + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
            b"GET /live\r\n\r\n",
        ):
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            writer.write(sent)
            async with asyncio.timeout(DEADLINE_S):
                assert b" 400 " in await reader.readline()
                await reader.read()
            writer.close()
        w.say("fine")
        async with clients(w) as (client, _):
            assert (await client.completions.create(model=MODEL, prompt="x")).choices[0].text == "fine"
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_body_that_does_not_come_is_408_and_its_place_comes_back(directory: Path) -> None:
    async with world(directory, http=HttpConfig(body_timeout_s=0.05)) as w:
        url = urlsplit(w.url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        async with asyncio.timeout(DEADLINE_S):
            assert b" 408 " in await reader.readline()
            assert b"request_timeout" in await reader.readuntil(b"}}")
        writer.close()
        assert w.metric("headrace_requests_total", operation="completions", status="408") == 1
        assert w.metric("headrace_inflight_requests") == 0


async def test_a_completion_is_answered_from_text_and_from_token_ids(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        w.say("the wheel turns and turns and turns and turns")
        for prompt in ("the water", w.ids("the water"), ["the water"]):
            answer = await client.completions.create(model=MODEL, prompt=prompt)
            assert answer.choices[0].finish_reason == "length"
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 16
            assert answer.choices[0].text == w.tokenizer.decode((w.workers[0].output or [])[:16])
        assert len({generate.tokens for generate in w.workers[0].generates.all}) == 1


async def test_a_completion_streams(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        w.say("turning")
        stream = await client.completions.create(model=MODEL, prompt="x", stream=True)
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks) == "turning"
        assert chunks[-1].choices[0].finish_reason == "stop"


async def test_a_stop_string_across_tokens_cuts_the_text_and_cancels(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        w.workers[0].output = None
        asking = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=HELLO, stop=["END", "zzz"]))
        [generate] = await w.workers[0].generates.at_least(1)
        tokens = w.ids("one EN two END three")
        await w.workers[0].send(generate, 0, tokens)
        answer = await asking
        assert answer.choices[0].message.content == "one EN two "
        assert answer.choices[0].finish_reason == "stop"
        [cancel] = await w.workers[0].cancels.at_least(1)
        assert cancel.request == generate.request
        assert answer.usage is not None
        assert answer.usage.completion_tokens < len(tokens)
        await w.router.told.until(Finished(generate.request, 1))


async def test_logprobs_of_a_chat_name_token_bytes_and_the_likeliest(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        ids = w.say("é!")
        w.workers[0].logprobs = [
            TokenLogprob(-0.5, pack_tokens([token, 40]), (-0.5, float("-inf"))) for token in [*ids, 2]
        ]
        for stream in (False, True):
            if stream:
                chunks = await client.chat.completions.create(
                    model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2, stream=True
                )
                found = [chunk.choices[0].logprobs async for chunk in chunks]
                entries = [entry for one in found if one is not None for entry in one.content or []]
            else:
                answer = await client.chat.completions.create(
                    model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2
                )
                assert answer.choices[0].logprobs is not None
                entries = answer.choices[0].logprobs.content or []
            assert b"".join(bytes(entry.bytes or []) for entry in entries).decode() == "é!"
            assert [entry.logprob for entry in entries] == [-0.5] * len(ids)
            assert entries[-1].token == "!"
            assert entries[-1].top_logprobs[0].token == "!"
            assert entries[-1].top_logprobs[1].logprob == -9999.0
        assert w.workers[0].generates.all[0].sampling.logprobs == 2


async def test_logprobs_of_a_completion_have_offsets_into_the_text_and_include_the_token_that_ends_it(
    directory: Path,
) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        ids = w.say("a b")
        w.workers[0].logprobs = [TokenLogprob(-0.25, pack_tokens([token]), (-0.25,)) for token in [*ids, 2]]
        answer = await client.completions.create(model=MODEL, prompt="x", logprobs=1)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert answer.choices[0].text == "a b"
        assert logprobs.tokens == ["a", " b", "<|im_end|>"]
        assert logprobs.text_offset == [0, 1, 3]
        assert logprobs.token_logprobs == [-0.25, -0.25, -0.25]
        assert logprobs.top_logprobs == [{"a": -0.25}, {" b": -0.25}, {"<|im_end|>": -0.25}]


async def test_every_sampling_field_reaches_the_worker(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        w.say("x")
        await client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            temperature=0.5,
            top_p=0.9,
            seed=-2,
            presence_penalty=-2,
            frequency_penalty=2,
            max_completion_tokens=7,
            logprobs=True,
            top_logprobs=3,
            user="somebody",
            extra_body={
                "top_k": 5,
                "min_p": 0.1,
                "repetition_penalty": 1.5,
                "ignore_eos": True,
                "stop_token_ids": [7],
                "cache_salt": "tenant",
            },
        )
        [generate] = w.workers[0].generates.all
        assert generate.sampling == Sampling(
            7, 0.5, 0.9, 5, 0.1, (1 << 64) - 2, -2.0, 2.0, 1.5, 3, stop_token_ids=(7,), ignore_eos=True
        )
        assert generate.salt == "tenant"


async def test_biases_reach_the_worker_and_name_tokens_of_the_vocabulary(directory: Path) -> None:
    async with world(directory, biases=True) as w, clients(w) as (client, _):
        w.say("x")
        await client.chat.completions.create(model=MODEL, messages=HELLO, logit_bias={"5": -100, "319": 1})
        [generate] = w.workers[0].generates.all
        assert generate.sampling.logit_bias == ((5, -100.0), (319, 1.0))
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model=MODEL, prompt="x", logit_bias={"5": 1, "320": 1})
        assert refused.value.param == "logit_bias[320]"


async def test_a_worker_that_would_pass_over_a_bias_is_not_asked(directory: Path) -> None:
    async with world(directory, announced=False) as w, clients(w) as (client, _):
        await w.announce_router()
        await w.announce_worker("w2", biases=True)
        await w.ready()
        w.say("x")
        # The router knows of w1 already; this frontend does not.
        await client.completions.create(model=MODEL, prompt="x", logit_bias={"5": 1})
        assert w.workers[0].generates.all == []
        assert w.router.asked.all[-1].excluded == ("w1",)


async def test_allowed_tokens_reach_a_worker_that_keeps_to_them(directory: Path) -> None:
    async with world(directory, allowed_tokens=True) as w, clients(w) as (client, _):
        w.say("x")
        await client.chat.completions.create(model=MODEL, messages=HELLO, extra_body={"allowed_token_ids": [5, 319]})
        [generate] = w.workers[0].generates.all
        assert generate.sampling.allowed_tokens == pack_tokens([5, 319])
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model=MODEL, prompt="x", extra_body={"allowed_token_ids": [320]})
        assert refused.value.param == "allowed_token_ids[0]"
    async with world(directory) as w, clients(w) as (client, _):
        with pytest.raises(openai.BadRequestError, match=r"not every worker of .* supports it"):
            await client.completions.create(model=MODEL, prompt="x", extra_body={"allowed_token_ids": [5]})
    async with world(directory, announced=False) as w, clients(w) as (client, _):
        await w.announce_router()
        await w.announce_worker("w2", allowed_tokens=True)
        await w.ready()
        w.say("x")  # the router knows of w1 already; this frontend does not
        await client.completions.create(model=MODEL, prompt="x", extra_body={"allowed_token_ids": [5]})
        assert w.workers[0].generates.all == []


async def test_each_chunk_has_the_usage_up_to_it_if_that_is_asked_for(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        for n in (1, 2):
            w.say("one, two and three")
            options: Any = {"include_usage": True, "continuous_usage_stats": True}
            asked: Any = {"model": MODEL, "stream": True, "stream_options": options, "n": n}
            chunks = [chunk async for chunk in await client.chat.completions.create(**asked, messages=HELLO)]
            usages = [(chunk.choices[0].index, chunk.usage) for chunk in chunks if chunk.choices]
            for index in range(n):
                counts = [usage.completion_tokens for at, usage in usages if at == index and usage is not None]
                assert counts[0] == 0
                assert counts == sorted(counts)
                last = chunks[-1].usage
                assert last is not None
                assert counts[-1] * n == last.completion_tokens
            assert {usage.prompt_tokens for _, usage in usages if usage} == {last.prompt_tokens}
            assert all(
                usage.total_tokens == usage.prompt_tokens + usage.completion_tokens for _, usage in usages if usage
            )


async def test_log_probabilities_name_tokens_by_their_ids_if_that_is_asked_for(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        ids = w.say("ab")
        w.workers[0].logprobs = [TokenLogprob(-0.5, pack_tokens([7]), (-0.1,))] * (len(ids) + 1)
        by_id = {"return_tokens_as_token_ids": True}
        text = await client.completions.create(model=MODEL, prompt="x", logprobs=1, extra_body=by_id)
        [choice] = text.choices
        assert choice.logprobs is not None
        ids = [*ids, 2]
        assert choice.logprobs.tokens == [f"token_id:{one}" for one in ids]
        assert choice.logprobs.top_logprobs is not None
        assert [set(top) for top in choice.logprobs.top_logprobs] == [{"token_id:7", f"token_id:{one}"} for one in ids]
        assert choice.logprobs.text_offset == [0, 2]
        chat = await client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, extra_body=by_id)
        assert chat.choices[0].logprobs is not None
        entries = chat.choices[0].logprobs.content or []
        assert bytes(entries[0].bytes or ()).decode() == entries[0].token == f"token_id:{ids[0]}"


async def test_the_least_tokens_reach_the_worker_and_are_at_most_what_may_follow(directory: Path) -> None:
    async with world(directory, min_tokens=True) as w, clients(w) as (client, _):
        w.say("x")
        await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=9, extra_body={"min_tokens": 9})
        [generate] = w.workers[0].generates.all
        assert generate.sampling.min_tokens == 9
        says: list[tuple[dict[str, int], str]] = [
            ({"min_tokens": 17}, "17 is more than the 16 tokens that may follow without max_tokens"),
            ({"min_tokens": 17, "max_tokens": 5}, "17 is more than max_tokens, which is 5"),
        ]
        for fields, wrong in says:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.completions.create(model=MODEL, prompt="x", extra_body=fields)
            assert refused.value.param == "min_tokens"
            assert wrong in refused.value.message
        with pytest.raises(openai.BadRequestError, match=r"than the \d+ tokens that may follow") as refused:
            await client.chat.completions.create(model=MODEL, messages=HELLO, extra_body={"min_tokens": CONTEXT})
        assert refused.value.param == "min_tokens"


async def test_a_worker_that_would_pass_over_the_least_tokens_is_not_asked(directory: Path) -> None:
    async with world(directory, announced=False) as w, clients(w) as (client, _):
        await w.announce_router()
        await w.announce_worker("w2", min_tokens=True)
        await w.ready()
        w.say("x")
        # The router knows of w1 already; this frontend does not.
        await client.completions.create(model=MODEL, prompt="x", extra_body={"min_tokens": 1})
        assert w.workers[0].generates.all == []
        assert w.router.asked.all[-1].excluded == ("w1",)


async def test_routers_hear_of_the_first_token_and_of_the_end(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        w.say("abc")
        w.workers[0].cached_tokens = 16
        await client.chat.completions.create(model=MODEL, messages=HELLO)
        request = w.router.asked.all[0].request
        first, last = await w.router.told.until(Finished(request, 1))
        assert isinstance(first, Prefilled)
        assert (first.request, first.attempt, first.cached_tokens) == (request, 1, 16)
        assert 0 < first.first_token_s < DEADLINE_S
        assert last == Finished(request, 1)


async def test_a_client_that_disconnects_cancels_streaming_or_not(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        worker = w.workers[0]
        worker.output = None
        for count, stream in enumerate((True, False), 1):
            body = {"model": MODEL, "messages": HELLO, "stream": stream}
            asking = asyncio.create_task(http.post("/v1/chat/completions", json=body).__aenter__())
            generate = (await worker.generates.at_least(count))[-1]
            await worker.send(generate, 0, w.ids("a"))
            if stream:
                response = await asking
                response.close()
            else:
                asking.cancel()
            cancels = await worker.cancels.at_least(count)
            assert cancels[-1].request == generate.request
            await w.router.told.until(Finished(generate.request, 1))
        assert w.metric("headrace_disconnected_clients_total") == 2
        assert w.metric("headrace_inflight_requests") == 0


async def test_a_lost_worker_is_replaced_and_the_client_sees_one_text(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        first, second = w.workers
        first.output = None
        asking = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=HELLO))
        [generate] = await first.generates.at_least(1)
        said = w.ids("the water finds the wheel")
        second.output = [*said, 2]
        await first.send(generate, 0, said[:5])
        await w.router.told.at_least(1)
        await w.leave("w1")
        answer = await asking
        assert answer.choices[0].message.content == "the water finds the wheel"
        [again] = second.generates.all
        assert (again.request, again.attempt) == (generate.request, 2)
        told = await w.router.told.until(Finished(generate.request, 2))
        firsts = [event.first_token_s > 0 for event in told if isinstance(event, Prefilled)]
        assert firsts == [True, False], "the client has had its first token only once"
        assert unpack_tokens(again.tokens) == unpack_tokens(generate.tokens) + said[:5]
        assert again.prompt_tokens == generate.prompt_tokens
        assert w.router.asked.all[1].excluded == ("w1",)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == generate.prompt_tokens
        assert answer.usage.completion_tokens == len(said) + 1


async def test_a_senseless_part_spoils_no_other_part_of_its_frame(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        worker = w.workers[0]
        worker.output = None
        spoiled = asyncio.create_task(client.completions.create(model=MODEL, prompt="spoiled"))
        [first] = await worker.generates.at_least(1)
        good = asyncio.create_task(client.completions.create(model=MODEL, prompt="good"))
        [_, second] = await worker.generates.at_least(2)
        w.workers[1].output = [*w.ids("mended"), 2]
        parts = [
            Part(first.request, 1, 0, b"\0", None),
            Part(second.request, 1, 0, pack_tokens([*w.ids("fine"), 2]), "stop"),
        ]
        await worker.bus.publish(subjects.stream(NAMESPACE, "f1"), STEP_FRAME.encode(StepFrame("w1", 1, 0, parts)))
        assert (await good).choices[0].text == "fine"
        assert (await spoiled).choices[0].text == "mended"


async def test_a_worker_that_refuses_is_passed_over(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        w.say("ok")
        w.workers[0].answer = lambda one: Refused(one.request, one.attempt, "overloaded", "full")
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO)
        assert answer.choices[0].message.content == "ok"
        assert w.workers[0].cancels.all == []


async def test_all_workers_refusing_is_503_with_retry_after(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        for worker in w.workers:
            worker.answer = lambda one: Refused(one.request, one.attempt, "overloaded", "full")
        with pytest.raises(openai.InternalServerError) as error:
            await client.chat.completions.create(model=MODEL, messages=HELLO)
        assert error.value.status_code == 503
        assert error.value.response.headers["retry-after"] == "1"
        assert "full" in error.value.message


async def test_parts_of_a_request_that_is_over_are_answered_with_cancel(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, _):
        w.say("done")
        await client.chat.completions.create(model=MODEL, messages=HELLO)
        [generate] = w.workers[0].generates.all
        await w.workers[0].send(generate, 5, [9])
        [cancel] = await w.workers[0].cancels.at_least(1)
        assert (cancel.request, cancel.attempt) == (generate.request, 1)


async def test_an_error_after_text_is_an_event_and_not_done(directory: Path) -> None:
    limits = LimitsConfig(rescue_s=0.0, drain_s=0.0)
    async with world(directory, limits=limits) as w, clients(w) as (_, http):
        w.router.workers = ["w1"]
        w.workers[0].output = None
        body = {"model": MODEL, "messages": HELLO, "stream": True}
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=body).__aenter__())
        [generate] = await w.workers[0].generates.at_least(1)
        await w.workers[0].send(generate, 0, w.ids("a"))
        response = await asking
        await w.workers[0].send(generate, 1, [], "error", "the device burned down")
        events = (await response.read()).decode().split("\n\n")
        assert "burned down" in json.loads(events[-2].removeprefix("data: "))["error"]["message"]
        assert "[DONE]" not in events[-2]


async def test_the_deadline_ends_a_request_that_makes_no_progress(directory: Path) -> None:
    limits = LimitsConfig(deadline_s=1.5, drain_s=0.0)
    async with world(directory, limits=limits) as w, clients(w) as (client, _):
        w.workers[0].output = None
        with pytest.raises(openai.InternalServerError) as error:
            await client.chat.completions.create(model=MODEL, messages=HELLO)
        assert error.value.status_code == 504
        [generate] = w.workers[0].generates.all
        assert 0 < generate.time_left_s <= 1.5
        await w.workers[0].cancels.at_least(1)


async def test_a_frozen_router_is_passed_over(directory: Path) -> None:
    limits = LimitsConfig(select_timeout_s=1.0, drain_s=0.0)
    async with world(directory, limits=limits) as w, clients(w) as (client, _):
        w.say("ok")
        choose = w.router.answer
        w.router.answer = lambda select: choose(select) if w.router.asked.all else None
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO)
        assert answer.choices[0].message.content == "ok"
        assert w.metric("headrace_router_retries_total") == 1
        # The answer that was lost may have named two workers.
        await w.router.told.until(Finished(w.router.asked.all[0].request, 2))


async def test_a_slow_router_is_asked_again_until_the_rounds_are_over(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "SELECT_LIMIT_S", 1.0)
    limits = LimitsConfig(select_timeout_s=0.05, rescue_s=1.0, drain_s=0.0)
    async with world(directory, limits=limits) as w, clients(w) as (client, _):
        w.say("ok")
        choose = w.router.answer
        w.router.answer = lambda select: choose(select) if len(w.router.asked.all) >= 4 else None
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO)
        assert answer.choices[0].message.content == "ok"
        w.router.answer = lambda select: None
        with pytest.raises(openai.InternalServerError) as error:
            await client.chat.completions.create(model=MODEL, messages=HELLO)
        assert error.value.status_code == 503
        assert "no router" in error.value.message


async def test_a_request_outlasts_routers_that_are_there_and_silent_for_longer_than_one_question(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "SELECT_LIMIT_S", 0.1)
    limits = LimitsConfig(select_timeout_s=0.05, drain_s=0.0)
    async with world(directory, limits=limits) as w, clients(w) as (client, _):
        w.say("back")
        choose = w.router.answer
        w.router.answer = lambda select: choose(select) if len(w.router.asked.all) >= 12 else None
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO)
        assert answer.choices[0].message.content == "back"


@pytest.mark.parametrize("limits", [LimitsConfig(requests=1, drain_s=0.0), LimitsConfig(body_bytes=100, drain_s=0.0)])
async def test_more_requests_or_bytes_than_the_bound_are_429_and_places_come_back(
    directory: Path, limits: LimitsConfig
) -> None:
    async with world(directory, limits=limits) as w, clients(w) as (client, _):
        w.workers[0].output = None
        first = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=HELLO))
        [generate] = await w.workers[0].generates.at_least(1)
        with pytest.raises(openai.RateLimitError) as error:
            await client.chat.completions.create(model=MODEL, messages=HELLO)
        assert int(error.value.response.headers["retry-after"]) >= 1
        await w.workers[0].send(generate, 0, [*w.ids("a"), 2], "stop")
        await first
        w.say("free again")
        await client.chat.completions.create(model=MODEL, messages=HELLO)


async def test_the_models_are_listed_and_looked_up(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, http):
        [model] = (await client.models.list()).data
        assert model.id == MODEL
        assert (await client.models.retrieve(MODEL)).id == MODEL
        for written in (MODEL, MODEL.replace("/", "%2F")):
            async with http.get(URL(f"/v1/models/{written}", encoded=True)) as response:
                assert await response.json() == model.model_dump(exclude_unset=True)
        with pytest.raises(openai.NotFoundError) as error:
            await client.models.retrieve("other")
        assert error.value.code == "model_not_found"
        assert error.value.body is not None
        assert f"there is {MODEL}" in str(error.value.body)


async def test_without_workers_it_is_503_with_reasons_and_heals(directory: Path) -> None:
    async with world(directory, announced=False) as w, clients(w) as (client, http):
        with pytest.raises(openai.InternalServerError) as error:
            await client.chat.completions.create(model=MODEL, messages=HELLO)
        assert error.value.status_code == 503
        assert "retry-after" in error.value.response.headers
        assert await health(http) == (503, ["no router is there", "no worker is there"])
        await w.announce_router()
        await w.announce_worker("w1")
        await w.ready()
        w.say("here")
        assert (await client.chat.completions.create(model=MODEL, messages=HELLO)).choices[0].message.content == "here"
        await w.leave("w1")
        await w.until("/health", lambda said: said["reasons"] == ["no worker is there"])  # the owner is asked first
        assert await health(http) == (503, ["no worker is there"])
        with pytest.raises(openai.InternalServerError) as error:
            await client.chat.completions.create(model=MODEL, messages=HELLO)
        assert error.value.status_code == 503
        async with http.get("/live") as response:
            assert response.status == 200


async def test_the_version_is_answered_as_vllm_answers_it(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http), http.get("/version") as response:
        assert (response.status, await response.json()) == (200, {"version": VERSION})


async def health(http: aiohttp.ClientSession) -> tuple[int, list[str]]:
    async with http.get("/health") as response:
        return response.status, (await response.json())["reasons"]


async def test_health_says_that_nats_is_away_and_heals(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        w.broker.disconnect(w.bus)
        assert await health(http) == (503, ["NATS is not connected"])
        w.broker.reconnect(w.bus)
        await w.ready()


async def test_the_metrics_are_there(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, http):
        w.say("abc")
        await client.chat.completions.create(model=MODEL, messages=HELLO)
        async with http.get("/metrics") as response:
            text = await response.text()
        assert 'headrace_requests_total{model="tiny/model-1.0",operation="chat",status="200"} 1.0' in text
        for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "output_sequence_tokens"):
            assert f"headrace_{name}_count" in text


async def test_a_thousand_names_of_models_and_requests_make_no_series(directory: Path) -> None:
    async with world(directory) as w, aiohttp.ClientSession(w.url) as http:

        def series() -> int:
            return sum(len(family.samples) for family in w.registry.collect())

        async def ask(number: int) -> None:
            body = {"model": f"model-{number}", "messages": HELLO, "user": f"user-{number}"}
            headers = {"X-Request-Id": f"name-{number}", "traceparent": f"00-{number:032x}-{number:016x}-01"}
            async with http.post("/v1/chat/completions", json=body, headers=headers) as response:
                assert response.status == 404

        await ask(1)
        before = series()
        for start in range(2, 1002, 50):
            await asyncio.gather(*(ask(number) for number in range(start, start + 50)))
        assert series() == before
