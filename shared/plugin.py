"""Plug-ins: code that an operator names in the config as `module:attribute`.

A plug-in is foreign code. Whatever it raises becomes a ConfigError while it is loaded, and a text that can be sent
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from shared.errors import ConfigError

FAILURES = (Exception, SystemExit)
"""The exceptions that a plug-in may raise without ending the process."""
PROBLEM_LIMIT = 200
"""The maximum length of a problem's text, in characters."""


def load_plugin(kind: str, name: str, built_in: Iterable[str]) -> Callable[..., Any]:
    """Import the attribute that `name` says, as `module:attribute`. `kind` and `built_in` are for the error's text.

    Raise ConfigError if `name` has another form, or if there is no such attribute.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(f"{kind} {name}: not one of {', '.join(built_in)} and not module:attribute")
    try:
        found: Callable[..., Any] = getattr(import_module(module), attribute)
    except FAILURES as wrong:  # a module may do anything while it is imported
        raise ConfigError(f"{kind} {name}: {problem_of(wrong)}") from wrong
    return found


def problem_of(wrong: BaseException) -> str:
    """Return what a plug-in raised, as a text that can be sent."""
    try:
        text = f"{type(wrong).__name__}: {wrong}"
    except Exception:  # noqa: BLE001 - the exception's own __str__ may fail as well
        text = type(wrong).__name__
    return sendable(text, PROBLEM_LIMIT)


def sendable(text: str, limit: int) -> str:
    """Return the first `limit` characters of `text`, with `?` for those that UTF-8 cannot encode."""
    text = text[:limit]
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
