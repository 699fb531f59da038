"""Pictures as clients ask for them; scripted workers make files that follow from what they were asked for."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from services.frontend.config import FrontendConfig, LimitsConfig, MediaConfig
from shared.messages.cards import PictureOutput
from shared.messages.frames import PicturePiece
from shared.messages.generate import Picture
from shared.messages.select import Finished, Prefilled
from tests.frontend.auth.test_access import ALICE, BOB, KeysFile
from tests.frontend.peers import MODEL, clients, file_of, world

OUTPUT = PictureOutput("StableDiffusionPipeline", 64, 32, 8, 64 * 64, 4, 20)
PATH = "/v1/images/generations"


def kept(directory: Path, **more: Any) -> FrontendConfig:
    return FrontendConfig(media=MediaConfig(directory=str(directory), **more))


async def refusal(http: aiohttp.ClientSession, **body: object) -> tuple[int, str, str]:
    """The status, the parameter and the message."""
    async with http.post(PATH, json={"prompt": "a mill", **body}) as response:
        error = json.loads(await response.read())["error"]
        return response.status, error["param"], error["message"]


async def test_openais_client_gets_pictures_of_seeds_that_follow_one_another(directory: Path) -> None:
    async with world(directory, pictures=OUTPUT) as w, clients(w) as (client, _):
        more = {"seed": 7, "steps": 3, "guidance": 2.5, "negative_prompt": "rain"}
        answer = await client.images.generate(model=MODEL, prompt="a mill", n=2, size="32x32", extra_body=more)
        fields: dict[str, Any] = {"negative": "rain", "guidance": 2.5}
        wanted = [Picture("a mill", 32, 32, 3, seed, **fields) for seed in (7, 8)]
        assert answer.data is not None
        assert [b64decode(one.b64_json or "") for one in answer.data] == [file_of(each) for each in wanted]
        assert [one.seed for one in answer.data] == [7, 8]  # type: ignore[attr-defined]
        assert (answer.output_format, answer.size) == ("png", "32x32")
        assert answer.usage is not None
        assert answer.usage.total_tokens == answer.usage.output_tokens == 6
        generated = w.workers[0].generates.all
        assert [one.picture for one in generated] == wanted
        assert {(len(one.tokens) // 4, one.prompt_tokens) for one in generated} == {(3, 3)}
        assert [(one.whole, one.hashes, one.prompt_tokens) for one in w.router.asked.all] == [(True, b"", 3)] * 2
        told = [event for event in w.router.told.all if event.request == generated[0].request]
        assert [type(event) for event in told] == [Prefilled, Finished]


async def test_what_is_left_out_is_the_models_own_and_a_seed_is_drawn(directory: Path) -> None:
    async with world(directory, pictures=OUTPUT) as w, clients(w) as (_, http):
        async with http.post(PATH, json={"prompt": "a mill", "size": "auto", "user": "u"}) as response:
            [one] = json.loads(await response.read())["data"]
        made = w.workers[0].generates.all[0].picture
        assert made == Picture("a mill", 64, 32, 4, one["seed"])


async def test_a_stream_has_unfinished_pictures_and_then_the_picture(directory: Path) -> None:
    async with world(directory, pictures=OUTPUT) as w, clients(w) as (client, _):
        w.workers[0].output = None
        asking = client.images.generate(model=MODEL, prompt="a mill", stream=True, partial_images=1)
        opening = asyncio.ensure_future(asking)
        [generate] = await w.workers[0].generates.at_least(1)
        assert generate.picture is not None
        assert generate.picture.previews == 1
        await w.workers[0].send(generate, 0, [], picture=PicturePiece(2, preview=b"half"))
        events: Any = aiter(await opening)
        partial = await anext(events)
        assert (partial.type, b64decode(partial.b64_json)) == ("image_generation.partial_image", b"half")
        assert (partial.partial_image_index, partial.size, partial.output_format) == (0, "64x32", "jpeg")
        await w.workers[0].send(generate, 0, [], "stop", picture=PicturePiece(4, 0, b"whole"))
        last = await anext(events)
        assert (last.type, b64decode(last.b64_json)) == ("image_generation.completed", b"whole")
        assert (last.usage.output_tokens, last.seed) == (4, generate.picture.seed)
        assert [event async for event in events] == []


async def test_a_lost_attempt_is_made_again_elsewhere_with_the_same_seed(directory: Path) -> None:
    async with world(directory, pictures=OUTPUT) as w, clients(w) as (client, _):
        first, second = w.workers
        first.output = None
        asking = asyncio.ensure_future(client.images.generate(model=MODEL, prompt="a mill"))
        [generate] = await first.generates.at_least(1)
        await first.send(generate, 0, [], picture=PicturePiece(2))
        await first.send(generate, 0, [], picture=PicturePiece(4, 0, b"some of the file"))
        await first.send(generate, 0, [], "error", error="the engine was lost")
        answer = await asking
        [again] = await second.generates.at_least(1)
        assert again.picture == generate.picture
        assert again.tokens == generate.tokens
        assert generate.picture is not None
        assert answer.data is not None
        assert b64decode(answer.data[0].b64_json or "") == file_of(generate.picture)


async def test_a_client_that_leaves_cancels_its_pictures(directory: Path) -> None:
    async with world(directory, pictures=OUTPUT) as w, clients(w) as (_, http):
        w.workers[0].output = None
        asking = asyncio.ensure_future(http.post(PATH, json={"prompt": "a mill", "n": 2}))
        names = {one.request for one in await w.workers[0].generates.at_least(2)}
        asking.cancel()
        assert {one.request for one in await w.workers[0].cancels.at_least(2)} == names


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"prompt": ""}, "prompt", "length >= 1"),
        ({"prompt": "x" * 32_001}, "prompt", "length <= 32000"),
        ({"n": 11}, "n", "<= 10"),
        ({"size": "64"}, "size", "neither auto nor WIDTHxHEIGHT, such as 64x32"),
        ({"size": "60x32"}, "size", "multiples of 8"),
        ({"size": "0x32"}, "size", "neither"),
        ({"size": "8x16384"}, "size", "a side has at most 16383 pixels"),
        ({"size": "128x64"}, "size", "8192 pixels are more than 4096 pixels, the most of this model"),
        ({"size": "99999x99999" * 9}, "size", "length <= 16"),
        ({"steps": 21}, "steps", "21 are more than 20"),
        ({"steps": 0}, "steps", ">= 1"),
        ({"seed": (1 << 63) - 2, "n": 3}, "seed", "the last of 3 pictures would have a seed above"),
        ({"seed": -1}, "seed", ">= 0"),
        ({"guidance": 101}, "guidance", "<= 100"),
        ({"response_format": "url"}, "response_format", "keeps no files: set media.directory"),
        ({"stream": True, "n": 2}, "n", "a stream has one picture"),
        ({"stream": True, "response_format": "url"}, "response_format", "as b64_json"),
        ({"partial_images": 1}, "partial_images", "only allowed with stream"),
        ({"background": "transparent"}, "background", "not supported"),
        ({"model": "other"}, "model", "does not exist"),
    ],
)
async def test_what_cannot_be_made_is_one_clear_line(
    directory: Path, body: dict[str, object], param: str, message: str
) -> None:
    async with world(directory, pictures=OUTPUT) as w, clients(w) as (_, http):
        status, named, said = await refusal(http, **body)
        assert (status, named) == (404 if param == "model" else 400, param)
        assert message in said
        assert w.router.asked.all == []


async def test_advice_is_ignored_and_named(directory: Path) -> None:
    body = {"prompt": "a mill", "quality": "hd", "style": "vivid"}
    async with (
        world(directory, pictures=OUTPUT) as w,
        clients(w) as (_, http),
        http.post(PATH, json=body) as response,
    ):
        assert response.status == 200
        assert response.headers["X-Headrace-Ignored"] == "quality, style"


async def test_a_model_of_text_makes_no_pictures_and_one_of_pictures_has_no_text(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        status, param, said = await refusal(http, model=MODEL)
        assert (status, param) == (400, "model")
        assert "makes no pictures" in said
    async with world(directory, pictures=OUTPUT) as w, clients(w) as (client, http):
        with pytest.raises(openai.BadRequestError, match="makes pictures: ask for them at /v1/images/generations"):
            await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
    videos = PictureOutput("WanPipeline", 64, 32, 8, 64 * 64, 4, 20, frames=9, most_frames=9)
    async with world(directory, pictures=videos) as w, clients(w) as (_, http):
        assert "makes videos: ask for them at /v1/videos" in (await refusal(http))[2]


async def test_a_file_is_kept_for_the_key_that_made_it(directory: Path, tmp_path: Path) -> None:
    access, media = KeysFile(tmp_path).write(), tmp_path / "media"
    async with world(directory, pictures=OUTPUT, access=access, settings=kept(media)) as w:
        async with clients(w, ALICE) as (client, _):
            answer = await client.images.generate(model=MODEL, prompt="a mill", response_format="url")
            assert answer.data is not None
            url = answer.data[0].url or ""
        assert url.startswith(f"{w.url}/v1/media/picture_")
        made = w.workers[0].generates.all[0].picture
        assert made is not None
        others = (("GET", url, BOB, 404), ("GET", url, "", 401), ("GET", url.replace(".png", ".json"), ALICE, 404))
        async with aiohttp.ClientSession() as http:
            async with http.get(url, headers={"Authorization": f"Bearer {ALICE}"}) as response:
                assert (response.status, response.content_type) == (200, "image/png")
                assert await response.read() == file_of(made)
            for method, at, key, status in others:
                async with http.request(method, at, headers={"Authorization": f"Bearer {key}"}) as response:
                    assert response.status == status
                    assert "error" in await response.json()


async def test_a_full_directory_is_named_before_anything_is_computed(directory: Path, tmp_path: Path) -> None:
    settings = kept(tmp_path / "media", bytes=4000)
    async with world(directory, pictures=OUTPUT, settings=settings) as w, clients(w) as (_, http):
        async with http.post(PATH, json={"prompt": "a mill", "n": 2, "response_format": "url"}) as response:
            assert response.status == 429
            assert "media.directory is full" in (await response.json())["error"]["message"]
        assert w.router.asked.all == []
        async with http.post(PATH, json={"prompt": "a mill", "n": 2}) as response:
            assert response.status == 200, "only files need room"


async def test_steps_count_as_tokens_of_the_key_and_of_the_limits(directory: Path, tmp_path: Path) -> None:
    access = KeysFile(tmp_path).write(tokens_per_minute=10)
    async with world(directory, pictures=OUTPUT, access=access) as w, clients(w, ALICE) as (client, _):
        await client.images.generate(model=MODEL, prompt="a mill", n=2)
        with pytest.raises(openai.RateLimitError, match=r"Used 8, Requested 4"):
            await client.images.generate(model=MODEL, prompt="a mill")
    limits = LimitsConfig(requests=1, drain_s=0.0, deadline_s=60.0)
    async with world(directory, pictures=OUTPUT, limits=limits) as w, clients(w) as (client, _):
        with pytest.raises(openai.RateLimitError):
            await client.images.generate(model=MODEL, prompt="a mill", n=2)


async def test_pictures_that_are_held_count_as_bytes_of_their_requests(directory: Path) -> None:
    limits = LimitsConfig(body_bytes=10_000, drain_s=0.0, deadline_s=60.0)
    async with world(directory, pictures=OUTPUT, limits=limits) as w, clients(w) as (client, http):
        worker = w.workers[0]
        output, worker.output = worker.output, None
        holding = asyncio.ensure_future(client.images.generate(model=MODEL, prompt="a mill"))
        [held] = await worker.generates.at_least(1)
        await worker.send(held, 0, [], picture=PicturePiece(4, 0, bytes(2000)))  # with its base64 8,000 bytes
        asking = asyncio.ensure_future(refusal(http))
        _, other = await worker.generates.at_least(2)
        await worker.send(other, 0, [], picture=PicturePiece(4, 0, bytes(2000)))
        status, _, said = await asking
        assert (status, said[:46]) == (429, "the bodies and pictures of other requests fill"), said
        streaming = asyncio.ensure_future(http.post(PATH, json={"prompt": "a mill", "stream": True}))
        *_, third = await worker.generates.at_least(3)
        await worker.send(third, 0, [], picture=PicturePiece(4, 0, bytes(2000)))
        async with await streaming as response:  # perhaps as the stream's last event
            assert "the bodies and pictures of other requests" in await response.text()
        await worker.cancels.at_least(2)
        await worker.send(held, 0, [], "stop", picture=PicturePiece(4, 2000, bytes(500)))  # alone again: any size
        answer = await holding
        assert answer.data is not None
        assert len(b64decode(answer.data[0].b64_json or "")) == 2500
        worker.output = output
        assert (await client.images.generate(model=MODEL, prompt="a mill")).data


async def test_a_deadline_ends_a_picture(directory: Path) -> None:
    async with world(directory, pictures=OUTPUT) as w, clients(w) as (client, _):
        w.workers[0].output = None
        with pytest.raises(openai.InternalServerError) as late:
            await client.images.generate(model=MODEL, prompt="a mill", extra_body={"deadline_s": 0.5})
        assert late.value.status_code == 504
        assert [one.attempt for one in await w.workers[0].cancels.at_least(1)] == [1]
