"""Where this program lies: in a checkout, or in the package `headrace` of an environment.

    checkout    CHECKOUT/shared                      ./headrace COMMAND    .venv/bin/python -m services.SERVICE
    package     site-packages/headrace/tree/shared   headrace COMMAND      headrace-SERVICE

Messages take the names of commands from here, so that they are right in both. docs/decisions/0006 gives the reasons.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Literal

from shared.version import VERSION

TREE = Path(__file__).resolve().parents[1]
"""The directory of the packages shared, services and deploy, and of the documents."""
PACKAGED = TREE.name == "tree" and TREE.with_name("__main__.py").is_file()
"""True in the package, false in a checkout and in the images."""
BIN = "" if PACKAGED else ".venv/bin/"
"""What people type in front of a program of this environment, such as pip."""


def _command() -> str:
    """Return what people type for the command: in an environment that is not in PATH, all of its path."""
    if not PACKAGED:
        return "./headrace"
    script = Path(sys.executable).with_name("headrace")
    return "headrace" if shutil.which("headrace") or not script.is_file() else shlex.quote(str(script))


COMMAND = _command()
"""What people type for the command `headrace`."""


def install_command(extra: Literal["gpu", "nixl", "otel", "ray"]) -> str:
    """Return the command that installs an extra."""
    if PACKAGED and extra == "nixl":
        return "pip install --no-deps nixl-cu13"  # without the torch that it names (pyproject.toml)
    if PACKAGED:
        return f"pip install 'headrace[{extra}]'"
    if extra in ("otel", "ray"):
        return f"{BIN}pip install --require-hashes -r requirements-{extra}.lock"
    return f"./headrace install-{extra}"


def help_command(service: str) -> str:
    """Return the command that lists the settings of a service."""
    return f"headrace-{service} --help" if PACKAGED else f".venv/bin/python -m services.{service} --help"


def service_program(service: str) -> tuple[str, ...]:
    """Return the program of a service, with its absolute path."""
    if PACKAGED:
        name = f"headrace-{service}"
        places = (Path(sys.executable).parent, Path(sysconfig.get_path("scripts")), Path(sys.argv[0]).absolute().parent)
        return (str(next((place / name for place in places if (place / name).is_file()), places[0] / name)),)
    return (sys.executable, "-P", "-m", f"services.{service}")


def as_here(text: str) -> str:
    """Return the text of a help, which names commands of a checkout, with the names that they have here."""
    listed = ".venv/bin/python -m services.frontend --help"
    return text.replace(listed, help_command("frontend")).replace("./headrace", COMMAND)


def version_text() -> str:
    """Return the name and version, with the commit and its date if the build of the package knew them."""
    commit = TREE.with_name("commit.txt")
    known = f" ({commit.read_text(encoding='utf-8').strip()})" if PACKAGED and commit.is_file() else ""
    return f"headrace {VERSION}{known}"
