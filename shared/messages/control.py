"""anyone → service, on its `control` subject: is it alive, what does it know of a request, what does it log. Pure."""

from __future__ import annotations

from msgspec import Struct

from shared.messages.codec import Codec


class Ping(Struct, frozen=True, tag="ping"):
    """Ask a process, on its `control` subject, whether it lives."""

    key: str = ""
    """A key of discovery: the question is whether the process still publishes it. Empty if there is no such
    question."""


class ChangeLogLevel(Struct, frozen=True, tag="change_log_level"):
    """Ask a process, on its `control` subject, to log from another level on."""

    level: str
    """debug, info, warning or error."""
    for_s: float = 0.0
    """The seconds after which the level is again what it was. 0 if it stays."""


class FindNotes(Struct, frozen=True, tag="find_notes"):
    """Ask a process, on its `control` subject, what it remembers of requests, or of one block."""

    request: str = ""
    """The id of a request, or what `shared.request_names` takes for one. Empty if all requests are meant."""
    block: str = ""
    """The last 16 hex digits of a block's key, or all 32. Empty if requests are meant."""


class Note(Struct, frozen=True):
    """One thing that happened to a request or to a block."""

    about: str
    """The request's id, or the block's key in hex."""
    age_s: float
    text: str
    attempt: int = 0
    """The number of the request's attempt. 0 means the request as a whole, or a block."""


class FoundNotes(Struct, frozen=True, tag="found_notes"):
    """What one process remembers, oldest first, and where it has the block now."""

    service: str
    instance: str
    notes: list[Note]
    places: list[str] = []
    """Where the block is now in this process, and why it stays or goes, one line a place; empty for a request."""
    failed: str = ""
    """Why there is no answer. Empty if there is one."""


class LogLevelChanged(Struct, frozen=True, tag="log_level_changed"):
    """The answer to ChangeLogLevel."""

    instance: str
    failed: str = ""
    """Why the level was not changed. Empty if it was."""


class Pong(Struct, frozen=True, tag="pong"):
    """The process lives."""

    instance: str
    epoch: int
    progress: int = 0
    """The engine's number of steps so far, if there is an engine."""
    publishes: bool | None = None
    """Whether this process publishes `Ping.key`. None if it was not asked, or does not say."""


PING: Codec[Ping] = Codec(Ping, "ping")
CONTROL: Codec[Ping | ChangeLogLevel | FindNotes] = Codec(Ping | ChangeLogLevel | FindNotes, "control")
FOUND_NOTES: Codec[FoundNotes] = Codec(FoundNotes, "found notes")
LOG_LEVEL_CHANGED: Codec[LogLevelChanged] = Codec(LogLevelChanged, "log level")
PONG: Codec[Pong] = Codec(Pong, "pong")
