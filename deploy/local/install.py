"""Makes `.venv` from a lock file. `headrace` and `check` run it, with the system's Python and nothing but its library.

    .venv/headrace/NAME.lock   a copy of the lock file that .venv was installed from; written last, so that it is there
                               exactly if the installation is whole (bootstrap.sh compares them)
    .venv.old                  the former .venv while a new one is built; put back if that fails
    .venv.lock                 held (flock) by whoever installs, pip included, until the last of them is dead

requirements-dev.lock and requirements-gpu.lock hold all of requirements.lock and more, so they are installed on top
where the first is in place; otherwise .venv is built anew. The project itself is not installed: a `.pth` file,
relative, names the checkout. That needs no build tools and no network, and a checkout that is moved stays whole.
"""

from __future__ import annotations

import fcntl
import filecmp
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

RUNTIME = "requirements.lock"
DEVELOPMENT = "requirements-dev.lock"
GPU = "requirements-gpu.lock"
PROVIDES = {RUNTIME: (RUNTIME,), DEVELOPMENT: (RUNTIME, DEVELOPMENT), GPU: (RUNTIME, GPU)}
"""Lock file → the lock files that are in place once it is installed."""
LINES_SHOWN = 15
"""Of pip's output, when it fails."""


class InstallError(Exception):
    """The installation failed; the message says what and shows the last lines of the program that failed."""


def install(root: Path, lock_name: str) -> None:
    """Bring `root/.venv` to the lock file. Raises InstallError; then .venv is as it was before, or absent."""
    with _exclusive(root / ".venv.lock") as lock:
        _tidy(root)
        if _in_place(root, lock_name):  # another start did it while we waited
            return
        if lock_name != RUNTIME and _in_place(root, RUNTIME):
            _pip_install(root, lock_name, lock)
        else:
            _build(root, lock_name, lock)
        for name in PROVIDES[lock_name]:
            _stamp(root, name).parent.mkdir(exist_ok=True)
            shutil.copyfile(root / name, _stamp(root, name))


def _outer_python() -> str:
    """The interpreter that runs this, or the one that its virtual environment was made from: a .venv that is activated
    cannot make the one that takes its place."""
    return str(getattr(sys, "_base_executable", sys.executable))  # as the library's venv finds it


def _stamp(root: Path, lock_name: str) -> Path:
    return root / ".venv" / "headrace" / lock_name


def _in_place(root: Path, lock_name: str) -> bool:
    stamp = _stamp(root, lock_name)
    python = root / ".venv" / "bin" / "python"
    return stamp.exists() and python.exists() and filecmp.cmp(root / lock_name, stamp, shallow=False)


def _tidy(root: Path) -> None:
    """Undo what an installation that was killed has left."""
    here, old = root / ".venv", root / ".venv.old"
    whole = any(_in_place(root, name) for name in PROVIDES)
    if here.exists() and not whole and not (here / "headrace").exists():
        raise InstallError(f"{here} was not made by this program; move it away first")
    if old.exists():
        if whole:
            shutil.rmtree(old)
        else:
            shutil.rmtree(here, ignore_errors=True)
            old.rename(here)


@contextmanager
def _exclusive(file: Path) -> Iterator[int]:
    """One installation at a time. The kernel drops the lock with its last holder, however that one died."""
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another start that installs into .venv\n")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()


def _build(root: Path, lock_name: str, lock: int) -> None:
    """A new .venv; on any failure, a signal included, the old one is back in its place."""
    here, old = root / ".venv", root / ".venv.old"
    if here.exists():
        here.rename(old)
    try:
        (here / "headrace").mkdir(parents=True)
        python = sys.version.split()[0]
        _run([_outer_python(), "-m", "venv", str(here)], f"making .venv with Python {python}", lock, total=0)
        _pip_install(root, lock_name, lock)
        _name_checkout(root)
    except BaseException:
        shutil.rmtree(here, ignore_errors=True)
        if old.exists():
            old.rename(here)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _name_checkout(root: Path) -> None:
    """Python joins a relative line of a .pth file to the directory that the file is in."""
    packages = next((root / ".venv" / "lib").glob("python*/site-packages"))
    up = "/".join(".." for _ in packages.relative_to(root).parts)
    (packages / "headrace.pth").write_text(up + "\n", encoding="utf-8")


def _pip_install(root: Path, lock_name: str, lock: int) -> None:
    pins = sum("==" in line and not line.startswith((" ", "#")) for line in (root / lock_name).read_text().splitlines())
    command = [str(root / ".venv" / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    command += ["--no-input", "--progress-bar", "off", "--no-deps", "--require-hashes", "-r", str(root / lock_name)]
    _run(command, f"installing {lock_name}", lock, total=pins)


def _run(command: list[str], what: str, lock: int, *, total: int) -> None:
    """Run to the end, with the packages counted on the terminal. Raises InstallError with the last lines."""
    program = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        pass_fds=(lock,),
    )
    lines: list[str] = []
    seen = 0
    assert program.stdout is not None
    _show_progress(what + (f" ({total} packages)" if total else ""), last=not sys.stderr.isatty())
    try:
        for line in program.stdout:
            lines = [*lines[1 - LINES_SHOWN :], line.rstrip()]
            if total and line.startswith(("Collecting ", "Requirement already satisfied")):
                seen += 1
                _show_progress(f"{what}: {min(seen, total)} of {total} packages", last=False)
            elif line.startswith("Installing collected"):
                _show_progress(f"{what}: unpacking", last=True)
    finally:
        if program.poll() is None and sys.exc_info()[0] is not None:
            program.terminate()
        status = program.wait()
    if status != 0:
        shown = "\n  ".join(lines) or "(it said nothing)"
        raise InstallError(f"{what} failed with status {status}; its last words:\n  {shown}")


def _show_progress(text: str, *, last: bool) -> None:
    """One line that changes on a terminal; where there is none, only the last state, as a line."""
    if sys.stderr.isatty():
        _say(f"\r\033[K{text}" + ("\n" if last else ""))
    elif last:
        _say(text + "\n")


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _terminated(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(143)


def main() -> int:
    """`install.py ROOT LOCK`: 0, or 1 with what failed on stderr."""
    signal.signal(signal.SIGTERM, _terminated)
    signal.signal(signal.SIGHUP, _terminated)
    try:
        install(Path(sys.argv[1]), sys.argv[2])
    except (InstallError, OSError) as wrong:
        _say(f"\nerror: {wrong}\n")
        return 1
    except KeyboardInterrupt:
        _say("\ninterrupted; nothing half made is left\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
