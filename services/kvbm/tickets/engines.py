"""Which engine processes are attached: of which worker, to which layout. Pure.

    unknown ──attach──▶ attached ──attach, the same layout──▶ attached ──its lock is free──▶ dead: unknown
                                └──attach, another layout or an older connection──▶ refused

An engine process stays with one layout, so that all tickets of an owner are in one place.

Requests of one connection come in order, those of two do not: kvbm may have read an old connection's requests, and
handle them after the first ones of the new connection. So a connection has a number, which is higher than those of all
connections that were made before. An Attach holds for its connection alone, and the newest connection wins: an Attach
that comes late would end tickets under which the engine writes.
"""

from __future__ import annotations

import math

from msgspec import Struct

from services.kvbm.tickets.errors import BadRequest, UnknownOwner, WrongLayout
from shared import subjects
from shared.messages.cards import KvLayout
from shared.messages.kvbm import Attach

DIMENSION_MOST = 1 << 20
"""The most layers, heads, dimensions or tokens of a block: no engine has more, and their products stay numbers."""
FORM_CHARACTERS_MOST = 8192
"""The most characters of a layout's form: it has a part for each rank of an engine."""
FORM_BYTES_MOST = 1 << 32
"""The most bytes of a block in a form of its own."""
NAME_CHARS = 1024
"""The most characters of a model's or weights' name: every account of the layout repeats them."""
DTYPES = ("float32", "float16", "bfloat16")


class AttachedEngine(Struct, frozen=True):
    """An engine process that has attached."""

    worker: str
    layout: str
    """The layout's digest."""
    reply_s: float
    """Seconds that it waits for each reply. 0 if it does not say."""
    connection: int
    """The number of the connection that it attached through."""


class AttachedEngines:
    """The attached engines, by owner."""

    def __init__(self) -> None:
        self._attached: dict[str, AttachedEngine] = {}

    def check(self, attach: Attach, connection: int) -> None:
        """Raise BadRequest if the request makes no sense, UnknownOwner if the owner has attached through a newer
        connection, WrongLayout if it is attached to another layout. Whether the owner lives is decided by its lock."""
        if not subjects.is_id(attach.worker):
            raise BadRequest(f"{attach.worker[:64]!r} is not an instance id of a worker")
        if max(len(attach.layout.model), len(attach.layout.weights)) > NAME_CHARS:
            raise BadRequest(f"the name of the model or of its weights has more than {NAME_CHARS} characters")
        _check_kv(attach.layout.kv)
        if not 0 <= attach.layout.rank < DIMENSION_MOST:
            raise BadRequest(f"rank {attach.layout.rank} is not between 0 and {DIMENSION_MOST - 1}")
        if not 0 <= attach.reply_s < math.inf:
            raise BadRequest(f"reply_s is {attach.reply_s}, which is no number of seconds")
        known = self._attached.get(attach.owner)
        if known is not None and connection < known.connection:
            raise UnknownOwner(attach.owner, "has attached through a newer connection")
        if known is not None and known.layout != attach.layout.digest:
            raise WrongLayout(f"owner {attach.owner!r} is attached to layout {known.layout}, and stays with it")

    def add(self, attach: Attach, connection: int) -> None:
        """Record the engine of a request that was checked."""
        engine = AttachedEngine(attach.worker, attach.layout.digest, attach.reply_s, connection)
        self._attached[attach.owner] = engine

    def remove(self, owner: str) -> bool:
        """Forget a dead engine. Return whether it was attached."""
        return self._attached.pop(owner, None) is not None

    def layout_of(self, owner: str, connection: int) -> str:
        """Return the digest of the layout of an engine that is attached through this connection. Raise UnknownOwner."""
        known = self._attached.get(owner)
        if known is None:
            raise UnknownOwner(owner)
        if known.connection != connection:
            raise UnknownOwner(owner, "is attached through another connection")
        return known.layout

    def reply_s(self, owner: str) -> float:
        """Return the seconds that an attached engine waits for each reply. 0 if it does not say."""
        return self._attached[owner].reply_s

    def get(self, owner: str) -> AttachedEngine | None:
        """Return the owner's latest Attach: another object after each."""
        return self._attached.get(owner)

    def of_worker(self, worker: str) -> list[tuple[str, str]]:
        """Return (owner, layout) of each engine of the worker."""
        return [(owner, engine.layout) for owner, engine in self._attached.items() if engine.worker == worker]

    def layouts(self) -> set[str]:
        """Return the layouts that have an attached engine."""
        return {engine.layout for engine in self._attached.values()}


def _check_kv(kv: KvLayout) -> None:
    if kv.form:
        if len(kv.form) > FORM_CHARACTERS_MOST or len(kv.dtype) > FORM_CHARACTERS_MOST:
            raise BadRequest(f"form or dtype of the layout have over {FORM_CHARACTERS_MOST} characters")
        if not 0 < kv.form_bytes <= FORM_BYTES_MOST:
            raise BadRequest(f"form_bytes of the layout is {kv.form_bytes}, not between 1 and {FORM_BYTES_MOST}")
    elif kv.form_bytes:
        raise BadRequest(f"form_bytes of the layout is {kv.form_bytes}, but it has no form")
    elif kv.dtype not in DTYPES:
        raise BadRequest(f"KV dtype {kv.dtype[:64]!r} is not one of {', '.join(DTYPES)}")
    for name in ("layers", "kv_heads", "head_dim", "block_size"):
        value = getattr(kv, name)
        if not 0 < value <= DIMENSION_MOST:
            raise BadRequest(f"{name} of the layout is {value}, not between 1 and {DIMENSION_MOST}")
