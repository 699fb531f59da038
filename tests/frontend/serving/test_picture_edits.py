"""Pictures from images as clients ask for them; scripted workers make files that follow from what they were asked."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from base64 import b64decode
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from msgspec.structs import replace
from PIL import Image

from services.frontend.config import FrontendConfig, ImagesConfig, LimitsConfig
from shared.config import NatsConfig
from shared.messages.cards import PictureEdit, PictureOutput
from shared.messages.frames import PicturePiece
from shared.messages.generate import Picture
from tests.frontend.auth.test_access import ALICE, BOB, KeysFile
from tests.frontend.images.samples import SVG, animated_webp, data_uri, picture, png_of_size
from tests.frontend.peers import MODEL, clients, file_of, world

TEXTS = PictureOutput("StableDiffusionPipeline", 64, 32, 8, 64 * 64, 4, 20)
OUTPUT = replace(TEXTS, edit=PictureEdit(1, 0.8), masked_edit=PictureEdit(1, 1.0, negative=False))
PATH = "/v1/images/edits"
SQUARE = picture("PNG", (16, 16), 200)


async def refusal(http: aiohttp.ClientSession, **body: object) -> tuple[int, str, str]:
    """The status, the parameter and the message."""
    async with http.post(PATH, json={"prompt": "a mill", "image": data_uri(SQUARE), **body}) as response:
        error = json.loads(await response.read())["error"]
        return response.status, error["param"], error["message"]


def opened(file: bytes) -> Image.Image:
    return Image.open(io.BytesIO(file), formats=["PNG"])


def without_images(one: Picture | None) -> Picture:
    assert one is not None
    return replace(one, images=(), mask=b"")


async def test_openais_client_edits_an_image(directory: Path) -> None:
    async with world(directory, pictures=OUTPUT) as w, clients(w) as (client, _):
        file, more = ("a.jpg", picture("JPEG", (30, 60), 90), "image/jpeg"), {"seed": 7, "steps": 5, "guidance": 2.5}
        size: Any = "32x64"
        answer = await client.images.edit(
            model=MODEL, image=file, prompt="a mill", n=2, size=size, extra_body=more | {"negative_prompt": "rain"}
        )
        made = [one.picture for one in w.workers[0].generates.all]
        wanted = Picture("a mill", 32, 64, 5, 7, negative="rain", guidance=2.5, strength=0.8)
        assert [without_images(one) for one in made] == [wanted, replace(wanted, seed=8)]
        assert made[0] is not None
        assert made[1] is not None
        assert made[0].images == made[1].images
        [image] = made[0].images
        assert (opened(image).size, opened(image).mode) == ((32, 64), "RGB")
        assert answer.data is not None
        assert [b64decode(one.b64_json or "") for one in answer.data] == [file_of(one) for one in made if one]
        assert (answer.size, answer.output_format) == ("32x64", "png")
        assert answer.usage is not None
        assert answer.usage.total_tokens == 10


async def test_a_mask_is_made_of_transparency_and_has_the_size_of_the_picture(directory: Path) -> None:
    clear = Image.new("RGBA", (16, 16), (0, 0, 0, 255))
    clear.paste((0, 0, 0, 0), (8, 0, 16, 16))
    mask = io.BytesIO()
    clear.save(mask, "PNG")
    async with world(directory, pictures=OUTPUT) as w, clients(w) as (client, _):
        await client.images.edit(model=MODEL, image=("a.png", SQUARE), mask=("m.png", mask.getvalue()), prompt="a mill")
        made = w.workers[0].generates.all[0].picture
        assert made is not None
        assert (made.width, made.height, made.strength) == (40, 40, 1.0)
        grey = opened(made.mask)
        assert (grey.size, grey.mode, grey.getpixel((0, 0)), grey.getpixel((39, 39))) == ((40, 40), "L", 0, 255)


@pytest.mark.parametrize(
    "text",
    [data_uri(SQUARE), base64.b64encode(SQUARE).decode(), [data_uri(SQUARE, "application/octet-stream")]],
    ids=["uri", "base64", "list"],
)
async def test_an_image_in_json_is_a_data_uri_or_base64(directory: Path, text: object) -> None:
    async with world(directory, pictures=OUTPUT) as w, clients(w) as (_, http):
        async with http.post(PATH, json={"prompt": "a mill", "image": text, "strength": 0.25}) as response:
            assert response.status == 200, await response.text()
            assert json.loads(await response.read())["size"] == "40x40"
        made = w.workers[0].generates.all[0].picture
        assert made is not None
        assert (made.strength, made.steps) == (0.25, 4)


@pytest.mark.parametrize("url", [data_uri(SQUARE), base64.b64encode(SQUARE).decode()], ids=["uri", "base64"])
async def test_images_in_json_are_references_as_openai_writes_them(directory: Path, url: str) -> None:
    reference = {"image_url": url}
    async with world(directory, pictures=OUTPUT) as w, clients(w) as (_, http):
        body = {"prompt": "a mill", "images": [reference], "mask": {**reference, "file_id": None}}
        async with http.post(PATH, json=body) as response:
            assert response.status == 200, await response.text()
        made = w.workers[0].generates.all[0].picture
        assert made is not None
        assert (len(made.images), opened(made.mask).mode) == (1, "L")
        refused: tuple[tuple[dict[str, object], str, str], ...] = (
            ({}, "image", "image: needed: either `image` or `images`"),
            ({"image": url, "images": [reference]}, "image", "needed: either"),
            ({"images": []}, "images", "length >= 1"),
            ({"images": [{}]}, "images[0].image_url", "needed: a data URI, or a URL"),
            ({"images": [{"file_id": "file-1"}]}, "images[0].file_id", "files are not kept here"),
            ({"images": [reference], "mask": {}}, "mask.image_url", "needed: a data URI, or a URL"),
            ({"images": [{"image_url": data_uri(SQUARE[:-30])}]}, "images[0].image_url", "image 1 cannot be decoded"),
        )
        for more, param, said in refused:
            async with http.post(PATH, json={"prompt": "a mill", **more}) as response:
                error = (await response.json())["error"]
                assert (response.status, error["param"]) == (400, param), error
                assert said in error["message"]


async def test_several_images_keep_their_shapes_if_the_model_takes_them(directory: Path) -> None:
    several = replace(TEXTS, texts=False, edit=PictureEdit(16))
    async with world(directory, pictures=several) as w, clients(w) as (client, http):
        files: Any = [("a.png", SQUARE), ("b.png", picture("PNG", (40, 10)))]
        size: Any = "64x64"
        await client.images.edit(model=MODEL, image=files, prompt="a mill", size=size)
        made = w.workers[0].generates.all[0].picture
        assert made is not None
        assert (made.width, made.height, made.strength) == (64, 64, None)
        assert [opened(image).size for image in made.images] == [(64, 64), (128, 32)]
        async with http.post("/v1/images/generations", json={"prompt": "a mill"}) as response:
            error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, "model")
            assert "makes pictures from images alone: ask for them at /v1/images/edits" in error["message"]
        assert "strength: StableDiffusionPipeline takes none" in (await refusal(http, strength=0.5))[2]


async def test_a_stream_has_the_events_of_edits(directory: Path) -> None:
    async with world(directory, pictures=OUTPUT) as w, clients(w) as (client, _):
        w.workers[0].output = None
        asking = client.images.edit(model=MODEL, image=SQUARE, prompt="a mill", stream=True, partial_images=1)
        opening = asyncio.ensure_future(asking)
        [generate] = await w.workers[0].generates.at_least(1)
        await w.workers[0].send(generate, 0, [], picture=PicturePiece(2, preview=b"half"))
        events: Any = aiter(await opening)
        partial = await anext(events)
        assert (partial.type, b64decode(partial.b64_json)) == ("image_edit.partial_image", b"half")
        await w.workers[0].send(generate, 0, [], "stop", picture=PicturePiece(4, 0, b"whole"))
        last = await anext(events)
        assert (last.type, b64decode(last.b64_json)) == ("image_edit.completed", b"whole")


async def test_a_lost_attempt_is_made_again_elsewhere_from_the_same_image(directory: Path) -> None:
    async with world(directory, pictures=OUTPUT) as w, clients(w) as (client, _):
        first, second = w.workers
        first.output = None
        asking = asyncio.ensure_future(client.images.edit(model=MODEL, image=SQUARE, prompt="a mill"))
        [generate] = await first.generates.at_least(1)
        await first.send(generate, 0, [], "error", error="the engine was lost")
        await asking
        [again] = await second.generates.at_least(1)
        assert again.picture == generate.picture


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"image": []}, "image", "length >= 1"),
        ({"image": ""}, "image", "length >= 1"),
        ({"image": None}, "image", "got `null`"),
        ({"image": [data_uri(SQUARE)] * 17}, "image", "length <= 16"),
        (
            {"image": [data_uri(SQUARE)] * 2},
            "image",
            "2 images; StableDiffusionPipeline makes a picture from 1 at most",
        ),
        ({"image": "not base64"}, "image", "the image has data that is not base64"),
        ({"image": data_uri(png_of_size(60_000, 60_000))}, "image", "the image has 60000 by 60000 pixels, more than"),
        ({"image": [data_uri(SQUARE[:-30])]}, "image[0]", "image 1 cannot be decoded"),
        ({"image": data_uri(SVG, "image/svg+xml")}, "image", "is stated to be 'image/svg+xml'; PNG, JPEG, WebP and"),
        ({"image": data_uri(picture("TIFF"), "image/png")}, "image", "is of another format by its first bytes"),
        ({"image": data_uri(animated_webp(), "image/webp")}, "image", "is an animated WebP"),
        ({"image": "http://127.0.0.1/a.png"}, "image", "is at 127.0.0.1, which images.hosts does not name"),
        ({"image": "file:///etc/passwd"}, "image", "not base64"),
        ({"mask": data_uri(picture("PNG", (8, 6)))}, "mask", "has 8 by 6 pixels, and the image has 16 by 16"),
        ({"mask": "?"}, "mask", "the mask has data that is not base64"),
        ({"mask": data_uri(SQUARE), "negative_prompt": "x"}, "negative_prompt", "takes none"),
        ({"strength": 0}, "strength", "> 0"),
        ({"strength": 1.5}, "strength", "<= 1"),
        ({"strength": 0.1, "steps": 9}, "strength", "0.1 of 9 steps is less than one step"),
        ({"size": "60x32"}, "size", "multiples of 8"),
        ({"steps": 21}, "steps", "21 are more than 20"),
        ({"output_format": "gif"}, "output_format", "gif"),
    ],
)
async def test_what_cannot_be_made_is_one_clear_line(
    directory: Path, body: dict[str, object], param: str, message: str
) -> None:
    async with world(directory, pictures=OUTPUT) as w, clients(w) as (_, http):
        status, named, said = await refusal(http, **body)
        assert (status, named) == (400, param), said
        assert message in said
        assert w.router.asked.all == []


async def test_a_model_without_this_way_refuses_by_name(directory: Path) -> None:
    async with world(directory, pictures=TEXTS) as w, clients(w) as (_, http):
        said = "(StableDiffusionPipeline) makes no pictures from images"
        assert said in (await refusal(http))[2]
        assert "(StableDiffusionPipeline) takes none" in (await refusal(http, mask=data_uri(SQUARE)))[2]
    masked = replace(TEXTS, texts=False, masked_edit=PictureEdit())
    async with world(directory, pictures=masked) as w, clients(w) as (_, http):
        assert (await refusal(http))[2].endswith("makes no pictures from images; send a mask, too")
    async with world(directory) as w, clients(w) as (_, http):
        assert "makes no pictures; --engine diffusers" in (await refusal(http, model=MODEL))[2]


async def test_images_that_do_not_fit_into_a_message_are_413(directory: Path) -> None:
    nats = NatsConfig(payload_limit_bytes=300_000)
    noise = io.BytesIO()
    Image.effect_noise((200, 200), 90).save(noise, "PNG")
    large = replace(OUTPUT, width=400, height=400, most_pixels=1 << 20)
    async with world(directory, pictures=large, nats=nats) as w, clients(w) as (_, http):
        status, param, said = await refusal(http, image=data_uri(noise.getvalue()))
        assert (status, param) == (413, "image")
        assert "too many for nats.payload_limit_bytes, 300000; ask for a smaller size" in said
        assert w.router.asked.all == []


async def test_images_are_read_only_until_they_are_too_many_for_a_message(directory: Path) -> None:
    noise = io.BytesIO()
    Image.effect_noise((200, 200), 90).save(noise, "PNG")
    able = replace(TEXTS, width=200, height=200, most_pixels=1 << 20, edit=PictureEdit(16))
    async with world(directory, pictures=able, nats=NatsConfig(payload_limit_bytes=300_000)) as w:
        async with clients(w) as (_, http):
            images = [data_uri(noise.getvalue() + bytes([index])) for index in range(8)] + [data_uri(b"broken")]
            status, param, said = await refusal(http, image=images)
        assert (status, "nats.payload_limit_bytes, 300000" in said) == (413, True), said
        assert param != "image[8]", "the rest is not decoded"


async def test_a_key_without_steps_has_no_image_decoded_and_a_refused_one_costs_nothing(
    directory: Path, tmp_path: Path
) -> None:
    access = KeysFile(tmp_path).write(tokens_per_minute=10)
    async with world(directory, pictures=OUTPUT, access=access) as w, clients(w, ALICE) as (client, _):
        for _ in range(3):
            with pytest.raises(openai.BadRequestError, match="the image is of another format"):
                await client.images.edit(model=MODEL, image=b"broken", prompt="a mill")
        await client.images.edit(model=MODEL, image=SQUARE, prompt="a mill", n=2)
        with pytest.raises(openai.RateLimitError, match=r"Used 8, Requested 4"):
            await client.images.edit(model=MODEL, image=b"broken", prompt="a mill")
    async with world(directory, pictures=OUTPUT, access=access) as w, clients(w, BOB) as (client, _):
        await client.images.edit(model=MODEL, image=SQUARE, prompt="a mill")


async def test_uploads_are_bounded(directory: Path) -> None:
    limits = LimitsConfig(images=0, drain_s=0.0, deadline_s=60.0)
    settings = FrontendConfig(images=ImagesConfig(bytes=1000))
    async with world(directory, pictures=OUTPUT, settings=settings) as w, clients(w) as (client, http):
        assert (
            "has 2001 bytes, more than the limit of 1000 (images.bytes)" in (await refusal(http, image="A" * 2668))[2]
        )
        with pytest.raises(openai.APIStatusError) as large:
            await client.images.edit(model=MODEL, image=bytes(5 << 20), prompt="a mill")
        assert large.value.status_code == 413
    async with world(directory, pictures=OUTPUT, limits=limits) as w, clients(w) as (client, _):
        assert (await client.images.edit(model=MODEL, image=SQUARE, prompt="a mill")).data, (
            "one alone is never too many"
        )
        assert w.router.asked.all
