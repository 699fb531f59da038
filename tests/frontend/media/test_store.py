from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from services.frontend.config import MediaConfig
from services.frontend.media.store import MediaStore
from shared.errors import InvalidRequest, Overloaded, Unavailable


def store(directory: Path, **more: object) -> MediaStore:
    return MediaStore(MediaConfig(directory=str(directory), **more), lambda: "http://here")  # type: ignore[arg-type]


async def eventually(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110 - a thread removes the file
        await asyncio.sleep(0.01)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def name_of(url: str) -> str:
    return url.rpartition("/")[2]


async def test_a_file_is_found_by_its_key_alone_also_by_another_frontend_of_the_directory(tmp_path: Path) -> None:
    one, other = store(tmp_path / "media"), store(tmp_path / "media", base_url="https://files.example")
    url = await one.keep(b"picture", "png", "alice")
    assert url.startswith("http://here/v1/media/picture_")
    assert (await other.keep(b"x", "png", "")).startswith("https://files.example/v1/media/picture_")
    name = name_of(url)
    assert (await other.find(name, "alice")).read_bytes() == b"picture"
    for wrong, key in ((name, "bob"), (name, ""), (name.replace("png", "webp"), "alice"), ("../keys.toml", "alice")):
        with pytest.raises(InvalidRequest) as refused:
            await one.find(wrong, key)
        assert refused.value.status == 404
    assert (tmp_path / "media").stat().st_mode & 0o077 == 0


async def test_what_has_expired_is_removed_and_nothing_else(tmp_path: Path) -> None:
    one = store(tmp_path, kept_s=100.0)
    old, new = [name_of(await one.keep(b"picture", "png", "")) for _ in range(2)]
    (tmp_path / "someones.txt").write_text("not ours")
    for name in (old, old.replace(".png", ".json"), "someones.txt"):
        os.utime(tmp_path / name, (0, time.time() - 101))
    one.sweep(time.time())
    assert names(tmp_path) == {new, new.replace(".png", ".json"), "someones.txt"}


async def test_a_file_that_comes_in_parts_may_begin_again(tmp_path: Path) -> None:
    one, name = store(tmp_path, bytes=60), f"video_{'5' * 32}"
    with one.receive() as file:
        for first, content in ((0, b"first try, "), (11, b"long"), (0, b"again"), (5, b" whole")):
            file.put(first, content)
        await one.complete(file, f"{name}.mp4")
    assert (tmp_path / f"{name}.mp4").read_bytes() == b"again whole"
    with one.receive() as file:
        file.put(0, bytes(50))
        with pytest.raises(Overloaded, match=r"11 of 60 bytes"):
            await one.complete(file, f"{name}.mp4")
    async with asyncio.timeout(60.0):
        await eventually(lambda: names(tmp_path) == {f"{name}.mp4"})
    file.put(0, b"a thread that is late")  # not into a descriptor that is another file's now
    assert names(tmp_path) == {f"{name}.mp4"}


async def test_a_sweep_begins_with_the_store(tmp_path: Path) -> None:
    one = store(tmp_path, kept_s=1.0)
    name = name_of(await one.keep(b"picture", "png", ""))
    os.utime(tmp_path / name, (0, 0))
    running = asyncio.ensure_future(one.run())
    async with asyncio.timeout(60.0):
        await eventually(lambda: not (tmp_path / name).exists())
    running.cancel()


async def test_a_file_whose_writing_was_cut_short_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = store(tmp_path, kept_s=100.0)

    def cut_short(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:  # nothing tidies up after a frontend that is killed
        killed.setattr(Path, "rename", cut_short)
        killed.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            one._write({"picture_1.png": b"half"}, True)
    [left] = names(tmp_path)
    os.utime(tmp_path / left, (0, time.time() - 101))
    one.sweep(time.time())
    assert names(tmp_path) == set()


async def test_a_directory_that_cannot_be_read_ends_no_sweeps(tmp_path: Path) -> None:
    (tmp_path / "media").write_text("a file")
    one = store(tmp_path / "media", kept_s=0.01)
    running = asyncio.ensure_future(one.run())
    await asyncio.wait({running}, timeout=0.1)
    (tmp_path / "media").unlink()
    name = name_of(await one.keep(b"picture", "png", ""))
    async with asyncio.timeout(60.0):
        await eventually(lambda: running.done() or not (tmp_path / "media" / name).exists())
    assert not running.done()
    running.cancel()


async def test_the_files_of_a_job_that_waits_for_long_stay_with_its_lock(tmp_path: Path) -> None:
    one, ids = store(tmp_path, kept_s=100.0), [f"video_{digit * 32}" for digit in "12"]
    for name in (f"{each}.{kind}" for each in ids for kind in ("json", "lock")):
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (0, time.time() - 101))
    os.utime(tmp_path / f"{ids[0]}.lock")
    one.sweep(time.time())
    assert names(tmp_path) == {f"{ids[0]}.json", f"{ids[0]}.lock"}


async def test_a_file_for_which_there_is_no_room_is_refused(tmp_path: Path) -> None:
    one = store(tmp_path, bytes=60)
    await one.keep(b"x" * 30, "png", "")
    with pytest.raises(Overloaded, match=r"40 of 60 bytes \(media.bytes\) are taken"):
        await one.keep(b"x" * 30, "png", "")
    assert len(names(tmp_path)) == 2


async def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "media").write_text("a file")
    with pytest.raises(Unavailable, match=r"media\.directory cannot be written"):
        await store(tmp_path / "media").keep(b"x", "png", "")


def test_without_a_directory_nothing_is_kept() -> None:
    with pytest.raises(InvalidRequest, match=r"response_format: this server keeps no files: set media\.directory"):
        MediaStore(MediaConfig(), lambda: "").check("response_format")
