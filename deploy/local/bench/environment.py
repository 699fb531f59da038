"""Where a bench ran: the machine, the versions and the commit, by which its rows may be compared with others."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping

from msgspec import Struct

from shared.installation import PACKAGED, TREE
from shared.version import VERSION

GIT_LIMIT_S = 10.0


class Environment(Struct, frozen=True):
    """What figures depend on, in addition to the load."""

    machine: str
    versions: Mapping[str, str]
    commit: str = ""
    """The commit of the checkout, with + if files differ from it. Empty in a package."""


def environment_here(servers: Mapping[str, str]) -> Environment:
    """Return this machine, and the versions of Headrace and of the servers that were measured."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {platform.node()}"
    return Environment(machine, {"headrace": VERSION, "python": platform.python_version(), **servers}, _commit())


def _commit() -> str:
    if PACKAGED:
        return ""
    commit, changed = _git("rev-parse", "--short=8", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
    return commit + ("+" if commit and changed else "")


def _git(*words: str) -> str:
    """Return what git prints; empty if it fails."""
    try:
        ran = subprocess.run(
            ["git", "-C", str(TREE), *words], capture_output=True, text=True, timeout=GIT_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return ran.stdout.strip()
