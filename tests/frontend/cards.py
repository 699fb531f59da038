"""Cards and directories of models, for tests that read them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from shared.messages.cards import MODEL_CARD, ModelCard
from tests.frontend.peers import card_entry

Templated = Callable[[str], Path]
"""Returns the model's directory with another template; the fixture `templated`."""


def card_of(directory: Path) -> ModelCard:
    [value] = card_entry("w1", directory).values()
    return MODEL_CARD.decode(value, {"Content-Type": "application/json"})


HERMES = '{{ tools }}<tool_call>{"name": <name>}{{ messages[0].tool_calls }}</think>'
"""A template of the least that shows a format, and thinking."""


def with_template(copy: Path, template: object) -> Path:
    (copy / "tokenizer_config.json").write_bytes(msgspec.json.encode({"chat_template": template}))
    return copy
