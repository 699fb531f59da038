"""Refuses a vLLM that the engine or the connector does not work with, by what it lacks."""

from __future__ import annotations

from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path

from services.worker.vllm.interface import missing_names
from services.worker.vllm.used_names import ENGINE, Table
from shared.errors import ConfigError
from shared.installation import COMMAND
from shared.vllm_versions import is_promised, refusal


def check(version: str, needed_by: str = "this engine", table: Table = ENGINE, root: Traversable | None = None) -> None:
    """Raise ConfigError unless the version is promised. The error names what of the `table` is missing in the vLLM
    that is installed, or that lies in `root`. `needed_by` says what works with other versions."""
    if not is_promised(version):
        place = root or _installed()
        why = refusal(version, needed_by, missing_names(table, place) if place else ())
        raise ConfigError(f"{why}: {COMMAND} install-vllm")


def _installed() -> Path | None:
    """Return the directory above the package of this Python's vLLM."""
    spec = find_spec("vllm")
    return Path(spec.origin).parents[1] if spec is not None and spec.origin else None
