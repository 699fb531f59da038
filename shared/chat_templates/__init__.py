"""Finds the file with a model's chat template: one of those here, another file, or the model's own."""

from __future__ import annotations

from pathlib import Path

from shared.errors import ModelError

_HERE = Path(__file__).parent
NAMES = frozenset(file.stem for file in _HERE.glob("*.jinja"))
"""The names of the templates here."""


def template_file(directory: Path, given: str = "") -> Path:
    """Return the file with the chat template of the model in `directory`; it may be missing if the model has none.

    `given` is the name of a template here, or the path of a file, which replaces the model's own. Raises ModelError.
    """
    if given in NAMES:
        return _HERE / f"{given}.jinja"
    if given:
        file = Path(given)
        try:
            found = file.is_file()
        except (OSError, ValueError) as wrong:  # a card may name anything
            raise ModelError(f"chat template {given[:256]!r}: {wrong}") from None
        if not found:
            raise ModelError(f"chat template {given[:256]}: neither a file nor one of {', '.join(sorted(NAMES))}")
        return file
    own = directory / "chat_template.jinja"
    return own if own.exists() else directory / "tokenizer_config.json"
