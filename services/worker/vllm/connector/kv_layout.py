"""Where vLLM keeps a block: the fragments of its layers' tensors, as a `BlockShape`. Pure; knows no torch.

vLLM gives a tensor a layer, whose axes depend on the attention backend:

    (2, blocks, tokens, heads, dim)       keys and values apart: two fragments a layer
    (blocks, 2, tokens, heads, dim)       together: one fragment
    (blocks, heads, tokens, dim), …       as above; memory may have the axes in another order (HND, NHD)
    (blocks, tokens, latent)              one fragment: latent attention

One axis counts blocks, or k times as many where the kernels' blocks are smaller; then k neighbours make a block. The
other axes are collapsed as far as they lie together, and what is left are the fragments, all of one size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import product
from math import prod

import msgspec
from msgspec import Struct

from services.worker.transfer.block_shape import BlockShape
from shared.errors import ConfigError

MOST_FRAGMENTS = 4096
"""Most fragments of a block: more of them would be copied one by one for each token."""


class TensorPlace(Struct, frozen=True):
    """One layer's tensor."""

    layer: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    element_bytes: int


def block_shape(places: Sequence[TensorPlace], blocks: int) -> tuple[BlockShape, str]:
    """Return where the blocks lie, and a digest of how their bytes are arranged: equal for two engines whose blocks
    have the same bytes in the same order, if their layers have the same backends. Layers that share a tensor are
    counted once. Raise ConfigError, naming the layer, where a tensor does not fit."""
    regions: list[int] = []
    forms: list[object] = []
    sizes: set[tuple[int, int]] = set()
    seen: dict[int, TensorPlace] = {}
    for place in places:
        other = seen.setdefault(place.address, place)
        if other is not place:
            if (other.shape, other.strides) != (place.shape, place.strides):
                raise ConfigError(f"layers {other.layer} and {place.layer} share memory, but not its shape")
            continue
        axis, parts = _block_axis(place, blocks)
        inner = [(extent, stride) for at, (extent, stride) in enumerate(_axes(place)) if at != axis]
        stride = place.strides[axis]
        if parts > 1:
            inner.append((parts, stride))
        run, rest = _collapse(inner)
        if prod(extent for extent, _ in rest) > MOST_FRAGMENTS:
            raise ConfigError(f"layer {place.layer}: a block has over {MOST_FRAGMENTS} fragments: {place}")
        sizes.add((run * place.element_bytes, stride * parts * place.element_bytes))
        for steps in product(*(range(extent) for extent, _ in rest)):
            offset = sum(step * size for step, (_, size) in zip(steps, rest, strict=True))
            regions.append(place.address + offset * place.element_bytes)
        order = sorted(range(len(place.shape)), key=lambda each: (-place.strides[each], each))
        forms.append([place.layer, [extent for at, extent in enumerate(place.shape) if at != axis], axis, order, parts])
    if len(sizes) != 1:
        raise ConfigError(f"the layers' blocks differ: (fragment, stride) in bytes are {sorted(sizes)}")
    [(fragment_bytes, stride_bytes)] = sizes
    shape = BlockShape(tuple(regions), fragment_bytes, stride_bytes, blocks)
    try:
        shape.validate()
    except AssertionError as wrong:
        raise ConfigError(f"the layers' tensors overlap: {wrong}") from None
    return shape, hashlib.sha256(msgspec.json.encode(forms)).hexdigest()[:16]


def _axes(place: TensorPlace) -> list[tuple[int, int]]:
    return list(zip(place.shape, place.strides, strict=True))


def _block_axis(place: TensorPlace, blocks: int) -> tuple[int, int]:
    """Return which of the first two axes counts blocks, and how many of its places make one."""
    for at, extent in enumerate(place.shape[:2]):
        if extent and extent % blocks == 0 and not (at == 0 and extent == 2 and place.shape[1] % blocks == 0):
            return at, extent // blocks
    raise ConfigError(f"layer {place.layer}: no axis of {place.shape} counts {blocks} blocks")


def _collapse(axes: Sequence[tuple[int, int]]) -> tuple[int, list[tuple[int, int]]]:
    """Return how many elements lie together, and the axes that are left, the outermost first."""
    run = 1
    rest = sorted((axis for axis in axes if axis[0] != 1), key=lambda axis: axis[1])
    while rest and rest[0][1] == run:
        run *= rest.pop(0)[0]
    return run, rest[::-1]
