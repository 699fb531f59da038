"""Converted models are made once, shared, complete or absent, and bounded."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from services.worker.contracts.messages import Loading
from services.worker.native import prepare as module
from services.worker.native.config import read_config
from services.worker.native.prepare import prepare, prepare_files
from services.worker.native.weights import Checkpoint
from shared.errors import ModelError
from shared.model_file import FILES
from tests.tiny_model import write_tiny_model
from tests.worker.native.gguf_model import write_gguf

LIMIT_S = 180


class Told:
    """Records reported progress; sets an event when `awaited` appears in it."""

    def __init__(self, awaited: str = "") -> None:
        self.lines: list[Loading] = []
        self.heard = threading.Event()
        self._awaited = awaited

    def __call__(self, loading: Loading) -> None:
        self.lines.append(loading)
        if self._awaited and self._awaited in loading.what:
            self.heard.set()


def entries(cache: Path) -> list[Path]:
    return sorted(path for path in cache.iterdir() if path.is_dir())


def test_a_float32_directory_is_used_in_place(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "model")
    assert prepare(source, tmp_path / "cache", Told()) == source
    assert not (tmp_path / "cache").exists()


def test_with_as_stored_a_directory_of_any_type_is_used_in_place(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "model", dtype="bfloat16")
    assert prepare(source, tmp_path / "cache", Told(), as_stored=True) == source
    assert not (tmp_path / "cache").exists()
    (source / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json: missing"):
        prepare(source, tmp_path / "cache", Told(), as_stored=True)


@pytest.mark.parametrize("shards", [1, 3])
def test_sixteen_bit_weights_are_converted_once(tmp_path: Path, shards: int) -> None:
    source = write_tiny_model(tmp_path / "model", dtype="bfloat16", shards=shards)
    told = Told()
    directory = prepare(source, tmp_path / "cache", told)
    assert told.lines[-1] == Loading("converting model to float32", 1.0)
    assert (directory / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    original, copy = Checkpoint(source, read_config(source)), Checkpoint(directory, read_config(directory))
    assert copy.mapped
    for name in original.shapes:
        np.testing.assert_array_equal(original.floats(name), copy.floats(name))
    again = Told()
    assert prepare(source, tmp_path / "cache", again) == directory
    assert again.lines == []
    assert prepare(directory, tmp_path / "cache", again) == directory


def test_all_files_that_say_something_of_the_model_come_along(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "model", dtype="float16")
    for name in FILES:
        (source / name).parent.mkdir(exist_ok=True)
        if not (source / name).exists():
            (source / name).write_text("{}")
    directory = prepare(source, tmp_path / "cache", Told())
    assert {name: (directory / name).read_bytes() for name in FILES} == {
        name: (source / name).read_bytes() for name in FILES
    }
    (source / "chat_template.json").write_text('{"chat_template": "x"}')
    assert prepare(source, tmp_path / "cache", Told()) != directory


def test_a_source_that_changed_is_converted_again(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "model", dtype="float16")
    before = prepare(source, tmp_path / "cache", Told())
    write_tiny_model(source, dtype="float16", seed=1)
    os.utime(source / "model.safetensors", ns=(1, 1))
    after = prepare(source, tmp_path / "cache", Told())
    assert before != after
    assert not np.array_equal(
        Checkpoint(before, read_config(before)).floats("model.embed_tokens.weight"),
        Checkpoint(after, read_config(after)).floats("model.embed_tokens.weight"),
    )


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_damaged_entry_is_converted_again(tmp_path: Path, file: str) -> None:
    source = write_tiny_model(tmp_path / "model", dtype="float16")
    directory = prepare(source, tmp_path / "cache", Told())
    whole = (directory / file).read_bytes()
    (directory / file).write_bytes(whole[:-5])
    told = Told()
    assert prepare(source, tmp_path / "cache", told) == directory
    assert (directory / file).read_bytes() == whole
    assert told.lines[-1].share == 1.0


def test_files_of_a_killed_conversion_are_not_used(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "model", dtype="float16")
    directory = prepare(source, tmp_path / "cache", Told())
    directory.rename(directory.with_name(directory.name + ".partial"))  # as if killed before the rename
    assert prepare(source, tmp_path / "cache", Told()) == directory
    assert entries(tmp_path / "cache") == [directory]


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "model", dtype="float16")

    def fails(loading: Loading) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(source, tmp_path / "cache", fails)
    assert entries(tmp_path / "cache") == []


def test_the_second_of_two_workers_waits_for_the_first(tmp_path: Path) -> None:
    source, cache = write_tiny_model(tmp_path / "model", dtype="float16"), tmp_path / "cache"
    directory = prepare(source, cache, Told())
    waiting, converting = Told(awaited="waiting"), Told()
    prepared: list[Path] = []
    with (cache / f"{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(target=lambda: prepared.append(prepare(source, cache, waiting)))
        second.start()
        assert waiting.heard.wait(10)
        assert not prepared
    second.join(10)
    assert prepared == [directory]
    assert [line.what for line in waiting.lines] == ["waiting for another worker that converts the model"]
    assert prepare(source, cache, converting) == directory


def test_two_workers_that_start_together_convert_once(tmp_path: Path) -> None:
    source, cache = write_tiny_model(tmp_path / "model", dtype="float16"), tmp_path / "cache"
    told = [Told(), Told()]
    prepared: list[Path] = []
    workers = [threading.Thread(target=lambda t=t: prepared.append(prepare(source, cache, t))) for t in told]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert len(prepared) == 2
    assert prepared[0] == prepared[1]
    assert sum("converting" in line.what and line.share == 1.0 for each in told for line in each.lines) == 1


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.usefixtures("no_locks")
def test_without_locks_two_workers_that_start_together_convert_each_for_itself(tmp_path: Path) -> None:
    source, cache = write_tiny_model(tmp_path / "model", dtype="float16"), tmp_path / "cache"
    both = threading.Barrier(2)
    prepared: list[Path] = []

    def meet(loading: Loading) -> None:
        if loading.share in {first_share, 1.0}:
            both.wait(LIMIT_S)

    shares = Told()
    prepare(source, tmp_path / "other", shares)
    first_share = shares.lines[0].share
    workers = [threading.Thread(target=lambda: prepared.append(prepare(source, cache, meet))) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(LIMIT_S)
    assert len(prepared) == 2
    assert prepared[0] == prepared[1]
    assert entries(cache) == [prepared[0]]
    whole = next((tmp_path / "other").glob("*/model.safetensors")).read_bytes()
    assert (prepared[0] / "model.safetensors").read_bytes() == whole
    again = Told()
    assert prepare(source, cache, again) == prepared[0]
    assert again.lines == []


@pytest.mark.usefixtures("no_locks")
def test_without_locks_nothing_is_removed(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    sources = [write_tiny_model(tmp_path / f"model{n}", dtype="float16", seed=n) for n in range(2)]
    first = prepare(sources[0], cache, Told())
    last_used(first, 2 * module._RECENT_S)
    second = prepare(sources[1], cache, Told(), limit_bytes=1)
    assert entries(cache) == sorted([first, second])


PREPARE = """
import sys
from pathlib import Path
from services.worker.native.prepare import prepare, prepare_files
for source in sys.argv[2:]:
    print(prepare(Path(source), Path(sys.argv[1]), lambda loading: None))
print("done", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_process(cache: Path, *sources: Path) -> Iterator[list[Path]]:
    """Yield what another process has prepared and uses until the end."""
    command = [sys.executable, "-c", PREPARE, str(cache), *map(str, sources)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as user:
        assert user.stdout is not None
        prepared = [Path(user.stdout.readline().rstrip()) for _ in sources]
        assert user.stdout.readline() == "done\n"
        yield prepared


def last_used(entry: Path, ago_s: float) -> None:
    for path in (entry, entry / "model.safetensors"):
        os.utime(path, (time.time() - ago_s,) * 2)


def test_the_cache_drops_the_least_recently_used_entry_but_none_of_the_last_hour(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    sources = [write_tiny_model(tmp_path / f"model{n}", dtype="float16", seed=n) for n in range(4)]
    with another_process(cache, *sources[:3]) as prepared:
        first, second, third = prepared
    size_bytes = (first / "model.safetensors").stat().st_size
    last_used(second, 2 * module._RECENT_S)
    last_used(first, 2 * module._RECENT_S - 60)
    fourth = prepare(sources[3], cache, Told(), limit_bytes=int(3.5 * size_bytes))
    assert entries(cache) == sorted([first, third, fourth])
    last = prepare(sources[1], cache, Told(), limit_bytes=1)  # all but the old one were used just now
    assert last == second
    assert entries(cache) == sorted([second, third, fourth])


def test_the_cache_keeps_an_entry_as_long_as_a_process_uses_it(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    sources = [write_tiny_model(tmp_path / f"model{n}", dtype="float16", seed=n) for n in range(4)]
    with another_process(cache, sources[0]) as [served]:
        mine = prepare(sources[1], cache, Told())
        last_used(served, 2 * module._RECENT_S)
        last_used(mine, 2 * module._RECENT_S)
        third = prepare(sources[2], cache, Told(), limit_bytes=1)
        assert entries(cache) == sorted([served, mine, third])
    fourth = prepare(sources[3], cache, Told(), limit_bytes=1)
    assert entries(cache) == sorted([mine, third, fourth])


def test_the_files_of_a_conversion_that_is_long_under_way_stay(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    under_way = cache / "large-0123456789abcdef.partial"
    under_way.mkdir(parents=True)
    (under_way / "model.safetensors").write_bytes(b"written a moment ago")
    os.utime(under_way, (1, 1))
    target = prepare(write_tiny_model(tmp_path / "model", dtype="float16"), cache, Told(), limit_bytes=1)
    assert entries(cache) == sorted([under_way, target])


def test_of_entries_without_weights_those_that_were_asked_for_last_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_FILES", 2)
    source = write_gguf(tmp_path / "model.gguf", write_tiny_model(tmp_path / "model"))
    made: list[Path] = []
    for age_s in (40, 30, 20):
        os.utime(source, (age_s, age_s))  # as after a change
        made.append(prepare_files(source, tmp_path / "cache"))
        os.utime(made[-1], (time.time() - age_s,) * 2)
        if age_s == 30:
            os.utime(source, (40, 40))
            assert prepare_files(source, tmp_path / "cache") == made[0]
    assert [entry.exists() for entry in made] == [True, False, True]


def test_an_entry_that_another_process_removes_meanwhile_does_not_matter(tmp_path: Path) -> None:
    source, cache = write_tiny_model(tmp_path / "model", dtype="float16"), tmp_path / "cache"
    ending, cycles = threading.Event(), 0

    def make_and_remove() -> None:
        nonlocal cycles
        while not ending.is_set():
            entry = cache / f"other-{cycles}"
            entry.mkdir(parents=True)
            (entry / "model.safetensors").touch()
            shutil.rmtree(entry)
            cycles += 1

    other = threading.Thread(target=make_and_remove)
    other.start()
    try:
        target = prepare(source, cache, Told())
        while cycles < 1000 and other.is_alive():
            module._shrink(cache, 0)
    finally:
        ending.set()
        other.join()
    assert cycles >= 1000
    assert entries(cache) == [target]


def test_a_conversion_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "model", dtype="float16")
    (tmp_path / "cache").write_text("a file where the cache should be")
    with pytest.raises(ModelError, match="cache/model-"):
        prepare(source, tmp_path / "cache", Told())


@pytest.mark.parametrize("name", ["missing", "missing.gguf", "weights.bin"])
def test_a_source_that_is_no_model_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=f"{name}: no model here"):
        prepare(tmp_path / name, tmp_path / "cache", Told())


def test_a_gguf_file_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "sha256-0a1b", write_tiny_model(tmp_path / "source"))
    assert read_config(prepare(gguf, tmp_path / "cache", Told())).vocab == 320


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_a_device_in_the_place_of_a_file_is_named_and_not_copied(tmp_path: Path, name: str) -> None:
    source = write_tiny_model(tmp_path / "model", dtype="float16")
    (source / name).unlink()
    (source / name).symlink_to("/dev/zero")
    with pytest.raises(ModelError, match=f"{name}: not a regular file"):
        prepare(source, tmp_path / "cache", Told())


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "model")
    (source / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json: missing"):
        prepare(source, tmp_path / "cache", Told())
