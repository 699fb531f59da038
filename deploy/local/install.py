"""Makes `.venv` from a lock file. `headrace` and `check` run it with the system's Python and its standard library.

    .venv/headrace/NAME.lock   a copy of the lock file that .venv was installed from; written last, so that it is there
                               only if the installation is complete (bootstrap.sh compares them)
    .venv.old                  the former .venv while a new one is built; put back if that fails
    .venv.lock                 held (flock) by the processes that install, pip included, until the last has ended

The other lock files hold all of requirements.lock and more, so they are installed on top if that is installed;
otherwise .venv is built again. The project itself is not installed: a `.pth` file names the checkout by a relative
path. That needs no build tools and no network, and the checkout can be moved.

docs/decisions/0006 gives the reasons.
"""

from __future__ import annotations

import errno
import fcntl
import filecmp
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

RUNTIME = "requirements.lock"
DEVELOPMENT = "requirements-dev.lock"
GPU = "requirements-gpu.lock"
NIXL = "requirements-nixl.lock"
PROVIDES = {RUNTIME: (RUNTIME,)} | {name: (RUNTIME, name) for name in (DEVELOPMENT, GPU, NIXL)}
"""Lock file → the lock files that are satisfied once it is installed."""
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""The errors of a file system that has no locks."""
LINES_SHOWN = 15
"""Last lines of a program's output that are shown if it fails."""


class InstallError(Exception):
    """The installation failed; the message names the step and shows the last lines of its program."""


def install(root: Path, lock_name: str) -> None:
    """Install the lock file into `root/.venv`. Raise InstallError; then .venv is as it was before, or absent."""
    with exclusive(root / ".venv.lock", lambda: _say("waiting for another process that installs into .venv\n")) as lock:
        _tidy(root)
        if _in_place(root, lock_name):  # another process did it while this one waited
            return
        if lock_name != RUNTIME and _in_place(root, RUNTIME):
            _pip_install(root, lock_name, lock)
        else:
            _build(root, lock_name, lock)
        for name in PROVIDES[lock_name]:
            _stamp(root, name).parent.mkdir(exist_ok=True)
            shutil.copyfile(root / name, _stamp(root, name))


def _outer_python() -> str:
    """Return the interpreter that runs this or, in a virtual environment, the one that it was made from: an activated
    .venv cannot make its own replacement."""
    return str(getattr(sys, "_base_executable", sys.executable))  # as the module venv finds it


def _stamp(root: Path, lock_name: str) -> Path:
    return root / ".venv" / "headrace" / lock_name


def _in_place(root: Path, lock_name: str) -> bool:
    stamp = _stamp(root, lock_name)
    python = root / ".venv" / "bin" / "python"
    return stamp.exists() and python.exists() and filecmp.cmp(root / lock_name, stamp, shallow=False)


def _tidy(root: Path) -> None:
    """Remove or put back what an installation that was killed has left."""
    here, old = root / ".venv", root / ".venv.old"
    whole = any(_in_place(root, name) for name in PROVIDES)
    if here.exists() and not whole and not (here / "headrace").exists():
        raise InstallError(f"{here} was not made by ./headrace; move it away first")
    if old.exists():
        if whole:
            shutil.rmtree(old)
        else:
            shutil.rmtree(here, ignore_errors=True)
            old.rename(here)


@contextmanager
def exclusive(file: Path, waiting: Callable[[], None]) -> Iterator[int]:
    """Hold the lock of a file, if its file system has locks; call `waiting` if another process holds it. The kernel
    releases it when its last holder has ended, however it ended."""
    with file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as wrong:
            if wrong.errno not in NO_LOCKS:
                raise
        yield lock.fileno()


def _build(root: Path, lock_name: str, lock: int) -> None:
    """Build a new .venv. On any failure, a signal included, the old one is put back."""
    here, old = root / ".venv", root / ".venv.old"
    if here.exists():
        here.rename(old)
    try:
        (here / "headrace").mkdir(parents=True)
        making = f"making .venv with Python {sys.version.split()[0]}"
        _show_progress(making, last=not sys.stderr.isatty())
        run([_outer_python(), "-m", "venv", str(here)], making, lock)
        _pip_install(root, lock_name, lock)
        _name_checkout(root)
    except BaseException:
        shutil.rmtree(here, ignore_errors=True)
        if old.exists():
            old.rename(here)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _name_checkout(root: Path) -> None:
    """Write the .pth file: Python resolves its relative line from the directory of the file."""
    packages = next((root / ".venv" / "lib").glob("python*/site-packages"))
    up = "/".join(".." for _ in packages.relative_to(root).parts)
    (packages / "headrace.pth").write_text(up + "\n", encoding="utf-8")


def _pip_install(root: Path, lock_name: str, lock: int) -> None:
    pins = sum("==" in line and not line.startswith((" ", "#")) for line in (root / lock_name).read_text().splitlines())
    what = f"installing {lock_name}"
    seen = 0

    def watch(line: str) -> None:
        nonlocal seen
        if line.startswith(("Collecting ", "Requirement already satisfied")):
            seen += 1
            _show_progress(f"{what}: {min(seen, pins)} of {pins} packages", last=False)
        elif line.startswith("Installing collected"):
            _show_progress(f"{what}: unpacking", last=True)

    command = [str(root / ".venv" / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    command += ["--no-input", "--progress-bar", "off", "--no-deps", "--require-hashes", "-r", str(root / lock_name)]
    _show_progress(f"{what} ({pins} packages)", last=not sys.stderr.isatty())
    run(command, what, lock, watch)


def run(command: Sequence[str], what: str, lock: int, watch: Callable[[str], None] = lambda _line: None) -> None:
    """Run a program to its end, and call `watch` with each line that it writes. Raise InstallError with the last lines.

    The program holds the file `lock` too: one that outlives this process, as pip does when this process is killed,
    still keeps others out.
    """
    program = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        pass_fds=(lock,),
    )
    assert program.stdout is not None
    lines: deque[str] = deque(maxlen=LINES_SHOWN)
    try:
        with program.stdout:
            for line in program.stdout:
                lines.append(line.rstrip())
                watch(line)
    finally:
        if program.poll() is None and sys.exc_info()[0] is not None:
            program.terminate()
        status = program.wait()
    if status != 0:
        shown = "\n  ".join(lines) or "(no output)"
        raise InstallError(f"{what} failed with status {status}; its last lines:\n  {shown}")


def _show_progress(text: str, *, last: bool) -> None:
    """Show the progress: on a terminal in one line that changes, else only the last state."""
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
    """Run `install.py ROOT LOCK`. Return 0, or 1 with the error on stderr."""
    signal.signal(signal.SIGTERM, _terminated)
    signal.signal(signal.SIGHUP, _terminated)
    try:
        install(Path(sys.argv[1]), sys.argv[2])
    except (InstallError, OSError) as wrong:
        _say(f"\nerror: {wrong}\n")
        return 1
    except KeyboardInterrupt:
        _say("\ninterrupted; the next start installs again\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
