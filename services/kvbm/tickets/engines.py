"""Which engine processes are attached: of which worker, to which layout. Pure.

    unknown ──attach──▶ attached ──attach, the same layout──▶ attached ──its lock is free──▶ dead: unknown
                                └──attach, another layout──▶ refused

An engine process stays with one layout, so that one owner's tickets are in one place.
"""

from __future__ import annotations

from msgspec import Struct

from services.kvbm.tickets.errors import BadRequest, UnknownOwner, WrongLayout
from shared import subjects
from shared.kvbm_messages import Attach
from shared.messages import KvLayout

MOST_OF_ANYTHING = 1 << 20
"""Layers, heads, dimensions, tokens a block: no engine has so many, and products stay numbers."""
NAME_CHARS = 1024
"""Of a model and its weights: they are in every account of the layout."""
DTYPES = ("float32", "float16", "bfloat16")


class AttachedEngine(Struct, frozen=True):
    """One engine process."""

    worker: str
    layout: str
    """Its digest."""


class AttachedEngines:
    """By owner."""

    def __init__(self) -> None:
        self._attached: dict[str, AttachedEngine] = {}

    def check(self, attach: Attach) -> None:
        """Raises BadRequest where it makes no sense, WrongLayout where the owner has another one. That the owner lives
        is for its lock to say."""
        if not subjects.is_id(attach.worker):
            raise BadRequest(f"{attach.worker[:64]!r} is no worker's id")
        if max(len(attach.layout.model), len(attach.layout.weights)) > NAME_CHARS:
            raise BadRequest(f"a model or weights whose names have over {NAME_CHARS} characters")
        _check_kv(attach.layout.kv)
        if not 0 <= attach.layout.rank < MOST_OF_ANYTHING:
            raise BadRequest(f"rank {attach.layout.rank}")
        known = self._attached.get(attach.owner)
        if known is not None and known.layout != attach.layout.digest:
            raise WrongLayout(f"owner {attach.owner!r} is attached to layout {known.layout}, and stays with it")

    def add(self, attach: Attach) -> None:
        """It was checked, and is."""
        self._attached[attach.owner] = AttachedEngine(attach.worker, attach.layout.digest)

    def remove(self, owner: str) -> bool:
        """Whether it was attached."""
        return self._attached.pop(owner, None) is not None

    def layout_of(self, owner: str) -> str:
        """Of one that is attached. Raises UnknownOwner."""
        known = self._attached.get(owner)
        if known is None:
            raise UnknownOwner(owner)
        return known.layout

    def of_worker(self, worker: str) -> list[tuple[str, str]]:
        """(owner, layout) of each."""
        return [(owner, engine.layout) for owner, engine in self._attached.items() if engine.worker == worker]

    def layouts(self) -> set[str]:
        """That have an engine."""
        return {engine.layout for engine in self._attached.values()}


def _check_kv(kv: KvLayout) -> None:
    if kv.dtype not in DTYPES:
        raise BadRequest(f"KV of type {kv.dtype[:64]!r}: not one of {', '.join(DTYPES)}")
    for name in ("layers", "kv_heads", "head_dim", "block_size"):
        value = getattr(kv, name)
        if not 0 < value <= MOST_OF_ANYTHING:
            raise BadRequest(f"a layout with {name} {value}")
