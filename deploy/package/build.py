"""Notes in a wheel which commit it is made of. Hatchling runs it; a source distribution carries the note to its wheel.

A build without git, or of files that are in no repository, notes nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NOTE = "commit.txt"
IN_SOURCES = f"deploy/package/{NOTE}"
IN_WHEEL = f"headrace/{NOTE}"


def commit_of(root: Path) -> str:
    """Return the commit of a checkout and its date; `-dirty` says that files differ from it. Empty if there is none."""
    asked = (
        ["describe", "--always", "--exclude=*", "--dirty"],
        ["log", "-1", "--date=short", "--format=%cd"],
    )
    if not (root / ".git").exists():  # a repository further up would be another one
        return ""
    try:
        said = [
            subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True).stdout.strip()
            for words in asked
        ]
    except (OSError, subprocess.CalledProcessError):
        return ""
    return ", ".join(said)


class CommitHook(BuildHookInterface):  # type: ignore[misc]
    """Adds the note to what is built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - the library's interface
        """Write the note, unless the sources have it."""
        self._aside = Path(tempfile.mkdtemp(prefix="headrace-build-"))
        note = Path(self.root) / IN_SOURCES
        if not note.exists():
            if not (commit := commit_of(Path(self.root))):
                return
            note = self._aside / NOTE
            note.write_text(commit + "\n", encoding="utf-8")
        build_data["force_include"][str(note)] = IN_WHEEL if self.target_name == "wheel" else IN_SOURCES

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Remove what `initialize` has written."""
        shutil.rmtree(self._aside)
