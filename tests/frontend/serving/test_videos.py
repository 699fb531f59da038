"""Videos as clients ask for them, as jobs; scripted workers make files that follow from what they were asked for."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import openai
import pytest
from msgspec.structs import replace
from PIL import Image

from services.frontend.config import FrontendConfig, MediaConfig
from services.frontend.media.jobs import VideoJob
from services.frontend.media.locks import JobLock
from shared.messages.cards import PictureEdit, PictureOutput
from shared.messages.frames import PicturePiece
from shared.messages.generate import Picture, Refused
from tests.frontend.auth.test_access import ALICE, BOB, KeysFile
from tests.frontend.images.samples import data_uri, png_of_size
from tests.frontend.images.samples import picture as picture_file
from tests.frontend.peers import DEADLINE_S, MODEL, World, clients, file_of, world

OUTPUT = PictureOutput("WanPipeline", 64, 32, 16, 64 * 64, 4, 20, frames=9, most_frames=65, frame_multiple=4)
PATH = "/v1/videos"
Http = aiohttp.ClientSession


def kept(directory: Path, **more: Any) -> FrontendConfig:
    return FrontendConfig(media=MediaConfig(directory=str(directory / "media"), **more))


async def ask(http: Http, method: str, path: str = "", **more: Any) -> tuple[int, Any]:
    async with http.request(method, f"{PATH}{path}", **more) as response:
        return response.status, json.loads(await response.read())


async def begun(http: Http, **body: object) -> str:
    """The id of a new job."""
    status, video = await ask(http, "POST", json={"prompt": "a mill", **body})
    assert status == 200, video
    name: str = video["id"]
    return name


async def until(http: Http, name: str, *wanted: str) -> Any:
    """The job once it has one of these states."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            _, video = await ask(http, "GET", f"/{name}")
            if video["status"] in wanted:
                return video
            await asyncio.sleep(0.02)


async def made(w: World) -> Picture:
    [generate] = await w.workers[0].generates.at_least(1)
    assert generate.picture is not None
    return generate.picture


async def test_a_video_is_made_and_its_file_is_there(directory: Path, tmp_path: Path) -> None:
    async with world(directory, pictures=OUTPUT, settings=kept(tmp_path)) as w, clients(w) as (_, http):
        name = await begun(http, seconds="1", size="32x32", seed=5, steps=3, negative_prompt="rain")
        video = await until(http, name, "completed")
        picture = await made(w)
        assert picture == Picture("a mill", 32, 32, 3, 5, negative="rain", frames=17, format="mp4")
        assert (video["progress"], video["seconds"], video["size"], video["error"]) == (100, "1.0625", "32x32", None)
        assert video["expires_at"] - video["completed_at"] in (86400, 86399)
        for path in (f"{PATH}/{name}/content", f"/v1/media/{name}.mp4"):
            async with http.get(path) as response:
                assert (response.status, response.content_type) == (200, "video/mp4")
                assert await response.read() == file_of(picture)
        left = {path.suffix for path in (tmp_path / "media").glob(f"{name}.*")}
        assert left == {".json", ".mp4"}


@pytest.mark.filterwarnings("ignore:The Sora API is scheduled:DeprecationWarning")
async def test_openais_client_makes_finds_and_deletes_a_video(directory: Path, tmp_path: Path) -> None:
    async with world(directory, pictures=OUTPUT, settings=kept(tmp_path)) as w, clients(w) as (client, _):
        size: Any = "32x32"
        begun = await client.videos.create(prompt="a mill", model=MODEL, seconds="4", size=size, extra_body={"seed": 3})
        assert (begun.status, begun.object, begun.size) == ("queued", "video", "32x32")
        video = await client.videos.poll(begun.id, poll_interval_ms=20)
        assert (video.status, video.progress, video.error) == ("completed", 100, None)
        content = await client.videos.download_content(video.id)
        assert content.read() == file_of(await made(w))
        assert [one.id async for one in client.videos.list(limit=1)] == [video.id]
        assert (await client.videos.delete(video.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.videos.retrieve(video.id)


async def test_a_form_as_openais_client_sends_it_is_read(directory: Path, tmp_path: Path) -> None:
    async with world(directory, pictures=OUTPUT, settings=kept(tmp_path)) as w, clients(w) as (_, http):
        with aiohttp.MultipartWriter("form-data") as form:
            for name, value in (("prompt", "7"), ("seconds", "0.25"), ("steps", "2"), ("seed", "9")):
                form.append(value).set_content_disposition("form-data", name=name)
        status, video = await ask(http, "POST", data=form)
        assert status == 200, video
        assert await made(w) == Picture("7", 64, 32, 2, 9, frames=5, format="mp4")
        with aiohttp.MultipartWriter("form-data") as form:
            form.append("a mill").set_content_disposition("form-data", name="prompt")
            form.append(b"png").set_content_disposition("form-data", name="input_reference", filename="a.png")
        status, answer = await ask(http, "POST", data=form)
        assert (status, answer["error"]["param"]) == (400, "input_reference")


async def test_progress_is_followed_by_events(directory: Path, tmp_path: Path) -> None:
    async with world(directory, pictures=OUTPUT, settings=kept(tmp_path)) as w, clients(w) as (_, http):
        w.workers[0].output = None
        name = await begun(http)
        [generate] = await w.workers[0].generates.at_least(1)
        async with http.get(f"{PATH}/{name}/events") as response:
            lines = response.content
            first = json.loads((await lines.readline()).removeprefix(b"data: "))
            assert (first["status"], first["progress"]) == ("queued", 0)
            await w.workers[0].send(generate, 0, [], picture=PicturePiece(2))
            await lines.readline()
            second = json.loads((await lines.readline()).removeprefix(b"data: "))
            assert (second["status"], second["progress"]) == ("in_progress", 40)
            await w.workers[0].send(generate, 0, [], "stop", picture=PicturePiece(4, 0, b"whole"))
            rest = (await response.read()).decode().split("\n\n")
        assert json.loads(rest[-3].strip().removeprefix("data: "))["status"] == "completed"
        assert rest[-2] == "data: [DONE]"


async def test_a_cancelled_job_frees_its_worker_and_a_deleted_one_is_gone(directory: Path, tmp_path: Path) -> None:
    async with world(directory, pictures=OUTPUT, settings=kept(tmp_path)) as w, clients(w) as (_, http):
        w.workers[0].output = None
        first, second = await begun(http), await begun(http)
        await w.workers[0].generates.at_least(2)
        status, video = await ask(http, "POST", f"/{first}/cancel")
        assert (status, video["status"], video["error"]["code"]) == (200, "cancelled", "cancelled")
        assert (await ask(http, "DELETE", f"/{second}")) == (
            200,
            {"id": second, "object": "video.deleted", "deleted": True},
        )
        await w.workers[0].cancels.at_least(2)
        assert (await ask(http, "GET", f"/{second}"))[0] == 404
        status, answer = await ask(http, "GET", f"/{first}/content")
        assert (status, answer["error"]["code"]) == (404, "video_not_ready")
        assert not list((tmp_path / "media").glob(f"{second}.*"))


async def test_a_job_is_its_keys_alone(directory: Path, tmp_path: Path) -> None:
    access = KeysFile(tmp_path).write()
    async with world(directory, pictures=OUTPUT, access=access, settings=kept(tmp_path)) as w:
        alice, bob = ({"Authorization": f"Bearer {key}"} for key in (ALICE, BOB))
        async with aiohttp.ClientSession(w.url, headers=alice) as http:
            name = await begun(http)
            await until(http, name, "completed")
            assert [one["id"] for one in (await ask(http, "GET"))[1]["data"]] == [name]
        async with aiohttp.ClientSession(w.url, headers=bob) as http:
            asked = (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/content"), ("GET", "/events"))
            for method, path in asked:
                status, answer = await ask(http, method, f"/{name}{path}")
                assert (status, answer["error"]["code"]) == (404, "video_not_found")
            assert (await ask(http, "GET"))[1]["data"] == []
            async with http.get(f"/v1/media/{name}.mp4") as response:
                assert response.status == 404


async def test_a_list_has_pages(directory: Path, tmp_path: Path) -> None:
    async with world(directory, pictures=OUTPUT, settings=kept(tmp_path)) as w, clients(w) as (_, http):
        names = [await begun(http) for _ in range(3)]
        for name in names:
            await until(http, name, "completed")
        _, page = await ask(http, "GET", "?limit=2")
        assert [one["id"] for one in page["data"]] == names[:0:-1]
        assert (page["has_more"], page["first_id"], page["last_id"]) == (True, names[2], names[1])
        _, page = await ask(http, "GET", f"?limit=2&after={names[1]}")
        assert ([one["id"] for one in page["data"]], page["has_more"]) == (names[:1], False)
        _, page = await ask(http, "GET", "?order=asc")
        assert [one["id"] for one in page["data"]] == names
        for wrong in ("limit=0", "limit=101", "order=up", "after=nothing"):
            assert (await ask(http, "GET", f"?{wrong}"))[0] in (400, 404)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"prompt": ""}, "prompt", "length >= 1"),
        ({"seconds": "0"}, "seconds", "not a number of seconds above 0"),
        ({"seconds": "5"}, "seconds", "81 frames at 16 a second, more than 65 frames"),
        ({"size": "8x16"}, "size", "multiples of 16"),
        ({"steps": 21}, "steps", "more than 20"),
        ({"input_reference": "x"}, "input_reference", "WanPipeline takes none"),
    ],
)
async def test_what_cannot_be_made_is_one_clear_line(
    directory: Path, tmp_path: Path, body: dict[str, object], param: str, message: str
) -> None:
    async with world(directory, pictures=OUTPUT, settings=kept(tmp_path)) as w, clients(w) as (_, http):
        status, answer = await ask(http, "POST", json={"prompt": "a mill", **body})
        assert (status, answer["error"]["param"]) == (400, param)
        assert message in answer["error"]["message"]
        assert w.router.asked.all == []


async def test_jobs_are_bounded_and_need_a_directory(directory: Path, tmp_path: Path) -> None:
    async with world(directory, pictures=OUTPUT, settings=kept(tmp_path, jobs=1)) as w, clients(w) as (_, http):
        w.workers[0].output = None
        await begun(http)
        status, answer = await ask(http, "POST", json={"prompt": "a mill"})
        assert (status, answer["error"]["message"]) == (429, "1 videos are not made yet (media.jobs)")
    async with world(directory, pictures=OUTPUT) as w, clients(w) as (_, http):
        status, answer = await ask(http, "POST", json={"prompt": "a mill"})
        assert (status, answer["error"]["message"][:47]) == (400, "videos need a place: set media.directory of the")


async def test_a_full_directory_refuses_a_job_before_it_is_computed(directory: Path, tmp_path: Path) -> None:
    async with world(directory, pictures=OUTPUT, settings=kept(tmp_path, bytes=100)) as w, clients(w) as (_, http):
        status, answer = await ask(http, "POST", json={"prompt": "a mill"})
        assert (status, answer["error"]["message"][:23]) == (429, "media.directory is full")
        assert w.router.asked.all == []
        assert not (tmp_path / "media").exists()


async def test_a_job_that_no_worker_takes_waits_and_fails_at_its_time(directory: Path, tmp_path: Path) -> None:
    async with world(directory, pictures=OUTPUT, settings=kept(tmp_path, job_s=3.0)) as w, clients(w) as (_, http):
        for worker in w.workers:
            worker.answer = lambda one: Refused(one.request, one.attempt, "overloaded", "full")
        video = await until(http, await begun(http), "failed")
        assert video["error"]["code"] in ("overloaded", "unavailable", "deadline_exceeded")
        assert "full" in video["error"]["message"]


@pytest.mark.parametrize("status", ["queued", "in_progress"])
async def test_a_job_of_a_frontend_that_is_gone_is_made_here_with_the_same_seed(
    directory: Path, tmp_path: Path, status: Any
) -> None:
    """Another frontend has left its files, and the kernel its lock."""
    media = tmp_path / "media"
    media.mkdir()
    picture = Picture("a mill", 32, 32, 3, 5, frames=9, format="mp4")
    name = f"video_{'5' * 32}"
    job = VideoJob(id=name, key="", model=MODEL, picture=picture, priority=0, created_s=1.0, due_s=4e9, status=status)
    (media / f"{job.id}.json").write_bytes(msgspec.json.encode(job))
    lock = JobLock.take(media / f"{job.id}.lock", create=True)
    assert lock is not None
    async with world(directory, pictures=OUTPUT, settings=kept(tmp_path)) as w, clients(w) as (_, http):
        assert (await ask(http, "GET", f"/{job.id}"))[1]["status"] == status
        assert w.workers[0].generates.all == [], "its owner lives"
        lock.release(over=False)
        await until(http, job.id, "completed")
        assert await made(w) == picture


@pytest.mark.filterwarnings("ignore:The Sora API is scheduled:DeprecationWarning")
async def test_a_video_that_begins_with_an_image_outlives_its_frontend(directory: Path, tmp_path: Path) -> None:
    able, media = replace(OUTPUT, texts=False, edit=PictureEdit(negative=False)), tmp_path / "media"
    async with world(directory, pictures=able, settings=kept(tmp_path)) as w, clients(w) as (client, http):
        w.workers[0].output = None
        reference: Any = ("a.png", picture_file("PNG", (50, 50)), "image/png")
        name = (await client.videos.create(prompt="a mill", model=MODEL, input_reference=reference)).id
        first = await made(w)
        [image] = first.images
        assert Image.open(io.BytesIO(image)).size == (first.width, first.height) == (32, 32)
        assert (media / f"{name}.png").read_bytes() == image
        for body, said in (
            ({}, "input_reference: WanPipeline makes videos from an image alone: send one"),
            ({"input_reference": "?"}, "input_reference: the image has data that is not base64"),
            ({"input_reference": {}}, "input_reference.image_url: needed: a data URI, or a URL (docs/images.md)"),
            ({"input_reference": "?", "negative_prompt": "x"}, "negative_prompt: WanPipeline takes none"),
            (
                {"input_reference": data_uri(png_of_size(60_000, 60_000))},
                "input_reference: the image has 60000 by 60000 pixels, more than the limit of 33554432 (images.pixels)",
            ),
        ):
            status, answer = await ask(http, "POST", json={"prompt": "a mill", **body})
            assert (status, answer["error"]["message"]) == (400, said)
    async with world(directory, pictures=able, settings=kept(tmp_path)) as w, clients(w) as (_, http):
        await until(http, name, "completed")
        assert await made(w) == first
        await eventually(lambda: {path.suffix for path in media.glob(f"{name}.*")} == {".json", ".mp4"})


async def test_a_job_whose_image_is_gone_fails_and_is_not_made_from_its_text_alone(
    directory: Path, tmp_path: Path
) -> None:
    media, able = tmp_path / "media", replace(OUTPUT, edit=PictureEdit())
    async with world(directory, pictures=able, settings=kept(tmp_path)) as w, clients(w) as (_, http):
        w.workers[0].output = None
        name = await begun(http, input_reference={"image_url": data_uri(picture_file("PNG", (50, 50)))})
        assert (await made(w)).images
    (media / f"{name}.png").unlink()
    async with world(directory, pictures=able, settings=kept(tmp_path)) as w, clients(w) as (_, http):
        video = await until(http, name, "failed", "completed")
        assert video["error"]["message"] == "the image that it is made from cannot be read in media.directory"
        assert w.router.asked.all == []


async def test_a_job_whose_video_is_there_is_completed_and_not_made_again(directory: Path, tmp_path: Path) -> None:
    """Its frontend could not write the job's end."""
    media = tmp_path / "media"
    media.mkdir()
    picture = Picture("a mill", 32, 32, 3, 5, frames=9, format="mp4")
    job = VideoJob(
        id=f"video_{'6' * 32}", key="", model=MODEL, picture=picture, priority=0, created_s=1.0, due_s=4e9, step=3
    )
    for ending, content in ((".json", msgspec.json.encode(job)), (".lock", b""), (".mp4", b"whole")):
        (media / f"{job.id}{ending}").write_bytes(content)
    async with world(directory, pictures=OUTPUT, settings=kept(tmp_path)) as w, clients(w) as (_, http):
        await until(http, job.id, "completed")
        async with http.get(f"{PATH}/{job.id}/content") as response:
            assert await response.read() == b"whole"
        assert w.router.asked.all == []


async def test_a_list_reads_the_file_of_a_job_that_is_over_once(directory: Path, tmp_path: Path) -> None:
    async with world(directory, pictures=OUTPUT, settings=kept(tmp_path)) as w, clients(w) as (_, http):
        short, long = await begun(http), await begun(http, prompt="m" * 2000)
        for name in (short, long):
            await until(http, name, "completed")
        await eventually(lambda: not list((tmp_path / "media").glob("*.lock")))
        assert len((await ask(http, "GET"))[1]["data"]) == 2
        for name in (short, long):
            (tmp_path / "media" / f"{name}.json").write_text("not read again")
        _, page = await ask(http, "GET")
        assert [one["id"] for one in page["data"]] == [short], "long ones are not kept in memory"
        (tmp_path / "media" / f"{short}.json").unlink()
        assert (await ask(http, "GET"))[1]["data"] == []


async def test_a_job_whose_end_cannot_be_written_is_made_again_once_it_can(directory: Path, tmp_path: Path) -> None:
    media, away = tmp_path / "media", tmp_path / "away"
    async with world(directory, pictures=OUTPUT, settings=kept(tmp_path)) as w, clients(w) as (_, http):
        output, w.workers[0].output = w.workers[0].output, None
        name = await begun(http)
        [generate] = await w.workers[0].generates.at_least(1)
        media.rename(away)
        media.write_text("as if the disk were full")
        await w.workers[0].send(generate, 0, [], "stop", picture=PicturePiece(4, 0, b"whole"))
        w.workers[0].output = output
        await eventually(lambda: can_be_locked(away / f"{name}.lock"))
        media.unlink()
        away.rename(media)
        assert (await until(http, name, "completed", "failed"))["status"] == "completed"


def can_be_locked(path: Path) -> bool:
    """Whether a job's owner has left it, with its lock."""
    if not path.exists():
        raise AssertionError("the lock is gone, and with it the job")
    lock = JobLock.take(path)
    if lock is not None:
        lock.release(over=False)
    return lock is not None


async def test_a_frontend_that_ends_leaves_its_jobs_to_the_next_one(directory: Path, tmp_path: Path) -> None:
    settings = kept(tmp_path)
    async with world(directory, pictures=OUTPUT, settings=settings) as w, clients(w) as (_, http):
        w.workers[0].output = None
        name = await begun(http)
        first = await made(w)
    async with world(directory, pictures=OUTPUT, settings=settings) as w, clients(w) as (_, http):
        await until(http, name, "completed")
        assert await made(w) == first


async def test_a_job_that_another_frontend_makes_is_cancelled_by_a_file(directory: Path, tmp_path: Path) -> None:
    settings = kept(tmp_path)
    async with world(directory, pictures=OUTPUT, settings=settings) as w, clients(w) as (_, http):
        w.workers[0].output = None
        first, second = await begun(http), await begun(http)
        async with world(directory, pictures=OUTPUT, settings=settings) as other, clients(other) as (_, elsewhere):
            assert (await ask(elsewhere, "POST", f"/{first}/cancel"))[0] == 200
            assert (await ask(elsewhere, "DELETE", f"/{second}"))[0] == 200
            await until(elsewhere, first, "cancelled")
            await w.workers[0].cancels.at_least(2)
            await eventually(lambda: not list((tmp_path / "media").glob(f"{second}.*")))
            assert (await ask(http, "GET", f"/{second}"))[0] == 404


async def test_a_video_that_is_deleted_elsewhere_as_it_is_completed_is_gone(directory: Path, tmp_path: Path) -> None:
    settings = kept(tmp_path)
    async with world(directory, pictures=OUTPUT, settings=settings) as w, clients(w) as (_, http):
        w.workers[0].output = None
        name = await begun(http)
        [generate] = await w.workers[0].generates.at_least(1)
        async with world(directory, pictures=OUTPUT, settings=settings) as other, clients(other) as (_, elsewhere):
            assert (await ask(elsewhere, "DELETE", f"/{name}"))[0] == 200
            await w.workers[0].send(generate, 0, [], "stop", picture=PicturePiece(4, 0, b"whole"))
            await eventually(lambda: not list((tmp_path / "media").glob(f"*{name}.*")))
            assert (await ask(http, "GET", f"/{name}"))[0] == 404


async def eventually(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not true():  # noqa: ASYNC110 - another frontend removes files
            await asyncio.sleep(0.02)
