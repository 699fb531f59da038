"""Chat templates: messages to a prompt's text, as `transformers` renders them, in Jinja's sandbox.

A template comes with the model and is a program: it runs in the sandbox, its output is bounded, and whatever it raises
is the request's error (templates refuse conversations with `raise_exception`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import InvalidRequest, ModelError

RENDERED_LIMIT_CHARACTERS = 8 << 20
"""Twice the largest request body, in characters."""


class ChatTemplate:
    """One model's compiled template."""

    def __init__(self, source: str, tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now) -> None:
        """`tokens` are names such as `bos_token`, as tokenizer_config.json gives them. Raises ModelError."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.do", loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self._tokens = dict(tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as wrong:
            raise ModelError(f"the chat template, line {wrong.lineno}: {wrong.message}") from None
        except Exception as wrong:  # noqa: BLE001  a template is a plug-in: what Jinja makes of it may not compile
            raise ModelError(f"the chat template: {type(wrong).__name__}: {wrong}") from None

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt, ending where the assistant's answer begins. Raises InvalidRequest."""
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(messages=messages, add_generation_prompt=True, **self._tokens):
                pieces.append(piece)
                size += len(piece)
                if size > RENDERED_LIMIT_CHARACTERS:
                    raise InvalidRequest(
                        f"the prompt is longer than {RENDERED_LIMIT_CHARACTERS} characters", param="messages"
                    )
        except InvalidRequest:
            raise
        except TemplateError as wrong:
            raise InvalidRequest(f"the chat template refuses the messages: {wrong}", param="messages") from None
        except Exception as wrong:  # noqa: BLE001  a template is a plug-in: its expressions may raise anything
            raise InvalidRequest(
                f"the chat template fails on the messages: {type(wrong).__name__}: {wrong}", param="messages"
            ) from None
        return "".join(pieces)


def pick_template(given: object, where: str) -> str:
    """The template of tokenizer_config.json's `chat_template`: a text, or a list of named ones. Raises ModelError."""
    if given is None or isinstance(given, str):
        return given or ""
    if isinstance(given, list) and all(isinstance(one, dict) for one in given):
        named = {one.get("name"): one.get("template") for one in given}
        default = named.get("default")
        if isinstance(default, str):
            return default
    raise ModelError(f"{where}: chat_template is neither a text nor a list with one named default")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own: no HTML escaping."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
