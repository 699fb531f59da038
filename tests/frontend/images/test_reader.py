"""Images from a request to its worker: through a running frontend, real decoders and the official clients."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import resource
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from msgspec.structs import replace
from PIL import Image

from services.frontend import child_processes
from services.frontend.config import FrontendConfig, ImagesConfig
from services.frontend.images.decoder_program import prepare
from services.frontend.images.decoding import PictureShape, Prepare, key_of
from services.frontend.images.reader import ImageReader
from services.frontend.protocol.parts import ImageSource
from shared.config import NatsConfig
from shared.errors import InvalidRequest
from shared.hashing import image_extras, pack_hashes, sequence_hashes, unpack_tokens
from shared.messages.cards import ImageInput
from shared.messages.generate import Refused
from tests.frontend.auth.test_access import ALICE, BOB, KeysFile, bearer
from tests.frontend.images.samples import data_uri, gif_of, picture, png_of_size
from tests.frontend.peers import BLOCK_SIZE, CONTEXT, DEADLINE_S, MODEL, World, clients, world
from tests.tiny_model import write_tiny_model

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template as models for images have: it takes contents as parts, and writes a token for each image."""
RED, BLUE = picture(colour=255), picture("JPEG", (30, 20), colour=0)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's directory whose tokenizer has <image>, and whose template places it."""
    directory = write_tiny_model(tmp_path_factory.mktemp("seeing"), marks=("<image>",))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


WANTED = ImageInput(token_id=319, tokens=20, width=6, height=5, resize=6, filter="BICUBIC")


UNITS = ImageInput(319, 0, 0, 0, 0, "BICUBIC", unit=4, least_pixels=64, most_pixels=50 * 16)
"""Images that keep their shape: RED has 2 by 2 tokens, BLUE has 8 by 5."""
LIMIT = 1 << 20


@asynccontextmanager
async def eyes(
    directory: Path, images: ImagesConfig | None = None, takes: ImageInput = WANTED, **more: Any
) -> AsyncIterator[World]:
    settings = FrontendConfig(images=images or ImagesConfig())
    async with world(directory, images=takes, settings=settings, **more) as w:
        assert w.tokenizer.token_to_id("<image>") == WANTED.token_id
        w.say("fine")
        yield w


def shown(file: bytes, kind: str = "image/png", **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_uri(file, kind), **more}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def user(*parts: dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": [*parts]}]


def prepared(file: bytes) -> tuple[bytes, bytes]:
    found = prepare(Prepare(file, key_of(file, WANTED), "", WANTED, 1 << 20, 1 << 20))
    return found.key, found.pixels


async def test_a_chat_with_images_reaches_the_worker_prepared_and_the_router_with_their_keys(seeing: Path) -> None:
    async with eyes(seeing) as w, clients(w) as (client, _):
        messages = [
            {"role": "system", "content": "Look."},
            *user(text("first "), shown(RED, detail="low"), text(" then "), shown(BLUE, "image/jpeg"), text("?")),
        ]
        answer = await client.chat.completions.create(model=MODEL, messages=messages)
        assert answer.choices[0].message.content == "fine"
        [sent] = w.workers[0].generates.all
        tokens = unpack_tokens(sent.tokens)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(tokens) == sent.prompt_tokens
        assert [(one.key, one.pixels) for one in sent.images] == [prepared(RED), prepared(BLUE)]
        assert all(tokens[one.start : one.start + one.tokens] == [319] * 20 for one in sent.images)
        assert tokens.count(319) == 40
        head = "<|im_start|>system\nLook.<|im_end|>\n<|im_start|>user\nfirst "
        assert w.tokenizer.decode(tokens[: sent.images[0].start], skip_special_tokens=False) == head
        [select] = w.router.asked.all
        extras = image_extras([(one.key, one.start, one.tokens) for one in sent.images], BLOCK_SIZE)
        assert select.hashes == pack_hashes(sequence_hashes(sent.tokens, BLOCK_SIZE, extras=extras))
        assert select.hashes != pack_hashes(sequence_hashes(sent.tokens, BLOCK_SIZE))
        assert (select.images, select.image_tokens) == (2, 40)


async def test_what_a_template_writes_for_an_image_becomes_its_tokens_and_those_around_them(tmp_path: Path) -> None:
    marks = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
    directory = write_tiny_model(tmp_path, marks=marks)
    (directory / "chat_template.jinja").write_text(TEMPLATE.replace("<image>", marks[0]))
    around = f"\n\n{marks[0]}{marks[2]}{marks[1]}\n\n"
    takes = replace(WANTED, template_text=marks[0], prompt_text=around)
    async with world(directory, images=takes, settings=FrontendConfig()) as w, clients(w) as (client, http):
        w.say("fine")
        messages = user(text(f"a {marks[0]}"), shown(RED), text("b"))
        answer = await client.chat.completions.create(model=MODEL, messages=messages)
        [sent] = w.workers[0].generates.all
        tokens = unpack_tokens(sent.tokens)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(tokens) == sent.prompt_tokens
        async with http.post("/tokenize", json={"model": MODEL, "messages": messages}) as counted:
            assert (await counted.json())["tokens"] == tokens
        [image] = sent.images
        assert tokens[image.start : image.start + image.tokens] == [319] * 20
        assert [tokens.count(each) for each in (317, 318, 319)] == [1, 1, 20], "what the user has written stays a text"
        whole = w.tokenizer.decode(tokens, skip_special_tokens=False)
        assert f"user\na {marks[0]}\n\n{marks[0]}{marks[2] * 20}{marks[1]}\n\nb<|im_end|>" in whole
        with pytest.raises(openai.BadRequestError, match="wrote 2 places for the 1 images"):
            await client.chat.completions.create(model=MODEL, messages=user(text(marks[2]), shown(RED)))


async def test_all_apis_show_the_same_image_to_the_worker(seeing: Path) -> None:
    plain = base64.b64encode(RED).decode()
    source = {"type": "base64", "media_type": "image/png", "data": plain}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": user(shown(RED), text("What?"))}),
        ("/v1/chat/completions", {"messages": user({"type": "image_url", "image_url": data_uri(RED)}, text("What?"))}),
        (
            "/v1/responses",
            {"input": user({"type": "input_image", "image_url": data_uri(RED), "detail": "auto"}, text("What?"))},
        ),
        ("/v1/messages", {"max_tokens": 9, "messages": user({"type": "image", "source": source}, text("What?"))}),
        ("/api/chat", {"messages": [{"role": "user", "content": "What?", "images": [plain]}]}),
        ("/api/generate", {"prompt": "What?", "images": [plain]}),
    ]
    async with eyes(seeing) as w, aiohttp.ClientSession(w.url) as http:
        for path, body in asked:
            if path == "/v1/responses":
                body["input"][0]["content"][1]["type"] = "input_text"
            async with http.post(path, json={"model": MODEL, "stream": False, **body}) as answer:
                assert answer.status == 200, (path, await answer.text())
        sent = w.workers[0].generates.all
        assert len(sent) == len(asked)
        assert {(one.tokens, one.images) for one in sent} == {(sent[0].tokens, sent[0].images)}
        for path, key, body in (
            ("/tokenize", "count", {"messages": asked[0][1]["messages"]}),
            ("/v1/messages/count_tokens", "input_tokens", {"messages": asked[3][1]["messages"]}),
        ):
            async with http.post(path, json={"model": MODEL, **body}) as answer:
                assert (await answer.json())[key] == sent[0].prompt_tokens, path


async def test_an_attempt_that_follows_carries_the_images_again_and_nothing_is_decoded_again(seeing: Path) -> None:
    async with eyes(seeing) as w, clients(w) as (client, _):
        first, second = w.workers
        first.answer = lambda one: Refused(one.request, one.attempt, "draining", "it leaves")
        await client.chat.completions.create(model=MODEL, messages=user(shown(RED), text("x"), shown(RED)))
        [refused], [taken] = first.generates.all, second.generates.all
        assert (taken.images, taken.tokens) == (refused.images, refused.tokens)
        assert [one.key for one in taken.images] == [prepared(RED)[0]] * 2


async def test_the_choices_of_a_chat_share_its_images(seeing: Path) -> None:
    async with eyes(seeing) as w, clients(w) as (client, _):
        await client.chat.completions.create(model=MODEL, messages=user(shown(RED)), n=2)
        one, other = w.workers[0].generates.all
        assert one.images == other.images != ()


async def test_a_model_that_takes_no_images_refuses_them_by_name(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (client, http):
        with pytest.raises(openai.BadRequestError, match=r"images are not served by 'tiny/model-1\.0'") as refused:
            await client.chat.completions.create(model=MODEL, messages=user(text("x"), shown(RED)))
        assert refused.value.param == "messages[0].content[1].type"
        assert refused.value.code == "unsupported_value"
        async with http.post("/tokenize", json={"model": MODEL, "messages": user(shown(RED))}) as answer:
            assert answer.status == 400
        assert not w.router.asked.all


IMAGE = {"type": "input_image", "image_url": data_uri(RED)}
BLOCK = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(RED).decode()},
}
RESPONSE = {"input": [{"role": "user", "content": "x"}, {"role": "user", "content": [IMAGE, IMAGE]}]}
ALL_DOORS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": user(text("x"), shown(RED))}, "messages[0].content[1].type"),
    ("/v1/responses", {"instructions": "y", **RESPONSE}, "input[1].content[0].type"),
    (
        "/v1/messages",
        {"max_tokens": 9, "system": "y", "messages": [{"role": "assistant", "content": "z"}, *user(text("x"), BLOCK)]},
        "messages[1].content[1].type",
    ),
    ("/v1/messages/count_tokens", {"messages": user(text("x"), BLOCK)}, "messages[0].content[1].type"),
    ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["AAAA"]}]}, "messages[0].images[0]"),
]


async def test_each_api_names_the_image_that_is_refused_and_what_to_do(directory: Path) -> None:
    async with world(directory) as w, aiohttp.ClientSession(w.url) as http:
        for path, body, place in ALL_DOORS:
            async with http.post(path, json={"model": MODEL, **body}) as answer:
                said = await answer.text()
                assert answer.status == 400, path
            assert f"{place}: images are not served by 'tiny/model-1.0'" in said, path
            assert "; ask a model that sees (docs/images.md), or send text alone" in said, path


async def test_each_api_names_the_place_of_an_image_that_is_wrong(seeing: Path) -> None:
    wrong = "data:image/png;base64,????"
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "????"}}
    asked: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/responses", {"input": user(IMAGE, {**IMAGE, "image_url": wrong})}, "input[0].content[1].image_url: "),
        (
            "/v1/responses",
            {"input": user({"type": "input_image"})},
            "input[0].content[0].image_url: needed: a data URI",
        ),
        (
            "/v1/responses",
            {"input": user(IMAGE, {"type": "input_image", "file_id": "file-1"})},
            "input[0].content[1].file_id: files are not kept here; give `image_url` in its place",
        ),
        (
            "/v1/responses",
            {"input": [{"role": "system", "content": [IMAGE]}]},
            "input[0].content[0].type: images are not served in messages of role 'system'; show them in one of role",
        ),
        ("/v1/messages", {"max_tokens": 9, "messages": user(BLOCK, block)}, "messages[0].content[1].source: "),
    ]
    async with eyes(seeing) as w, aiohttp.ClientSession(w.url) as http:
        for path, body, place in asked:
            async with http.post(path, json={"model": MODEL, **body}) as answer:
                said = await answer.text()
                assert answer.status == 400, (path, said)
            assert place in said, (path, said)


async def test_an_image_of_a_stored_response_is_named_by_that_response(seeing: Path) -> None:
    async with eyes(seeing) as w, aiohttp.ClientSession(w.url) as http:
        asked = {"model": MODEL, "input": user(IMAGE)}
        async with http.post("/v1/responses", json=asked) as answer:
            before = (await answer.json())["id"]
        for name in ("w1", "w2"):
            await w.leave(name)
        await w.announce_worker("w3")
        async with asyncio.timeout(DEADLINE_S):
            said = ""
            while "images are not served" not in said:  # until the frontend knows the new worker
                more = {"model": MODEL, "input": user(IMAGE), "previous_response_id": before}
                async with http.post("/v1/responses", json=more) as answer:
                    said = await answer.text()
        assert "previous_response_id: images are not served" in said


async def test_workers_that_want_images_in_two_ways_get_none(seeing: Path) -> None:
    async with eyes(seeing) as w, clients(w) as (_, http):
        await w.leave("w2")
        await w.announce_worker("w2", images=replace(WANTED, resize=9))
        body = {"model": MODEL, "messages": user(shown(RED))}
        async with asyncio.timeout(DEADLINE_S):
            status, answered = 200, ""
            while status == 200:
                async with http.post("/v1/chat/completions", json=body) as answer:
                    status, answered = answer.status, await answer.text()
        assert "or not by all of its workers" in answered


BAD: dict[str, tuple[Any, str]] = {
    "a bomb": ([shown(png_of_size(60_000, 60_000))], "image 1 has 60000 by 60000 pixels, more than the limit of"),
    "a file cut off": ([shown(RED[:-30])], "image 1 cannot be decoded: "),
    "a wrong type": ([shown(RED), shown(RED, "image/jpeg")], "image 2 is stated to be image/jpeg, but its first bytes"),
    "no base64": ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,????"}}], "is not base64"),
    "no data": ([{"type": "image_url", "image_url": {"url": "data:image/png,x"}}], "does not begin as data:image/png"),
    "no URL": ([{"type": "image_url"}], "needed: a data URI, or a URL"),
    "a hundred": ([shown(RED)] * 100, "100 images in one request, more than 16 (images.most)"),
    "this machine": ([{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}], "images.hosts does not"),
    "the cloud": ([{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}], "images.hosts does not"),
    "a named host here": ([{"type": "image_url", "image_url": {"url": "http://localhost/x"}}], "that is not public"),
}


async def test_what_is_wrong_with_images_is_one_line_before_anything_is_asked_of_a_router(seeing: Path) -> None:
    async with eyes(seeing, ImagesConfig(hosts=("localhost",))) as w, clients(w) as (client, _):
        for case, (parts, why) in BAD.items():
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(model=MODEL, messages=user(*parts))
            assert why in refused.value.message, case
            assert "\n" not in refused.value.message, case
            assert str(refused.value.param).startswith("messages[0].content"), case
        assert not w.router.asked.all


async def test_images_count_for_the_context_and_for_the_largest_message(seeing: Path) -> None:
    many = user(*[shown(RED)] * 16, text("x" * (CONTEXT - 16 * 20)))
    async with eyes(seeing) as w, clients(w) as (client, _):
        with pytest.raises(openai.BadRequestError, match="does not fit the model's context of") as refused:
            await client.chat.completions.create(model=MODEL, messages=many)
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="a prompt with images is not cut"):
            await client.chat.completions.create(
                model=MODEL, messages=user(shown(RED)), extra_body={"truncate_prompt_tokens": 9}
            )
    async with eyes(seeing, nats=NatsConfig(payload_limit_bytes=2048)) as w, clients(w) as (client, _):
        with pytest.raises(openai.APIStatusError, match=r"more than nats\.payload_limit_bytes, 2048") as large:
            await client.chat.completions.create(model=MODEL, messages=user(*[shown(RED)] * 16), max_tokens=9)
        assert large.value.status_code == 413


async def test_a_template_without_a_place_for_images_is_named(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path / "blind", marks=("<image>",))
    (directory / "chat_template.jinja").write_text(TEMPLATE.replace("<image>", ""))
    async with eyes(directory) as w, clients(w) as (client, _):
        with pytest.raises(openai.BadRequestError, match="wrote 0 places for the 1 images"):
            await client.chat.completions.create(model=MODEL, messages=user(shown(RED)))
        answer = await client.chat.completions.create(model=MODEL, messages=user(text("x")))
        assert answer.choices[0].message.content == "fine"


async def test_texts_that_together_are_the_images_token_are_named(seeing: Path) -> None:
    async with eyes(seeing) as w, clients(w) as (client, _):
        with pytest.raises(openai.BadRequestError, match=r"wrote 2 places for the 1 images .* or of texts"):
            await client.chat.completions.create(model=MODEL, messages=user(shown(RED), text("<ima"), text("ge>")))
        assert not w.router.asked.all


async def test_images_of_users_alone_are_seen(seeing: Path) -> None:
    async with eyes(seeing) as w, clients(w) as (client, _):
        by_role: dict[str, Any] = {
            role: [{"role": role, "content": [shown(RED)]}, *user(text("x"))] for role in ("system", "assistant")
        }
        for role in by_role:
            with pytest.raises(openai.BadRequestError, match="images are not served"):
                await client.chat.completions.create(model=MODEL, messages=by_role[role])
        with pytest.raises(openai.BadRequestError, match="a message with images cannot be continued"):
            await client.chat.completions.create(
                model=MODEL, messages=user(shown(RED)), extra_body={"continue_final_message": True}
            )


async def test_the_turns_of_a_chat_decode_an_image_once_and_other_salts_decode_it_again() -> None:
    decoded = 0
    async with aclosing(ImageReader(ImagesConfig(), LIMIT)) as reader:
        for salt, kind, new in (("", RED, 1), ("", RED, 0), ("mine", RED, 1), ("mine", RED, 0), ("", BLUE, 1)):
            source = ImageSource("messages[0].content[0]", data_uri(kind, "image/png" if kind is RED else "image/jpeg"))
            [found] = await reader.read([source], WANTED, salt=salt)
            assert (found.key, found.pixels) == prepared(kind)
            decoded += new
            assert len(reader.prepared) == decoded
        [other] = await reader.read([source], replace(WANTED, resize=9), salt="")
        assert other.key != found.key
        assert reader.prepared.hits == 2
        reader.prepared.validate()


async def test_images_from_which_pictures_are_made_take_no_room_from_those_of_chats() -> None:
    source = ImageSource("image", data_uri(RED))
    async with aclosing(ImageReader(ImagesConfig(), LIMIT)) as reader:
        for _ in range(2):
            [found] = await reader.read([source], PictureShape(64, 64, 8, 512))
            assert found.pixels.startswith(b"\x89PNG")
        assert (len(reader.prepared), reader.prepared.hits) == (0, 0)


async def test_no_prepared_image_is_kept_if_the_settings_say_so() -> None:
    source = ImageSource("messages[0].content[0]", data_uri(RED))
    async with aclosing(ImageReader(ImagesConfig(prepared_bytes=0), LIMIT)) as reader:
        for _ in range(2):
            [found] = await reader.read([source], WANTED)
            assert (found.key, found.pixels) == prepared(RED)
        assert (len(reader.prepared), reader.prepared.hits) == (0, 0)


async def test_an_image_that_a_request_shows_twice_is_decoded_once() -> None:
    one, other = (ImageSource(f"messages[0].content[{at}]", data_uri(RED)) for at in range(2))
    blue = ImageSource("messages[0].content[2]", data_uri(BLUE, "image/jpeg"))
    async with aclosing(ImageReader(ImagesConfig(prepared_bytes=0), LIMIT)) as reader:
        first, second, third = await reader.read([one, blue, other], WANTED)
        assert third is first
        assert second.key != first.key


async def test_a_decoder_keeps_the_memory_of_an_image_for_the_next_one() -> None:
    faults = list[int]()
    async with aclosing(ImageReader(ImagesConfig(), LIMIT)) as reader:
        for number in range(4):
            url = data_uri(picture("JPEG", (4000, 3000)) + bytes([number]), "image/jpeg")
            await reader.read([ImageSource("messages[0].content[0]", url)], WANTED)
            [decoder] = children("decoder_program")
            faults.append(page_faults(decoder))
    assert faults[-1] - faults[1] < 4 * 4000 * 3000 // 4096, "the pages of one of the two"


async def test_a_decoder_gives_the_memory_of_a_large_image_back() -> None:
    file = io.BytesIO()
    Image.new("RGBA", (5000, 5000)).save(file, "PNG")
    async with aclosing(ImageReader(ImagesConfig(), LIMIT)) as reader:
        for source in (file.getvalue(), RED):  # before it reads the second one, it has given back that of the first
            await reader.read([ImageSource("messages[0].content[0]", data_uri(source))], WANTED)
        [decoder] = children("decoder_program")
        assert resident_bytes(decoder) < 160 << 20, "decoded, it takes 200 MB"


async def test_an_image_is_found_again_whatever_white_space_its_base64_has() -> None:
    lines = f"data:image/png;base64,{base64.encodebytes(RED * 9).decode()}".replace("\n", " \t\r\n")
    async with aclosing(ImageReader(ImagesConfig(), LIMIT)) as reader:
        for url in (lines, data_uri(RED * 9)):
            [found] = await reader.read([ImageSource("messages[0].content[0]", url)], WANTED)
            assert (found.key, found.pixels) == prepared(RED * 9)
        assert (len(reader.prepared), reader.prepared.hits) == (1, 1)


async def _refused(reader: ImageReader, url: str) -> str:
    with pytest.raises(InvalidRequest) as refused:
        await reader.read([ImageSource("messages[0].content[0]", url)], WANTED)
    return str(refused.value)


NOT_BASE64 = [
    "????",
    "ab",
    "abc",
    "ab=c",
    "aGk",
    "aGk=x",
    "-_==",
    "====",
    "a",
    "aGl\xe4",
    "aG\ud800=",
    "aG\u2003k=",
    "aGk=aGk=",
]


async def test_what_is_not_base64_is_said() -> None:
    async with aclosing(ImageReader(ImagesConfig(), LIMIT)) as reader:
        for text in (*NOT_BASE64, base64.b64encode(RED)[:-1].decode(), base64.b64encode(RED).decode() + "AAAA"):
            said = await _refused(reader, f"data:image/png;base64,{text}")
            assert said == "messages[0].content[0]: image 1 has data that is not base64", text
        twice = await _refused(reader, f"data:image/png;base64,{data_uri(RED)}")
        assert twice.endswith("has data that is not base64; leave out what is before its data")


async def test_a_file_with_more_bytes_than_the_setting_is_refused_by_its_name() -> None:
    async with aclosing(ImageReader(ImagesConfig(bytes=len(RED)), LIMIT)) as reader:
        assert await reader.read([ImageSource("messages[0].content[0]", data_uri(RED))], WANTED)
        why = f"image 1 has {len(RED) + 1} bytes, more than the limit of {len(RED)} (images.bytes)"
        assert why in await _refused(reader, data_uri(RED + b"x"))


async def test_a_chat_with_another_salt_has_its_images_decoded_again(
    seeing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with eyes(seeing) as w, clients(w) as (client, _):

        async def ask(salt: str) -> None:
            salted = {"cache_salt": salt}
            await client.chat.completions.create(model=MODEL, messages=user(shown(RED)), extra_body=salted)

        await ask("mine")
        [decoder] = children("decoder_program")
        os.kill(decoder, signal.SIGSTOP)
        await ask("mine")
        monkeypatch.setattr(child_processes, "SILENT_S", 0.05)
        with pytest.raises(openai.InternalServerError, match="said nothing"):
            await ask("another")
        one, again = w.workers[0].generates.all
        assert one.images == again.images


async def test_a_decoder_that_is_killed_is_started_again(seeing: Path) -> None:
    async with eyes(seeing) as w, clients(w) as (client, _):
        await client.chat.completions.create(model=MODEL, messages=user(shown(RED)))
        [decoder] = children("decoder_program")
        os.kill(decoder, signal.SIGKILL)
        again: Any = {"model": MODEL, "messages": user(shown(gif_of(3), "image/gif"))}
        with suppress(openai.InternalServerError):  # its end may not be known yet: then a client is to ask again
            await client.chat.completions.create(**again)
        await client.chat.completions.create(**again)
        assert children("decoder_program") != [decoder]
    assert not children("decoder_program")


async def test_a_decoder_that_is_stopped_is_ended_and_keeps_its_place_no_longer(
    seeing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with eyes(seeing) as w, clients(w) as (client, _):
        await client.chat.completions.create(model=MODEL, messages=user(shown(RED)))
        [decoder] = children("decoder_program")
        os.kill(decoder, signal.SIGSTOP)
        with monkeypatch.context() as quick:
            quick.setattr(child_processes, "SILENT_S", 0.05)
            with pytest.raises(openai.InternalServerError, match=r"said nothing for 0\.05 s; ask again"):
                await client.chat.completions.create(model=MODEL, messages=user(shown(BLUE, "image/jpeg")))
        assert not children("decoder_program")
        await client.chat.completions.create(model=MODEL, messages=user(shown(BLUE, "image/jpeg")))


def children(program: str) -> list[int]:
    """Return the processes that this one has started of a program."""
    found = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in found if program in Path(f"/proc/{pid}/cmdline").read_text()]


def page_faults(pid: int) -> int:
    """Return how many pages a process has taken since its start."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


def resident_bytes(pid: int) -> int:
    """Return how much memory a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


async def test_an_answer_that_contains_the_images_token_can_be_sent_back_and_is_no_image(seeing: Path) -> None:
    async with eyes(seeing) as w, clients(w) as (client, _):
        said = w.say("see <image> there")
        answer = await client.chat.completions.create(model=MODEL, messages=user(shown(RED), text("What?")))
        content = answer.choices[0].message.content
        assert content is not None
        back: list[Any] = [
            *user(shown(RED), text("What?")),
            {"role": "assistant", "content": [text("see <image> there")]},
            *user(text("And <image>?")),
        ]
        await client.chat.completions.create(model=MODEL, messages=back)
        [_, sent] = w.workers[0].generates.all
        tokens = unpack_tokens(sent.tokens)
        assert said
        assert (len(sent.images), tokens.count(319)) == (1, 20)
        shown_text = w.tokenizer.decode(tokens[sent.images[0].start + 20 :], skip_special_tokens=False)
        assert "assistant\nsee <image> there<|im_end|>" in shown_text
        assert "user\nAnd <image>?<|im_end|>" in shown_text


async def test_images_that_keep_their_shape_have_tokens_by_their_size_in_every_count(seeing: Path) -> None:
    parts = (text("first "), shown(BLUE, "image/jpeg"), text(" then "), shown(RED), text("?"))
    async with eyes(seeing, takes=UNITS) as w, clients(w) as (client, http):
        for path, key in (("/tokenize", "count"), ("/v1/messages/count_tokens", "input_tokens")):
            cut = [
                {
                    "type": "image",
                    "source": {
                        "type": "base64",
                        "media_type": "image/png",
                        "data": base64.b64encode(RED[:-30]).decode(),
                    },
                }
            ]
            damaged = [shown(RED[:-30])] if path == "/tokenize" else cut
            async with http.post(path, json={"model": MODEL, "messages": user(text("x"), *damaged)}) as answer:
                assert (await answer.json())[key] > 4, "its header says its size"
            async with http.post(path, json={"model": MODEL, "messages": user(text("x"), *damaged * 17)}) as answer:
                assert answer.status == 400, "no more images than a chat may have"
        async with http.post("/tokenize", json={"model": MODEL, "messages": user(*parts)}) as answer:
            listed = (await answer.json())["tokens"]
        assert listed.count(319) == 44
        made = await client.chat.completions.create(model=MODEL, messages=user(*parts), n=2)
        sent, _ = w.workers[0].generates.all
        assert made.usage is not None
        assert unpack_tokens(sent.tokens) == listed
        assert made.usage.prompt_tokens == sent.prompt_tokens == len(listed)
        assert [(one.tokens, one.width, one.height, len(one.pixels)) for one in sent.images] == [
            (40, 32, 20, 3 * 32 * 20),
            (4, 8, 8, 3 * 8 * 8),
        ]
        assert all(listed[one.start : one.start + one.tokens] == [319] * one.tokens for one in sent.images)
        [select] = {one.image_tokens for one in w.router.asked.all}
        assert select == 44


async def test_an_image_that_keeps_its_shape_is_bounded_by_its_shape_the_context_and_a_message(seeing: Path) -> None:
    async with eyes(seeing, takes=UNITS) as w, clients(w) as (client, _):
        many = user(*[shown(BLUE, "image/jpeg")] * 16, text("x" * (CONTEXT - 16 * 40)))
        with pytest.raises(openai.BadRequestError, match="does not fit the model's context of"):
            await client.chat.completions.create(model=MODEL, messages=many)
        with pytest.raises(openai.BadRequestError, match="image 1 has 201 by 1 pixels; one side may be at most 200"):
            await client.chat.completions.create(model=MODEL, messages=user(shown(picture(size=(201, 1)))))
        assert not w.router.asked.all
    async with eyes(seeing, takes=UNITS, nats=NatsConfig(payload_limit_bytes=2300)) as w, clients(w) as (client, _):
        await client.chat.completions.create(model=MODEL, messages=user(shown(BLUE, "image/jpeg")), max_tokens=2)
        with pytest.raises(openai.APIStatusError, match=r"more than nats\.payload_limit_bytes, 2300") as large:
            await client.chat.completions.create(model=MODEL, messages=user(*[shown(BLUE, "image/jpeg")] * 2))
        assert large.value.status_code == 413
        with pytest.raises(openai.BadRequestError, match=r"prepared, it has 28 by 28, and 2352 bytes, more than nats"):
            await client.chat.completions.create(model=MODEL, messages=user(shown(picture(size=(90, 90)))))


async def test_a_key_without_any_tokens_has_no_image_decoded_that_keeps_its_shape(seeing: Path, tmp_path: Path) -> None:
    access = KeysFile(tmp_path).write(tokens_per_minute=80)
    async with eyes(seeing, takes=UNITS, access=access) as w, aiohttp.ClientSession(w.url) as http:
        for file, most, status in ((RED, 5, 200), (RED[:45], 79, 429), (RED[:45], 1, 400)):
            body: dict[str, Any] = {"model": MODEL, "messages": user(shown(file)), "max_tokens": most}
            async with http.post("/v1/chat/completions", json=body, headers=bearer(ALICE)) as answer:
                assert answer.status == status, await answer.text()
        body = {"model": MODEL, "messages": user(shown(RED)), "max_tokens": 79}
        body["messages"][0]["content"][0]["image_url"]["url"] = "data:image/png,RED"
        async with http.post("/v1/chat/completions", json=body, headers=bearer(ALICE)) as answer:
            assert answer.status == 400, "what its URL says is looked at first"


async def test_a_key_without_tokens_has_no_image_decoded(seeing: Path, tmp_path: Path) -> None:
    keys = KeysFile(tmp_path)
    broken = RED[:45]
    async with eyes(seeing) as w, aiohttp.ClientSession(w.url) as http:
        counted = {"model": MODEL, "messages": user(shown(RED), text("What?"))}
        async with http.post("/tokenize", json=counted) as answer:
            cost = (await answer.json())["count"] + 5
    access = keys.write(tokens_per_minute=cost * 3 // 2)
    async with eyes(seeing, access=access) as w, aiohttp.ClientSession(w.url) as http:
        for asked, status in (([shown(RED), text("What?")], 200), ([shown(broken), text("What?")], 429)):
            body: dict[str, Any] = {"model": MODEL, "messages": user(*asked), "max_tokens": 5}
            async with http.post("/v1/chat/completions", json=body, headers=bearer(ALICE)) as answer:
                assert answer.status == status, await answer.text()
        body = {"model": MODEL, "messages": user(shown(broken), text("What?")), "max_tokens": 5}
        async with http.post("/v1/chat/completions", json=body, headers=bearer(BOB)) as answer:
            assert answer.status == 400, "what is wrong with it is said to those who may ask"
