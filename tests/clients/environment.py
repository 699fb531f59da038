"""An environment for other people's clients: programs of tests run in it against our frontend.

It is apart from our own .venv because these clients pin what we do not (LiteLLM: openai below 3), and they are no
dependency of Headrace: only a test that asks for them makes it, from requirements.lock, with the uv of our .venv.

    .headrace/clients/requirements.lock   a copy of the lock file that it was made from; written last, so that it is
                                          there exactly if the environment is whole
    .headrace/clients.lock                held (flock) by the process that makes it; the kernel drops it with its holder

requirements.lock is made of requirements.in: `uv pip compile --universal --generate-hashes -p 3.11 requirements.in -o
requirements.lock`.
"""

from __future__ import annotations

import fcntl
import filecmp
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOCK = HERE / "requirements.lock"
PLACE = HERE.parents[1] / ".headrace" / "clients"
PROGRAMS = HERE / "programs"


class NotMade(Exception):
    """uv failed; the message is what it said."""


def python(place: Path = PLACE, lock: Path = LOCK) -> Path:
    """The environment's interpreter; it is made first where it is not there, or of another lock file. Raises
    NotMade."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_name(f"{place.name}.lock").open("w") as alone:
        fcntl.flock(alone, fcntl.LOCK_EX)
        stamp, found = place / LOCK.name, place / "bin" / "python"
        if not (stamp.exists() and found.exists() and filecmp.cmp(lock, stamp, shallow=False)):
            shutil.rmtree(place, ignore_errors=True)
            _uv("venv", "--quiet", "--python", sys.executable, str(place))
            _uv("pip", "sync", "--quiet", "--python", str(found), "--require-hashes", str(lock))
            shutil.copyfile(lock, stamp)
    return found


def _uv(*arguments: str) -> None:
    command = [str(Path(sys.executable).with_name("uv")), *arguments]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if ended.returncode:
        raise NotMade(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stderr[-3000:]}")


def variables(**more: str) -> dict[str, str]:
    """What a program finds in its environment: nothing of ours that would steer a client, and `more`. LiteLLM asks
    GitHub for prices at its import, again and again, unless a setting forbids it."""
    kept = {name: value for name in ("HOME", "PATH", "TMPDIR", "LANG") if (value := os.environ.get(name)) is not None}
    ours = {"NO_PROXY": "127.0.0.1", "PYTHONUNBUFFERED": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return {**kept, **ours, **more}
