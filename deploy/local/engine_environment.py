"""The environment of an engine that has one of its own: where its Python is, what is stamped there, and how it comes to
be there whole or not at all.

NAME/headrace.json   what was installed; written last, so that it is there only if all of it is there
NAME.lock            held (flock) by the processes that install, pip included, until the last has ended
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from deploy.local.install import exclusive, run
from shared.errors import ConfigError
from shared.installation import COMMAND

STAMP = "headrace.json"


class Steps(NamedTuple):
    """Where an installation's programs are reported, and the lock that they hold."""

    say: Callable[[str], None]
    lock: int
    """The lock's file descriptor."""

    def run(self, command: Sequence[str], what: str, watch: Callable[[str], None] = lambda _line: None) -> None:
        self.say(what)
        run(command, what, self.lock, watch)


class EngineEnvironment(NamedTuple):
    """What an environment is for."""

    engine: str
    """The name of the engine, and of the command that installs it."""
    shown: str
    """What is installed, as people write it."""
    disk_bytes: int
    """Room that the installation needs."""

    def require(self, environment: Path) -> Path:
        """Return the environment's Python. Raise ConfigError if it is not installed."""
        if not (python_of(environment).exists() and (environment / STAMP).exists()):
            raise ConfigError(
                f"--engine {self.engine} needs {self.shown}, which is not installed:"
                f" {COMMAND} install-{self.engine} ({environment})"
            )
        return python_of(environment)

    def install(
        self,
        environment: Path,
        say: Callable[[str], None],
        build: Callable[[Steps], Mapping[str, str]],
        check: Callable[[], None] = lambda: None,
    ) -> bool:
        """Have `build` make the environment and stamp it with what that returns, unless it is there: then `check` it.
        Return whether it was made now. Raise ConfigError, and what `build` and `check` raise."""
        lock = environment.with_name(f"{environment.name}.lock")
        try:
            environment.parent.mkdir(parents=True, exist_ok=True)
            lock.touch()
        except OSError as wrong:
            raise ConfigError(f"{wrong.filename}: {wrong.strerror}; {self.shown} is installed there") from None
        with exclusive(lock, lambda: say(f"waiting for another process that installs {self.shown}")) as held:
            if (environment / STAMP).exists():
                check()
                return False
            free_bytes = shutil.disk_usage(environment.parent).free
            if free_bytes < self.disk_bytes:
                free, needed = free_bytes >> 30, self.disk_bytes >> 30
                raise ConfigError(
                    f"{environment.parent}: {free} GiB are free; {self.shown} needs {needed} GiB to install"
                )
            shutil.rmtree(environment, ignore_errors=True)  # what an installation that was killed has left
            try:
                stamp = build(Steps(say, held))
                (environment / STAMP).write_text(json.dumps(stamp) + "\n", encoding="utf-8")
            except BaseException:
                shutil.rmtree(environment, ignore_errors=True)
                raise
        return True


def python_of(environment: Path) -> Path:
    """Return the Python of an environment."""
    return environment / "bin" / "python"


def stamped(environment: Path, name: str) -> str:
    """Return what the stamp has under this name. Raise ConfigError if that cannot be read."""
    try:
        return str(json.loads((environment / STAMP).read_text(encoding="utf-8"))[name])
    except (OSError, ValueError, KeyError, TypeError) as wrong:
        raise ConfigError(
            f"{environment / STAMP} cannot be read ({wrong}): remove {environment}, install again"
        ) from None
