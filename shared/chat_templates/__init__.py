"""The chat templates that replace a model's own: those here, and files."""

from __future__ import annotations

from pathlib import Path

from shared.errors import ModelError

_HERE = Path(__file__).parent
NAMES = frozenset(file.stem for file in _HERE.glob("*.jinja"))
"""The names of the templates here."""


def template_file(given: str) -> Path:
    """Return the file of a template: `given` is the name of one here, or a path. Raise ModelError."""
    if given in NAMES:
        return _HERE / f"{given}.jinja"
    file = Path(given)
    try:
        found = file.is_file()
    except (OSError, ValueError) as wrong:  # a card may name anything
        raise ModelError(f"chat template {given[:256]!r}: {wrong}") from None
    if not found:
        raise ModelError(f"chat template {given[:256]}: neither a file nor one of {', '.join(sorted(NAMES))}")
    return file
