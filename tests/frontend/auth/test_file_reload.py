from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge

from services.frontend.auth import file_reload
from services.frontend.auth.file_reload import FileReloader
from shared.errors import ConfigError
from tests.frontend.peers import DEADLINE_S, Seen

LIMIT_BYTES = 100


class Followers:
    """The values that were parsed from a file of numbers."""

    def __init__(self, *files: Path) -> None:
        self.used: Seen[int] = Seen()
        self.made = 0
        self.stale = Gauge("stale", "", registry=CollectorRegistry())
        self.followed = FileReloader("numbers", files, LIMIT_BYTES, self._make, self.used.add, self.stale)

    def _make(self, contents: list[bytes]) -> int:
        self.made += 1
        try:
            return sum(map(int, contents))
        except ValueError:
            raise ConfigError("not a number") from None

    @property
    def is_stale(self) -> bool:
        [[sample]] = [metric.samples for metric in self.stale.collect()]
        return bool(sample.value)


@asynccontextmanager
async def running(followers: Followers, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr(file_reload, "POLL_S", 0.005)
    task = asyncio.create_task(followers.followed.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(followers: Followers, *, stale: bool) -> None:
    while True:
        if followers.is_stale is stale:
            return
        await asyncio.sleep(0.005)


async def test_a_file_that_changes_is_reloaded_however_it_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("1")
    link.symlink_to(file)
    numbers = Followers(link)
    await numbers.followed.load()
    async with running(numbers, monkeypatch):
        times = file.stat()
        file.write_text("2")  # in place, as long, and at the same time as far as its entry tells
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        await numbers.used.at_least(2)
        (tmp_path / "new").write_text("3")
        (tmp_path / "new").rename(file)
        await numbers.used.at_least(3)
        (tmp_path / "other").write_text("4")
        (tmp_path / "other link").symlink_to(tmp_path / "other")
        (tmp_path / "other link").rename(link)  # as Kubernetes does with secrets
        await numbers.used.at_least(4)
    assert numbers.used.all == [1, 2, 3, 4]


async def test_what_has_not_changed_is_not_made_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("1")
    numbers = Followers(tmp_path / "file")
    for _ in range(3):
        await numbers.followed.load()
    assert numbers.made == 1


async def test_two_files_are_one_thing(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_text("1")
    numbers = Followers(*files)
    await numbers.followed.load()
    files[1].write_text("5")
    await numbers.followed.load()
    assert numbers.used.all == [2, 6]


@pytest.mark.parametrize("how", ["broken", "gone", "a directory", "huge", "a pipe", "a device"])
async def test_a_file_that_cannot_be_read_keeps_the_former_value_in_use_and_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    file = tmp_path / "file"
    file.write_text("1")
    numbers = Followers(file)
    await numbers.followed.load()
    async with running(numbers, monkeypatch):
        file.unlink()
        match how:
            case "broken":
                file.write_text("one")
            case "a directory":
                file.mkdir()
            case "a pipe":
                os.mkfifo(file)
            case "a device":
                file.symlink_to("/dev/zero")
            case "huge":
                file.write_text("1" * (LIMIT_BYTES + 1))
        await until(numbers, stale=True)
        assert numbers.used.all == [1]
        if file.is_dir():
            file.rmdir()
        (tmp_path / "new").write_text("2")
        (tmp_path / "new").rename(file)
        await numbers.used.at_least(2)
        await until(numbers, stale=False)
    [error] = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert error.startswith("numbers: ")
    assert "; the former contents stay in use (" in error


async def test_a_file_that_is_again_what_it_was_is_logged_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file = tmp_path / "file"
    file.write_text("1")
    numbers = Followers(file)
    await numbers.followed.load()
    async with running(numbers, monkeypatch):
        file.rename(tmp_path / "away")
        await until(numbers, stale=True)
        (tmp_path / "away").rename(file)
        await until(numbers, stale=False)
    assert [record.message for record in caplog.records][-1] == "numbers: reloaded, the new contents are in use"
    assert numbers.used.all == [1]


async def test_a_file_that_cannot_be_read_at_the_start_ends_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^numbers: .*file: No such file or directory$"):
        await Followers(tmp_path / "file").followed.load()


async def test_a_file_system_that_hangs_makes_the_files_stale_and_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Parsing stands for reading: both are in the thread."""
    file, answers = tmp_path / "file", threading.Event()
    file.write_text("1")
    numbers = Followers(file)
    await numbers.followed.load()
    make, numbers.followed.parse = numbers.followed.parse, lambda contents: answers.wait() and make(contents)
    monkeypatch.setattr(file_reload, "READ_S", 0.02)
    async with running(numbers, monkeypatch):
        file.write_text("2")
        await until(numbers, stale=True)
        threads = [each for each in threading.enumerate() if each.name == "reload files"]
        assert [each.daemon for each in threads] == [True], "one waits, and the process can end without it"
        answers.set()
        await numbers.used.at_least(2)
        await until(numbers, stale=False)
    assert numbers.used.all == [1, 2]
    [error] = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert "not read within 0.02 s" in error
