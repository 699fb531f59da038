"""Finds a model's chat templates in its files, or the one that replaces them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from msgspec import Struct

from shared import chat_templates
from shared.errors import ModelError
from shared.model_file import (
    FILES,
    LIST_LIMIT_BYTES,
    PROCESSOR_TEMPLATE,
    TEMPLATE,
    TOKENIZER_CONFIG,
    TOOL_TEMPLATE,
    decode_model_json,
    read_model_file,
)


class Templates(Struct, frozen=True):
    """A model's chat templates, empty if it has none, and the digest of the files that they are in."""

    chat: str
    """The template for requests without tools."""
    tools: str
    """The template for requests with tools."""
    digest: str


def read_templates(directory: Path, given: str = "") -> Templates:
    """Return a model's templates. `given` is a name of shared.chat_templates, or the path of a file, that replaces its
    own. Raise ModelError.

    chat_template.jinja and additional_chat_templates/tool_use.jinja count before tokenizer_config.json, as in
    transformers, and this before chat_template.json, which belongs to models that take images.
    """
    if given:
        file = chat_templates.template_file(given)
        content = read_model_file(file, FILES[TEMPLATE])
        text = _text(file, content)
        return Templates(text, text, hashlib.sha256(content).hexdigest())
    texts = {"default": directory / TEMPLATE, "tool_use": directory / TOOL_TEMPLATE}
    texts = {name: file for name, file in texts.items() if file.exists()}
    objects = [] if "default" in texts else [directory / PROCESSOR_TEMPLATE, directory / TOKENIZER_CONFIG]
    named, digest = dict[str, str](), hashlib.sha256()
    for file in objects:
        content = read_model_file(file, LIST_LIMIT_BYTES, missing=b"")
        digest.update(content)
        stored = decode_model_json(file, content or b"{}", dict[str, Any]).get("chat_template")
        named = pick_templates(stored, str(file)) or named
    for name, file in texts.items():
        content = read_model_file(file, FILES[TEMPLATE])
        digest.update(content)
        named[name] = _text(file, content)
    chat = named.get("default", "")
    return Templates(chat, named.get("tool_use", chat), digest.hexdigest())


def pick_templates(stored: object, where: str) -> dict[str, str]:
    """Return the templates of a file's `chat_template`, a text or several with names, by their names; that of a text is
    default. Raise ModelError. *Pure.*"""
    if stored is None or isinstance(stored, str):
        return {"default": stored} if stored else {}
    if isinstance(stored, list) and all(isinstance(one, dict) for one in stored):
        stored = {one.get("name"): one.get("template") for one in stored}
    if isinstance(stored, dict):
        named = {name: stored[name] for name in ("default", "tool_use") if name in stored}
        if "default" in named and all(isinstance(text, str) for text in named.values()):
            return named
    raise ModelError(f"{where}: chat_template is neither a text nor a list with one named default")


def _text(file: Path, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as wrong:
        raise ModelError(f"{file}: {wrong}") from None
