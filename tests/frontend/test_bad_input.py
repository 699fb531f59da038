"""Every bad body over HTTP; `test_nats_api.py` sends the same over NATS."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path

from services.frontend.protocol.ignored_fields import IGNORED_HEADER
from services.frontend.protocol.operations import PATHS
from services.frontend.serving.dispatch import NAMES_COUNTED
from services.frontend.serving.known_fields import KNOWN
from tests.frontend.bad_bodies import BAD_BODIES, BAD_OTHERWISE, EMBEDDING_SIZE, IGNORED, STRICT
from tests.frontend.peers import MODEL, clients, world


async def test_every_bad_body_gets_its_error_object_and_nothing_else_notices(directory: Path) -> None:
    async with (
        world(directory, embedding_size=EMBEDDING_SIZE, settings=STRICT) as w,
        clients(w) as (client, http),
    ):
        for bad in BAD_BODIES:
            async with http.post(PATHS[bad.operation], data=BytesIO(bad.body)) as response:
                error = (await response.json())["error"]
            assert (bad.name, response.status, error["param"]) == (bad.name, bad.status, bad.param)
            assert error["code"] == bad.code, bad.name
            assert error["message"], bad.name
            assert error["type"] == "invalid_request_error", bad.name
        assert w.router.asked.all == []
        w.say("still here")
        answer = await client.completions.create(model=MODEL, prompt="x")
        assert answer.choices[0].text == "still here"


async def test_where_fields_are_ignored_the_header_names_them_and_bad_values_are_refused_all_the_same(
    directory: Path,
) -> None:
    async with world(directory, embedding_size=EMBEDDING_SIZE) as w, clients(w) as (_, http):
        for bad in BAD_BODIES:
            w.say("fine")
            async with http.post(PATHS[bad.operation], data=BytesIO(bad.body)) as response:
                if bad.name in IGNORED:
                    assert (bad.name, response.status) == (bad.name, 200)
                    assert response.headers[IGNORED_HEADER] == IGNORED[bad.name]
                else:
                    error, param = (await response.json())["error"], BAD_OTHERWISE.get(bad.name, bad.param)
                    assert (bad.name, response.status, error["param"]) == (bad.name, bad.status, param)
        for name, count in (("store", 1), ("other", 5)):
            assert w.registry.get_sample_value("headrace_ignored_fields_total", {"field": name}) == count


async def test_names_that_no_api_has_and_more_names_than_are_counted_are_counted_together(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        known = sorted(KNOWN - {"tokens", "model"})[: NAMES_COUNTED + 20]
        for start in range(0, NAMES_COUNTED + 20, 20):
            fields = dict.fromkeys([*known[start : start + 20], f"mine{start}"], 1)
            async with http.post(PATHS["detokenize"], json={"tokens": [5], **fields}) as response:
                assert response.headers[IGNORED_HEADER].split(", ") == list(fields)
        assert w.registry.get_sample_value("headrace_ignored_fields_total", {"field": known[0]}) == 1
        assert w.registry.get_sample_value("headrace_ignored_fields_total", {"field": "mine0"}) is None
        assert w.registry.get_sample_value("headrace_ignored_fields_total", {"field": "other"}) == 20 + 11


async def test_a_large_body_in_chunks_is_413_too(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http):

        async def pieces() -> object:
            for _ in range(100):
                yield b"x" * 100_000

        async with http.post(PATHS["chat"], data=pieces()) as response:
            assert response.status == 413
            assert json.loads(await response.read())["error"]["code"] == "request_too_large"


async def test_unknown_paths_and_wrong_methods_have_the_error_shape(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        async with http.get("/v1/nothing") as response:
            assert response.status == 404
            assert "/v1/nothing" in (await response.json())["error"]["message"]
        async with http.get(PATHS["chat"]) as response:
            assert response.status == 405
            assert response.headers["Allow"] == "POST"
            error = (await response.json())["error"]
            assert error["type"] == "invalid_request_error"
            assert error["message"] == f"GET {PATHS['chat']}: 405: Method Not Allowed; use POST"


async def test_null_asks_for_nothing_and_is_accepted(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        w.say("fine")
        nulls = dict.fromkeys(
            ("n", "tools", "stop", "temperature", "top_p", "seed", "max_tokens", "logprobs", "response_format", "user")
        )
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], **nulls}
        async with http.post(PATHS["chat"], json=body) as response:
            assert response.status == 200
