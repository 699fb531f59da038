"""What the HTTP APIs of servers differ in, as one table, and how their metrics are read. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from services.worker.config import AttachedConfig
from services.worker.contracts.messages import Submit
from shared.errors import ConfigError
from shared.messages.frames import TokenLogprob
from shared.messages.generate import Sampling
from shared.messages.kv_events import KvEvent

Row = Callable[[Sampling, int], dict[str, Any]]
"""A field's part of a request, from the parameters and the number of earlier tokens. It raises InvalidRequest for what
the server cannot do."""


class ServerOutput(NamedTuple):
    """What one line of a stream brings."""

    tokens: Sequence[int] = ()
    finish: str | None = None
    """The server's word for the end."""
    cached_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: str = ""
    """Why the server ended the request."""


class ServerLoad(NamedTuple):
    """A server's metrics; `usage` is the share (0 … 1) of its blocks in use, `steps` grows while it computes."""

    running: float = 0.0
    waiting: float = 0.0
    usage: float = 0.0
    steps: float = 0.0


class Api(NamedTuple):
    """The API of one kind of server."""

    path: str
    """Path that prompts are posted to."""
    rows: dict[str, Row]
    """One row for each field of Sampling."""
    body: Callable[[Submit, AttachedConfig, str, dict[str, Any]], dict[str, Any]]
    """Returns the request for an attempt: the model's name and what the rows give are its last arguments."""
    read: Callable[[bytes, Submit, int], ServerOutput]
    """Returns what a line brings to an attempt that has N tokens (the last argument). Raises `text_only`, and
    msgspec.MsgspecError."""
    metrics: ServerMetrics
    sizes: tuple[str, Callable[[str], Sizes]]
    """The path whose answer says the sizes of its cache, and what reads them."""
    events: Callable[[bytes], list[KvEvent]]
    """Reads a batch of its KV events. Raises msgspec.MsgspecError."""


Sizes = tuple[int, int, int]
"""Tokens of a block, number of blocks, data-parallel ranks; 0 is unknown."""
ServerMetrics = tuple[str, str, str, str]
"""The names of the metrics of a ServerLoad, in its order."""


def same(*names: str) -> dict[str, Row]:
    """Return the rows of fields that the server has, too."""

    def row(name: str) -> Row:
        return lambda sampling, _: {name: getattr(sampling, name)}

    return {name: row(name) for name in names}


def read_metrics(text: str, names: ServerMetrics) -> ServerLoad:
    """Return the sums of these metrics over all labels, of the usage the mean. Raise ValueError."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for line in text.splitlines():
        name = re.split("[{ ]", line, maxsplit=1)[0]
        if name in found:
            _, _, rest = line.rpartition("}") if "}" in line else line.partition(" ")
            value = float(rest.split()[0]) if rest.split() else math.nan  # a time may follow
            if not math.isfinite(value):
                raise ValueError(f"{name} has no number: {line[:128]}")
            found[name].append(value)
    running, waiting, usage, steps = (sum(values) for values in found.values())
    return ServerLoad(running, waiting, usage / max(1, len(found[names[2]])), steps)


def text_only() -> ConfigError:
    """Return the error for a server that has no token ids in its answers."""
    return ConfigError("attached.url: the server answers text for token ids")
