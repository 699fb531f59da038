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


HERE = socket.gethostname()


@pytest.mark.parametrize(
    ("writer", "age_s", "taken"),
    [
        ("", 0, True),
        (f"headrace-{HERE}-{NOBODY}-0123abcd.", 0, True),
        (f"headrace-{HERE}-{os.getpid()}-0123abcd.", 0, False),
        ("headrace-other-host.org-1-0123abcd.", 0, False),
        ("headrace-other-host.org-1-0123abcd.", ABANDONED_S + 100, True),
        ("0123abcd.", ABANDONED_S + 100, False),  # huggingface_hub's
    ],
)
def test_a_part_is_taken_over_if_no_process_writes_it(cache: HubCache, writer: str, age_s: float, taken: bool) -> None:
    left = part_of(cache, writer, b"1234", age_s)
    assert cache.part(FILE) != left
    assert cache.part_bytes(FILE) == (4 if taken else 0)
    assert left.exists() != taken


def test_of_several_parts_the_largest_is_continued_and_no_other_stays(cache: HubCache) -> None:
    part_of(cache, "", b"1")
    part_of(cache, f"headrace-{HERE}-{NOBODY}-0123abcd.", b"123")
    part_of(cache, f"headrace-{HERE}-{NOBODY}-abcd0123.", b"123456789")  # too long to be a part
    assert cache.part(FILE).read_bytes() == b"123"
    assert list(cache.blob(FILE).parent.iterdir()) == [cache.part(FILE)]
    cache.close()
    assert [path.name for path in cache.blob(FILE).parent.iterdir()] == [f"{FILE.digest}.incomplete"]


def test_a_blob_is_on_the_disk_before_it_has_its_name(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, sync = set[int](), os.fsync

    def fsync(number: int) -> None:
        sync(number)
        assert Path(f"/proc/self/fd/{number}").readlink().suffix == ".incomplete"
        synced.add(os.fstat(number).st_ino)

    monkeypatch.setattr(os, "fsync", fsync)
    path = fetched()
    assert {file.stat().st_ino for file in path.iterdir()} <= synced
