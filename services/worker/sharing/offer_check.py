"""Whether a reader may believe an offer, before it maps a byte; and whether a sharer may serve a reader. Pure."""

from __future__ import annotations

from services.worker.sharing.messages import MOST_DESCRIPTORS, PROTOCOL, Import, Offer, SharingIdentity, SlotShape
from services.worker.sharing.shares import SharingRefused
from services.worker.transfer.block_shape import BlockShape

MOST_REGIONS = 4096
"""The most fragments of a block."""


def check_import(asked: Import, identity: SharingIdentity, generation: int) -> None:
    """Raise SharingRefused if this memory is not what the reader asks for."""
    if asked.protocol != PROTOCOL:
        raise SharingRefused("protocol", f"protocol {asked.protocol}, here {PROTOCOL}")
    _check_same(asked.wanted, identity)
    if asked.generation not in (0, generation):
        raise SharingRefused("generation", f"generation {asked.generation} is gone; here is {generation}")


def check_offer(offer: Offer, asked: Import, own: BlockShape, descriptors: int, sharer: str) -> None:
    """Raise SharingRefused if an offer is not what was asked for, or its blocks are not shaped like our own."""
    if offer.protocol != PROTOCOL:
        raise SharingRefused("protocol", f"protocol {offer.protocol}, here {PROTOCOL}")
    if offer.owner != sharer:
        raise SharingRefused("unproven", f"the offer comes from {offer.owner}, not from {sharer}")
    _check_same(offer.identity, asked.wanted)
    if asked.generation not in (0, offer.generation):
        raise SharingRefused("generation", f"generation {offer.generation}, asked for was {asked.generation}")
    if not 1 <= descriptors <= MOST_DESCRIPTORS:
        raise SharingRefused("memory", f"{descriptors} descriptors came with the offer")
    shape = offer.shape
    theirs, ours = (len(shape.regions), shape.fragment_bytes), (own.fragments, own.fragment_bytes)
    if theirs != ours:
        raise SharingRefused("layout", f"blocks of {theirs[0]} x {theirs[1]} bytes, here {ours[0]} x {ours[1]}")
    _check_bounds(shape, offer.size_bytes)


def _check_same(one: SharingIdentity, other: SharingIdentity) -> None:
    for code in ("kind", "model", "dtype", "layout", "rank"):
        theirs, ours = getattr(one, code), getattr(other, code)
        if theirs != ours:
            raise SharingRefused(code, f"{code} is {theirs}, here {ours}")
    if one.ranks != other.ranks:
        raise SharingRefused("rank", f"one of {one.ranks} ranks, here of {other.ranks}")


def _check_bounds(shape: SlotShape, size_bytes: int) -> None:
    """Raise SharingRefused unless every byte of every slot lies within the memory."""
    if not 0 < len(shape.regions) <= MOST_REGIONS or not 0 < shape.fragment_bytes <= shape.stride_bytes:
        raise SharingRefused("layout", "the offer has no fragments, too many, or ones larger than their distance")
    if (
        shape.slots < 1
        or max(shape.regions) + (shape.slots - 1) * shape.stride_bytes + shape.fragment_bytes > size_bytes
    ):
        raise SharingRefused("memory", f"slots beyond the {size_bytes} bytes that are shared")
