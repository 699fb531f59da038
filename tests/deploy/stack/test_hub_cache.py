"""deploy/local/stack/hub_cache.py: each fetch writes parts of its own, and the next one continues what it has left."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from huggingface_hub import constants

from deploy.local.stack import hub_client
from deploy.local.stack.hub import fetch
from deploy.local.stack.hub_cache import ABANDONED_S, HubCache
from deploy.local.stack.hub_files import HubFile, HubModel
from shared.errors import ModelError
from tests.hub_server import HubServer, Repository, files_of, use_hub
from tests.tiny_model import write_tiny_model

MODEL = HubModel("org/tiny")
FILE = HubFile("model.safetensors", 8, "0" * 64)
NOBODY = 2**22 + 1
"""A PID that Linux gives to no process."""
LIMIT_S = 180

FETCH = """
import fcntl, sys
if sys.argv[1] == "without locks":
    fcntl.flock = lambda *_: None
from deploy.local.stack.hub import fetch
from deploy.local.stack.hub_files import HubModel
show = lambda *_: None
print(fetch(HubModel("org/tiny"), weights=True, newest=True, check=show, progress=show, notice=show))
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return files_of(write_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def hub(tiny: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(hub_client, "PAUSE_S", 0.0)
    hub = HubServer()
    hub.repositories["org/tiny"] = Repository(tiny)
    use_hub(hub, tmp_path / "cache", monkeypatch)
    with hub.running():
        yield hub


def fetched() -> Path:
    def show(*_: object) -> None:
        return

    return fetch(MODEL, weights=True, newest=True, check=show, progress=show, notice=show)


def another_process(hub: HubServer, locks: str) -> subprocess.Popen[str]:
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": constants.HF_HUB_CACHE}
    return subprocess.Popen(
        [sys.executable, "-c", FETCH, locks], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def parts() -> list[Path]:
    return list(Path(constants.HF_HUB_CACHE).rglob("*.incomplete"))


def test_without_locks_two_fetches_do_not_write_into_one_file(
    hub: HubServer, tiny: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    hub.faults["model.safetensors"] = ["", "", "stall"]
    paths: list[Path] = []
    first = Thread(target=lambda: paths.append(fetched()))
    first.start()
    assert hub.holding.wait(LIMIT_S), "the first has fetched a half"
    with another_process(hub, "without locks") as second:
        said, wrong = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 0, wrong
    assert files_of(Path(said.strip())) == tiny
    hub.over.set()
    first.join(LIMIT_S)
    assert paths == [Path(said.strip())]
    assert files_of(paths[0]) == tiny
    assert parts() == []


def test_a_file_system_that_has_no_locks_is_no_hindrance(
    hub: HubServer, tiny: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert files_of(fetched()) == tiny


def test_a_fetch_that_was_killed_is_continued(hub: HubServer, tiny: dict[str, bytes]) -> None:
    hub.faults["model.safetensors"] = ["", "", "stall"]
    with another_process(hub, "with locks") as killed:
        assert hub.holding.wait(LIMIT_S)
        until_s = time.monotonic() + LIMIT_S
        while not any(part.stat().st_size > len(tiny["model.safetensors"]) // 4 for part in parts()):
            assert time.monotonic() < until_s, "the half has not come"
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
    hub.asked.clear()
    assert files_of(fetched()) == tiny
    [continued] = [asked.range for asked in hub.asked if asked.path.startswith("/large/")]
    assert int(continued.removeprefix("bytes=").partition("-")[0]) > len(tiny["model.safetensors"]) // 4
    assert parts() == []


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubCache:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    cache = HubCache(MODEL)
    cache.lock_file()
    return cache


def part_of(cache: HubCache, writer: str, content: bytes, age_s: float = 0.0) -> Path:
    part = cache.blob(FILE).with_suffix(f".{writer}incomplete")
    part.write_bytes(content)
    os.utime(part, (time.time() - age_s,) * 2)
    return part


HERE, RANDOM = socket.gethostname(), "0123abcd-4567cdef"


@pytest.mark.parametrize(
    ("writer", "age_s", "taken"),
    [
        ("headrace.", 0, True),
        (f"headrace-{HERE}-{NOBODY}-{RANDOM}.", 0, True),
        (f"headrace-{HERE}-{os.getpid()}-{RANDOM}.", 0, True),  # of a process of a container, which had this PID before
        (f"headrace-{HERE}-{os.getppid()}-{RANDOM}.", 0, False),
        (f"headrace-other-host.org-1-{RANDOM}.", 0, False),
        (f"headrace-other-host.org-1-{RANDOM}.", ABANDONED_S + 100, True),
        ("", ABANDONED_S + 100, False),  # of a huggingface_hub before 1.18
        ("0123abcd.", ABANDONED_S + 100, False),  # of a later one
    ],
)
def test_a_part_is_taken_over_if_no_process_writes_it(cache: HubCache, writer: str, age_s: float, taken: bool) -> None:
    left = part_of(cache, writer, b"1234", age_s)
    assert cache.part(FILE) != left
    assert cache.part_bytes(FILE) == (4 if taken else 0)
    assert left.exists() != taken


def test_of_several_parts_the_largest_is_continued_and_no_other_stays(cache: HubCache) -> None:
    part_of(cache, "headrace.", b"1")
    part_of(cache, f"headrace-{HERE}-{NOBODY}-{RANDOM}.", b"123")
    part_of(cache, f"headrace-{HERE}-{NOBODY}-{RANDOM[::-1]}.", b"123456789")  # too long to be a part
    assert cache.part(FILE).read_bytes() == b"123"
    assert list(cache.blob(FILE).parent.iterdir()) == [cache.part(FILE)]
    cache.close()
    assert [path.name for path in cache.blob(FILE).parent.iterdir()] == [f"{FILE.digest}.headrace.incomplete"]


def test_a_part_of_another_fetch_of_this_process_is_left_to_it(cache: HubCache) -> None:
    other = HubCache(MODEL)
    other.part(FILE).write_bytes(b"12")
    assert cache.part_bytes(FILE) == 0
    assert other.part_bytes(FILE) == 2


def test_what_was_left_of_a_file_that_is_whole_is_removed(hub: HubServer, tiny: dict[str, bytes]) -> None:
    cache = HubCache(MODEL)
    weights = HubFile(
        "model.safetensors", len(tiny["model.safetensors"]), hub.repositories["org/tiny"].digest("model.safetensors")
    )
    fetched()
    left = cache.blob(weights).with_suffix(f".headrace-{HERE}-{NOBODY}-{RANDOM}.incomplete")
    left.write_bytes(b"123")
    others = cache.blob(weights).with_suffix(".incomplete")
    others.write_bytes(b"123")
    fetched()
    assert parts() == [others]


def test_a_part_that_another_tool_writes_is_left_to_it(hub: HubServer, tiny: dict[str, bytes]) -> None:
    cache = HubCache(MODEL)
    cache.lock_file()
    digest = hub.repositories["org/tiny"].digest("model.safetensors")
    part = cache.blob(HubFile("model.safetensors", 1, digest)).with_suffix(".incomplete")
    with part.open("ab") as other:
        other.write(tiny["model.safetensors"][:1000])
        other.flush()
        assert files_of(fetched()) == tiny
        other.write(tiny["model.safetensors"][1000:])
    assert part.read_bytes() == tiny["model.safetensors"]


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_part_that_a_power_cut_has_torn_is_fetched_from_its_beginning(
    hub: HubServer, tiny: dict[str, bytes], name: str
) -> None:
    cache = HubCache(MODEL)
    cache.lock_file()
    content = tiny[name]
    part = cache.blob(HubFile(name, len(content), hub.repositories["org/tiny"].digest(name))).with_suffix(
        ".headrace.incomplete"
    )
    part.write_bytes(content[: len(content) // 2] + bytes(1000))
    assert files_of(fetched()) == tiny
    assert parts() == []


def test_the_content_that_was_announced_is_tried_once_more_only(hub: HubServer, tiny: dict[str, bytes]) -> None:
    cache = HubCache(MODEL)
    cache.lock_file()
    file = HubFile("tokenizer.json", len(tiny["tokenizer.json"]), hub.repositories["org/tiny"].digest("tokenizer.json"))
    cache.blob(file).with_suffix(".headrace.incomplete").write_bytes(b"torn")
    hub.faults["tokenizer.json"] = ["changed"] * 3
    with pytest.raises(ModelError, match=r"tokenizer.json does not have the digest"):
        fetched()
    assert len(hub.faults["tokenizer.json"]) == 1
    assert parts() == []


def test_a_blob_is_on_the_disk_before_it_has_its_name(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, sync = set[int](), os.fsync

    def fsync(number: int) -> None:
        sync(number)
        assert Path(f"/proc/self/fd/{number}").readlink().suffix == ".incomplete"
        synced.add(os.fstat(number).st_ino)

    monkeypatch.setattr(os, "fsync", fsync)

    def check(_path: str) -> None:
        [part] = parts()
        assert part.stat().st_ino in synced, "heads are not torn by a power cut while more comes"

    def show(*_: object) -> None:
        return

    path = fetch(MODEL, weights=True, newest=True, check=check, progress=show, notice=show)
    assert {file.stat().st_ino for file in path.iterdir()} <= synced
