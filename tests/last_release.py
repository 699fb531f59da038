"""The tree of the last release, to run next to this one, and its messages, which were recorded.

`python -m tests.last_release` records them again: at each release, after COMMIT has been set to it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests import wire_messages
from tests.wire_messages import Recorded

COMMIT = "f39c84f426c54aeb62b46896f2233b2dedd4cb95"
"""The commit of the last release, 0.2.0."""
ROOT = Path(__file__).resolve().parents[1]
RECORDED = Path(__file__).with_suffix(".json")


def tree(folder: Path) -> Path | None:
    """Write the last release's files into an empty folder. Return None if this clone does not have its commit."""
    found = subprocess.run(["git", "cat-file", "-e", f"{COMMIT}^{{tree}}"], cwd=ROOT, capture_output=True)
    if found.returncode:
        return None
    packed = subprocess.run(["git", "archive", COMMIT], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", folder], input=packed.stdout, check=True)
    return folder


def modules_of(tree: Path) -> dict[str, str]:
    """Return what makes a Python program take its modules from a tree, for its environment."""
    return {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}


def messages(tree: Path, command: str, asked: str = "") -> list[list[str]]:
    """Return what the program wire_messages prints when it runs on a tree."""
    program = [sys.executable, wire_messages.__file__, command]
    environment = os.environ | modules_of(tree)
    done = subprocess.run(program, cwd=tree, env=environment, input=asked, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed: list[list[str]] = json.loads(done.stdout)
    return printed


def recorded() -> Recorded:
    """Return the messages of the last release."""
    return [(module, name, text) for module, name, text in json.loads(RECORDED.read_text(encoding="utf-8"))]


def record(tree: Path) -> str:
    """Return the text of the file of recorded messages."""
    return "[\n" + ",\n".join(json.dumps(each) for each in messages(tree, "write")) + "\n]\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        found = tree(Path(temporary))
        if found is None:
            sys.exit(f"this clone has no commit {COMMIT}: git fetch origin {COMMIT}")
        RECORDED.write_text(record(found), encoding="utf-8")
