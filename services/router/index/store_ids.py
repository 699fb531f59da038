"""Which block store's blocks a worker can get, as its card says. Pure.

A *store* is one layout of one kvbm, named KVBM/LAYOUT: all that one worker can get there, and what events are told of.
"""

from __future__ import annotations

import msgspec

from shared.messages import ModelCard

Store = str
"""KVBM/LAYOUT; ids have no slash."""


def store(kvbm: str, layout: str) -> Store:
    """The store's name."""
    return f"{kvbm}/{layout}"


def store_of(card: ModelCard) -> Store | None:
    """The one that the card's instance is attached to, if it is to one."""
    return store(card.kvbm, card.kvbm_layout) if card.kvbm and card.kvbm_layout else None


def kvbm_of(name: Store) -> str:
    """The kvbm's instance id."""
    return name.partition("/")[0]


def layout_of(name: Store) -> str:
    """The layout's digest."""
    return name.partition("/")[2]


def same_worker(before: ModelCard, after: ModelCard) -> bool:
    """Whether the cards differ in what they are attached to at the most: then what the worker itself holds, and what
    runs there, is still true."""
    return msgspec.structs.replace(before, kvbm=after.kvbm, kvbm_layout=after.kvbm_layout) == after
