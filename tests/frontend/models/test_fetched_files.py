"""A model's files come from a worker where its directory is not this machine's."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from services.frontend.models.fetched_files import ModelFiles
from services.worker.model.sent_files import SentFiles
from shared import subjects
from shared.bus.contract import Message
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.errors import ModelError
from shared.messages.cards import MODEL_CARD, ModelCard
from shared.messages.codec import JSON_HEADER
from shared.messages.model_files import MODEL_FILE_PART, PART_BYTES, ModelFilePart
from tests.frontend.peers import NAMESPACE, card_entry, clients, world


class Sender:
    """The end of the wire at a worker whose model is in `theirs`, and whose card names a directory that is not here."""

    def __init__(self, bus: MemoryBus, theirs: Path, here: Path) -> None:
        self.bus = bus
        [entry] = [value for key, value in card_entry("w9", theirs).items() if "/models/" in key]
        self.card: ModelCard = msgspec.structs.replace(MODEL_CARD.decode(entry, JSON_HEADER), path=str(here))
        self.change: Callable[[ModelFilePart], ModelFilePart] = lambda part: part
        self.asked = 0
        self._files = SentFiles(lambda: msgspec.structs.replace(self.card, path=str(theirs)), self._answer)

    async def start(self) -> None:
        await self.bus.subscribe(subjects.worker(NAMESPACE, "w9", "files"), self._files.receive)

    async def _answer(self, message: Message, payload: bytes) -> bool:
        self.asked += 1
        part = self.change(MODEL_FILE_PART.decode(payload))
        await self.bus.publish(message.reply, MODEL_FILE_PART.encode(part), headers=message.reply_headers())
        return True


@asynccontextmanager
async def sender(theirs: Path, here: Path) -> AsyncIterator[tuple[Sender, ModelFiles]]:
    bus = MemoryBus(MemoryBroker())
    one = Sender(bus, theirs, here)
    await one.start()
    yield one, ModelFiles(bus, NAMESPACE)
    await bus.drain()


def left(directory: Path) -> list[Path]:
    return list(directory.glob("headrace-model-*"))


def names(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file()}


async def test_a_directory_that_is_here_is_used_as_it_is(directory: Path) -> None:
    async with sender(directory, directory) as (one, files), files.directory_of(one.card) as found:
        assert found == directory
        assert one.asked == 0


async def test_files_that_are_not_here_come_whole_from_the_worker_and_are_gone_afterwards(
    directory: Path, tmp_path: Path
) -> None:
    theirs = Path(shutil.copytree(directory, tmp_path / "theirs"))
    large = (theirs / "tokenizer.json").read_bytes() + b" " * (2 * PART_BYTES)
    (theirs / "tokenizer.json").write_bytes(large)
    (theirs / "secret.json").write_text("{}")
    async with sender(theirs, tmp_path / "elsewhere") as (one, files):
        async with files.directory_of(one.card) as found:
            sent = names(found)
            assert sent == {name: content for name, content in names(theirs).items() if name in sent}
            assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= sent.keys()
            assert "secret.json" not in sent
        assert not found.exists()


async def test_another_models_files_at_the_same_path_are_not_used(directory: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(directory, tmp_path / "other"))
    (other / "tokenizer.json").write_text("{}")
    async with sender(directory, other) as (one, files), files.directory_of(one.card) as found:
        assert found != other
        digest = hashlib.sha256((found / "tokenizer.json").read_bytes()).hexdigest()
        assert digest == one.card.tokenizer_digest


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda part: ModelFilePart(failed="Permission denied"), "Permission denied"),
        (lambda part: ModelFilePart(), "No such file"),
        (lambda part: msgspec.structs.replace(part, size=1 << 40), "of 1099511627776"),
        (lambda part: msgspec.structs.replace(part, data=bytes(PART_BYTES + 1)), f"{PART_BYTES + 1} bytes"),
        (lambda part: msgspec.structs.replace(part, size=part.size + 1), "changed while it was read"),
        (lambda part: msgspec.structs.replace(part, data=part.data[::-1]), "SHA-256"),
    ],
)
async def test_a_worker_that_sends_nonsense_is_named_and_nothing_is_left(
    change: Callable[[ModelFilePart], ModelFilePart],
    why: str,
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    async with sender(directory, tmp_path / "elsewhere") as (one, files):
        one.change = change
        with pytest.raises(ModelError, match=f"worker w9 does not send its files: .*{why}"):
            async with files.directory_of(one.card):
                pass
    assert not left(tmp_path)


async def test_without_room_for_the_files_the_model_waits_and_the_frontend_goes_on(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    async with sender(directory, tmp_path / "elsewhere") as (one, files):
        with pytest.raises(ModelError, match="its files cannot be kept here: No such file or directory"):
            async with files.directory_of(one.card):
                pass


async def test_a_worker_of_an_older_version_is_named_and_its_card_waits(directory: Path, tmp_path: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        elsewhere = {
            key: msgspec.json.encode(msgspec.json.decode(value) | {"path": str(tmp_path / "elsewhere")})
            if "/models/" in key
            else value
            for key, value in card_entry("w3", directory, "far").items()
        }
        await w.announce("w3", elsewhere)
        await w.until("/v1/models/far", lambda answer: "does not send its files" in answer["error"]["message"])
        async with http.get("/health") as response:
            assert response.status == 200
