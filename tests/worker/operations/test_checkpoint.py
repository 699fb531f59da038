"""services/worker/operations/checkpoint.py; a worker with it is in tests/worker/test_checkpoint.py."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.worker.operations.checkpoint import CHECKPOINTED, READY, RESTORED, CheckpointFiles, make_directory
from shared.errors import ConfigError


@pytest.fixture
def files(tmp_path: Path) -> CheckpointFiles:
    return CheckpointFiles(tmp_path / "checkpoints", "0a")


def test_a_tools_files_are_answers_and_restored_counts_more(files: CheckpointFiles) -> None:
    assert files.look() == "wait"  # not even the directory is there
    files.open()
    assert (files.directory / READY).exists()
    assert files.look() == "wait"
    (files.directory / CHECKPOINTED).touch()
    assert files.look() == "end"
    (files.directory / RESTORED).write_text("anything")
    assert files.look() == "go on"


def test_opening_and_closing_twice_is_as_once_and_leaves_what_the_tool_wrote(files: CheckpointFiles) -> None:
    for _ in range(2):
        files.open()
    (files.directory / RESTORED).touch()
    for _ in range(2):
        files.close()
    assert [each.name for each in files.directory.iterdir()] == [RESTORED]


def test_a_sleep_sees_nothing_of_another_one(files: CheckpointFiles, tmp_path: Path) -> None:
    files.open()
    (files.directory / RESTORED).touch()
    (tmp_path / "checkpoints" / RESTORED).touch()
    assert CheckpointFiles(tmp_path / "checkpoints", "0b").look() == "wait"


async def test_the_wait_ends_with_the_process_or_an_answer(files: CheckpointFiles) -> None:
    ended = False
    waiting = asyncio.ensure_future(files.wait(lambda: ended))
    await asyncio.sleep(0)
    assert not waiting.done()
    ended = True
    assert await waiting == "wait"
    files.open()
    (files.directory / CHECKPOINTED).touch()
    assert await files.wait(lambda: False) == "end"


def test_a_directory_that_cannot_be_made_is_named_with_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"checkpoint.directory: {tmp_path}/file/below: Not a directory"):
        make_directory(str(tmp_path / "file" / "below"))
    make_directory(str(tmp_path / "new" / "one"))
    assert (tmp_path / "new" / "one").is_dir()
