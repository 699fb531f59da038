"""The settings of the memory service."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct


class MemoryConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One memory service: the weights of one machine's CPU engines, or of one GPU's."""

    directory: Annotated[str, Meta(min_length=1)]
    """Directory of the socket, open to this user alone; made if it is missing, but not its parents. Workers name the
    same one as `weights.memory`."""
    size_bytes: Annotated[int, Meta(ge=0, le=1 << 46)] = 0
    """Most bytes of all weights together. 0 means half of the memory that this process may use."""
    keep_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Seconds that weights stay which no engine maps. 0 means until room is needed for others, or this process ends."""
    write_s: Annotated[float, Meta(gt=0, le=86400)] = 1800.0
    """Seconds that an engine may take to make weights; then the next that waits for them makes them."""
    log_level: str = "info"
    """Least level that is logged: debug, info, warning or error."""
    log_format: Literal["text", "json"] = "text"
    """Form of a line: text, `name=value` pairs; json, one object."""
